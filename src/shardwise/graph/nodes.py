"""What stands in a program beside torch's ops: functions that only mean something where the program runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.comm.port import Handle
from shardwise.comm.ring import ring_bytes_of
from shardwise.dispatch.planning.randomness import default_generator
from shardwise.layout import Mesh


@dataclass(frozen=True)
class Collective:
    """A collective of the ranks along some axes, given what the ranks held here bring: a list, as a port takes it.

    An all-reduce that is given tensors of its own may leave its result in their memory.
    """

    kind: str
    mesh: Mesh
    axes: tuple[int, ...]
    how: Any
    owned: bool = field(default=False, compare=False)

    @property
    def __name__(self) -> str:
        return self.kind

    def __call__(self, brought: Sequence[Any]) -> list[Any]:
        return getattr(self.mesh.port, self.kind)(brought, self.mesh, self.axes, self.how, **self._options)

    def start(self, brought: Sequence[Any]) -> list[Begun]:
        """Begin it: what each of the ranks held here may wait for."""
        run = getattr(self.mesh.port, f"start_{self.kind}")
        handle = run(brought, self.mesh, self.axes, self.how, **self._options)
        return [Begun(handle, rank) for rank in range(len(brought))]

    @property
    def _options(self) -> dict[str, bool]:
        return {"owned": True} if self.owned else {}

    def __hash__(self) -> int:
        return hash((self.kind, self.mesh, self.axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.names[axis] for axis in self.axes)

    @property
    def ranks(self) -> int:
        """In each group."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def wire_bytes(self, brought: int) -> int:
        """What one rank sends, by the ring model, that brings so many bytes."""
        return math.ceil(ring_bytes_of(self.kind, brought, self.ranks))

    def __str__(self) -> str:
        op = f"{self.how}, " if self.kind in ("all_reduce", "reduce_scatter") else ""
        return f"{self.kind}({op}{','.join(self.axis_names)})"


@dataclass(frozen=True)
class Start:
    """A collective that goes on while the program does, until it is waited for."""

    collective: Collective

    @property
    def __name__(self) -> str:
        return f"start_{self.collective.kind}"

    def __call__(self, brought: Sequence[Any]) -> list[Begun]:
        return self.collective.start(brought)

    def __str__(self) -> str:
        return f"start {self.collective}"


class Begun:
    """A collective under way, as one of the ranks held here knows it."""

    __slots__ = ("handle", "rank")

    def __init__(self, handle: Handle[list[Any]], rank: int) -> None:
        self.handle, self.rank = handle, rank


def wait(begun: Begun) -> Any:
    """What a collective brings this rank, once it has."""
    return begun.handle.wait()[begun.rank]


def collective_at(target: Collective | Start) -> Collective:
    """The collective that is made, or started."""
    return target.collective if isinstance(target, Start) else target


def collective_of(node: fx.Node) -> Collective | None:
    """The collective that a node makes, or starts."""
    target: Any = node.target
    return collective_at(target) if isinstance(target, (Collective, Start)) else None


@dataclass(frozen=True)
class Draw:
    """A number drawn on the host, where the program comes to it."""

    draw: Callable[[], int]
    __name__ = "draw"

    def __call__(self) -> int:
        return self.draw()


@dataclass(frozen=True)
class Seeded:
    """An op that draws from a stream of its own: `start` is a seed, or the state in which another op left the stream.
    If the stream goes on after it, it gives its state too."""

    op: Any
    stream: int
    goes_on: bool

    @property
    def __name__(self) -> str:
        return f"seeded_{self.op.overloadpacket.__name__}"

    def __call__(self, start: int | Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = default_generator(_device_of(args))
        if generator is None:
            out = self.op(*args, **kwargs)
            return (out, start) if self.goes_on else out
        before = generator.get_state()
        try:
            if isinstance(start, Tensor):
                generator.set_state(start)
            else:
                generator.manual_seed(start + self.stream)
            out = self.op(*args, **kwargs)
            return (out, generator.get_state()) if self.goes_on else out
        finally:
            generator.set_state(before)


def _device_of(args: Sequence[Any]) -> torch.device:
    return next((x.device for x in args if isinstance(x, Tensor)), torch.device("cpu"))


@dataclass(frozen=True)
class Check:
    """Raises for a number that is bad."""

    verify: Callable[[Any], None]
    __name__ = "check"

    def __call__(self, found: Tensor) -> None:
        self.verify(found.item())


def recurrent_layer(*args: Any, **kwargs: Any) -> Any:
    """oneDNN's kernel, which keeps what its backward pass needs only where gradients are recorded."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args, **kwargs)


def op_of(node: fx.Node) -> Any:
    """The op of torch's that a node runs, if it does: the overload, whatever stream it draws from."""
    return node.target.op if isinstance(node.target, Seeded) else node.target


def is_op(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def written(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    op = op_of(node)
    if node.op != "call_function" or not is_op(op) or not op._schema.is_mutable:
        return []
    given = node.args[1:] if isinstance(node.target, Seeded) else node.args
    found: list[fx.Node] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given[position] if position < len(given) else node.kwargs.get(argument.name)
            fx.map_arg(value, found.append)
    return found


_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten._unsafe_view.default})


def may_be_view(node: fx.Node) -> bool:
    """Whether the result of an op lies in the memory of an argument, as far as its schema says. An op that is made of
    others may do so, whatever it says."""
    return is_op(node.target) and _may_give_view(node.target)


@lru_cache(maxsize=4096)
def _may_give_view(op: Any) -> bool:
    if op._schema.is_mutable:
        return False
    return op in _ALIASES or any(x.alias_info is not None for x in op._schema.returns) or is_composite(op)


@lru_cache(maxsize=4096)
def is_composite(op: Any) -> bool:
    """Whether an op is made of others."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def bases_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the one in whose memory its result lies: its own, unless it is a view."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        given = node.all_input_nodes if may_be_view(node) or _is_part_of_view(node) else ()
        found[node] = found[given[0]] if given else node
    return found


def _is_part_of_view(node: Any) -> bool:
    return node.target is operator.getitem and may_be_view(node.args[0])


def has_effects(node: fx.Node) -> bool:
    """Whether a node does more than to give a result: it writes to its arguments, draws, communicates, or raises."""
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, (Check, Collective, Start, Draw)):
        return True
    op = op_of(node)
    return bool(is_op(op) and (op._schema.is_mutable or draws(node)))


def draws(node: fx.Node) -> bool:
    """Whether an op draws from a generator that others draw from."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and _is_random(node)


def _is_random(node: fx.Node) -> bool:
    """Of attention torch says that it draws, dropout or not."""
    op: Any = node.target
    if "dropout_p" not in (names := [argument.name for argument in op._schema.arguments]):
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)
