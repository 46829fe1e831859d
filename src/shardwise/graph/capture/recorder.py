"""The recorder: a dispatch mode under which every op that reaches torch's dispatcher becomes a node of a program.

Ops run on shards without data: torch's fake tensors, of the real device, so that its kernels are chosen. Whatever real
tensor the program touches, however it came by it, becomes an input: parameters, buffers, an optimizer's state, what is
in closures. So nothing has to be handed in, or put in the place of something else.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_any, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardwise.comm import shards_of
from shardwise.comm.cause import users_line
from shardwise.comm.faked import as_fakes, device_of, is_faked
from shardwise.comm.record import Comm
from shardwise.errors import CaptureError
from shardwise.graph.capture.borrowed import Borrowed
from shardwise.graph.capture.host import Host
from shardwise.graph.capture.numbers import GUESS, SYMBOLIC, Number, is_ours, symbolic
from shardwise.graph.capture.optimizers import Groups
from shardwise.graph.nodes import Check, Collective, Draw, Seeded, recurrent_layer, written
from shardwise.graph.program import Facts, Line, at
from shardwise.layout import Mesh

_no_functions = torch._C.DisableTorchFunction
_aten, _prim = torch.ops.aten, torch.ops.prim
_seq_nr = torch.autograd._get_sequence_nr
_running_node = torch._C._current_autograd_node

_AS_LONG_AS_NUMBERS_SAY = frozenset({_aten.arange, _aten.range})

NODE = "_node"
"""Under this name a tensor without data knows the node that makes it."""


class _Stream:
    """A stream of random numbers: ops draw from it one after the other."""

    def __init__(self, seed: fx.Node, number: int) -> None:
        self.start, self.number = seed, number
        self.last: tuple[fx.Node, Any] | None = None


class Recorder(TorchDispatchMode):
    """Records one run of a program."""

    def __init__(self, groups: Groups, borrowed: Borrowed) -> None:
        super().__init__()
        self.groups, self.meet, self.is_alike_beside = groups, borrowed.meet, borrowed.is_alike_beside
        self.graph, self.host = fx.Graph(), Host()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs: dict[int, tuple[Tensor, fx.Node]] = {}
        """Real tensors that the program touched, by their ids."""
        self.arguments: set[int] = set()
        """Ids of tensors that the program is given: their gradients flow on."""
        self.constants: list[tuple[Tensor, fx.Node]] = []
        self.conditions: dict[fx.Node, Any] = {}
        """Numbers that the program needed to know, and what they were."""
        self.comms: list[Comm] = []
        """Listens to the record of collectives."""
        self._standing_for: dict[int, Tensor] = {}
        self._last_input: fx.Node | None = None
        self._is_silent = False
        self._stream: _Stream | None = None
        self._seeds: dict[int, fx.Node] = {}
        self._lines: dict[int, Line] = {}
        self.tangents: list[fx.Node] = []
        """Placeholders of gradients that a backward pass of the program's results begins with."""
        self.is_backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import all of torch._dynamo to keep it out of here

    # Ops

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is _prim.device.default:
            return device_of(args[0])
        leaves, spec = tree_flatten((args, kwargs or {}))
        if func.namespace in ("prim", "profiler") or self._is_silent:
            return _run(func, leaves, spec)
        if func is _aten.lift_fresh.default and not is_faked(leaves[0]):
            return self._constant(leaves[0])
        shown: list[Any] = [self._shown(x) if isinstance(x, Tensor) else x for x in leaves]
        if func is _aten._local_scalar_dense.default:
            return self._number(shown[0])
        if func.overloadpacket in _AS_LONG_AS_NUMBERS_SAY:
            shown = [x.node.guard_float("", 0) if is_ours(x) else x for x in shown]
        try:
            out = _run(func, [x.node.value if is_ours(x) else x for x in shown], spec)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise _needs_data(f"what {func.overloadpacket.__name__} gives is as long as they say") from None
        node = self._add(func, shown, spec, out)
        targets = written(node)
        changed = [x for x in shown if isinstance(x, Tensor) and x.__dict__[NODE] in targets]
        node.meta["host"] = self.host.compute(func, shown, spec, out, changed)
        return out

    def _add(self, func: Any, shown: Sequence[Any], spec: Any, out: Any) -> fx.Node:
        args, kwargs = tree_unflatten([_node_of(x) for x in shown], spec)
        stream = self._stream
        if stream is not None and torch.Tag.nondeterministic_seeded in func.tags:
            start = stream.start if stream.last is None else _goes_on(*stream.last)
            node = self._call(Seeded(func, stream.number, goes_on=False), (start, *args), kwargs)
            stream.last = node, out
        else:
            node = self._call(recurrent_layer if func is _aten.mkldnn_rnn_layer.default else func, args, kwargs)
        self._bind(node, out)
        return node

    def _call(self, target: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["line"] = self._line()
        if self.is_backward:
            node.meta["backward"] = True
        return node

    def _line(self) -> Line:
        """A node of a backward pass has the line of the forward call whose gradient it is part of."""
        running: Any = _running_node()
        if running is not None:
            known = self._lines.get(running._sequence_nr())
            if known is not None:
                return Line(known.file, known.number, True)
        file, number, _ = users_line()
        line = Line(file, number, running is not None)
        if running is None:
            self._lines[_seq_nr()] = line  # that of the node which autograd makes next
        return line

    def _bind(self, node: fx.Node, out: Any) -> None:
        """Have what a node gives know it."""
        if isinstance(out, Tensor):
            if NODE not in out.__dict__:
                out.__dict__[NODE] = node
                node.meta["facts"] = Facts.of(out)
        elif isinstance(out, (list, tuple)):
            for position, part in enumerate(out):
                if tree_any(_is_new, part):
                    self._bind(self._part_of(node, position), part)

    def _part_of(self, node: fx.Node, position: int) -> fx.Node:
        part = self.graph.call_function(operator.getitem, (node, position))
        if self.is_backward:
            part.meta["backward"] = True
        return part

    # Real tensors

    def _shown(self, x: Tensor) -> Tensor:
        """A tensor without data, for an argument: itself, or what stands for a real one."""
        if is_faked(x):
            if NODE not in x.__dict__ or x.__dict__[NODE].graph is not self.graph:
                raise CaptureError(
                    f"the program uses a tensor of shape {list(x.size())}{at(_users_place())} that has no data, since "
                    f"it was left behind by a capture, in an attribute or a list say: what is kept from call to call "
                    f"must be returned, or written to in place"
                )
            return x
        found = self._standing_for.get(id(x))
        return found if found is not None else self._lift(x)

    def _lift(self, x: Tensor) -> Tensor:
        with _disable_current_modes(), _no_functions():
            if x.grad_fn is not None and id(x) not in self.arguments:
                raise CaptureError(
                    f"the program uses a tensor of shape {list(x.size())}{at(_users_place())} that was computed "
                    f"outside of it and needs a gradient, which could not flow back: detach() it, or compute it inside"
                )
            plain = x.detach()
            host = plain.clone() if x.device.type == "cpu" and x.numel() == 1 and not x.dim() else None
        made = self.fakes.from_tensor(plain)
        node = self.placeholder(f"input{len(self.inputs)}")
        self._bind(node, made)
        if host is not None:
            self.host.know(made, host)
        self._standing_for[id(x)] = made
        self.inputs[id(x)] = x, node
        return made

    def placeholder(self, name: str) -> fx.Node:
        before = self._last_input
        with self.graph.inserting_before() if before is None else self.graph.inserting_after(before):
            self._last_input = self.graph.placeholder(name)
        return self._last_input

    def _constant(self, x: Tensor) -> Tensor:
        """A tensor that the program makes of numbers of Python's."""
        with _disable_current_modes(), _no_functions():
            kept = x.clone()
            host = kept.clone() if kept.numel() == 1 and kept.device.type == "cpu" else None
        made = self.fakes.from_tensor(kept)
        node = self.placeholder(f"constant{len(self.constants)}")
        node.meta["constant"] = True
        self.constants.append((kept, node))
        copied = self._call(_aten.clone.default, (node,))  # the program may write to it
        copied.meta["host"] = host is not None
        self._bind(copied, made)
        if host is not None:
            self.host.know(made, host, is_fixed=True)
        return made

    def tangent(self, x: Tensor) -> Tensor:
        """A gradient of `x`, from outside of the program."""
        self._is_silent = True
        try:
            made = torch.empty_like(x)
        finally:
            self._is_silent = False
        node = self.placeholder(f"tangent{len(self.tangents)}")
        self._bind(node, made)
        self.tangents.append(node)
        return made

    def forget_backward(self) -> None:
        """Take back what was recorded of a backward pass that could not be made."""
        made = [node for node in self.graph.nodes if node.meta.get("backward") or node in self.tangents]
        for node in reversed(made):
            self.graph.erase_node(node)
        self._last_input = next((node for node in reversed(self.graph.nodes) if node.op == "placeholder"), None)
        self.tangents, self.is_backward = [], False

    def node_of(self, x: Tensor) -> fx.Node:
        """The node that makes a tensor of the program, or that is an input."""
        return _node_of(self._shown(x))

    # What happens on the host (`comm.captured.Noter`)

    def _number(self, x: Tensor) -> Any:
        known = self.host.value_of(x)
        if known is None:
            return self._number_of_data(x)
        with _disable_current_modes():
            value = known.item()
        if self.host.is_fixed(x) or isinstance(value, complex):
            return value
        node = self._call(_aten._local_scalar_dense.default, (_node_of(x),))
        node.meta["number"] = type(value)
        return symbolic(value, node, self.conditions.__setitem__)

    def _number_of_data(self, x: Tensor) -> Any:
        """A number that nobody knows before the program runs. Python may compute with it, if it can be no size."""
        if not x.dtype.is_floating_point:
            _refuse()
        node = self._call(_aten._local_scalar_dense.default, (_node_of(x),))
        node.meta.update(number=float, data=True)
        return symbolic(GUESS, node, _refuse)

    def _given(self, value: float, name: str) -> tuple[Any, fx.Node]:
        """A number that every run is given."""
        node = self.placeholder(name)
        node.meta["number"] = type(value)
        return symbolic(value, node, self.conditions.__setitem__), node

    def step(self, optimizer: Any) -> None:
        for x in tree_leaves([*optimizer.state.values()]):
            if isinstance(x, Tensor):
                self.meet(x)  # in a hook of a backward pass, nobody else does
        self.groups.take(optimizer, self._given)

    def hand_out(self, name: str) -> None:
        raise _needs_data(f"{name} hands out what is in a tensor")

    def set_data(self, x: Tensor, data: Tensor) -> None:
        if not is_faked(x):
            raise CaptureError(
                f"the program replaces the data of a tensor of shape {list(x.size())}{at(_users_place())}, which only "
                f"Python would do in every run: write to it in place (copy_)"
            )
        x.__dict__[NODE] = _node_of(self._shown(data))
        self.host.forget(x)

    def collective(
        self, kind: str, brought: Sequence[Any], mesh: Mesh, axes: tuple[int, ...], how: Any, made: Callable[[Any], Any]
    ) -> list[Any]:
        shown = tree_map_only(Tensor, self._shown, list(brought))
        before, self._is_silent = self._is_silent, True
        try:
            out = made(shown)
        finally:
            self._is_silent = before
        node = self._call(Collective(kind, mesh, axes, how), (tree_map_only(Tensor, _node_of, shown),))
        if self.comms:
            node.meta["comm"] = self.comms[-1]
        self._bind(node, out)
        return out

    def seed(self, draw: Callable[[], int]) -> fx.Node:
        """The same number is the same node: a checkpoint puts generators back, and draws again."""
        with _disable_current_modes():
            value = draw()
        if value not in self._seeds:
            self._seeds[value] = self._call(Draw(draw), ())
            self._seeds[value].meta["number"] = int
        return self._seeds[value]

    @contextmanager
    def stream(self, seed: fx.Node, number: int) -> Iterator[None]:
        around, self._stream = self._stream, _Stream(seed, number)
        try:
            yield
        finally:
            self._stream = around

    def check(self, found: Tensor, verify: Callable[[Any], None]) -> None:
        self._call(Check(verify), (self.node_of(found),))


def _run(func: Any, leaves: Sequence[Any], spec: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return as_fakes(func, args, kwargs)


def _is_new(x: Any) -> bool:
    return isinstance(x, Tensor) and NODE not in x.__dict__


def _note_layout(x: Tensor, layout: Any) -> None:
    """A DTensor's layout is that of the shards of all ranks held here."""
    for shard in shards_of(x):
        if NODE in shard.__dict__:
            shard.__dict__[NODE].meta.setdefault("layout", layout)


def _node_of(x: Any) -> Any:
    """What stands in a program for an argument of an op."""
    if isinstance(x, Tensor):
        layout = x.__dict__.get("_layout")
        node: fx.Node = x.__dict__[NODE]
        if layout is not None:
            _note_layout(x, layout)
        return node
    if isinstance(x, SYMBOLIC):
        if not isinstance(x.node, Number):
            raise CaptureError(
                "sizes are numbers in a program that is captured, not symbols: call shardwise.compile outside of "
                "torch.compile and torch.export"
            )
        return x.node.node
    if isinstance(x, torch.Generator):
        raise CaptureError(
            f"the program draws from a torch.Generator of its own{at(_users_place())}, which it cannot be given: draw "
            f"from torch's default generator (torch.manual_seed), or hand in what was drawn"
        )
    return x


def _goes_on(node: fx.Node, out: Any) -> fx.Node:
    """The state in which an op leaves the stream that it draws from."""
    seeded: Seeded = node.target  # type: ignore[assignment]
    node.target = Seeded(seeded.op, seeded.stream, goes_on=True)
    with node.graph.inserting_after(node):
        state = node.graph.call_function(operator.getitem, (node, 1))
        result = node.graph.call_function(operator.getitem, (node, 0))
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in (state, result))
    result.meta.update(node.meta)
    if isinstance(out, Tensor):
        out.__dict__[NODE] = result
    return state


def _refuse(*_: Any) -> None:
    raise _needs_data(f"a number is read out of a tensor{_by_torch()}")


def _users_place() -> Line:
    file, number, _ = users_line()
    return Line(file, number, False)


def _by_torch() -> str:
    """Which optimizer of torch's, or what else that a user does not see into, reads it; and what to do instead."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        this = frame.f_locals.get("self")
        if type(this).__module__.startswith(("torch.optim", "torch.amp")):
            name = type(this).__name__
            return f" by {name}{_INSTEAD.get(name, '')}"
        frame = frame.f_back
    return ""


_INSTEAD = {"GradScaler": " (an optimizer with fused=True looks by itself for gradients that are not finite)"}


def _needs_data(what: str) -> CaptureError:
    return CaptureError(
        f"the program depends on the data it computes{at(_users_place())}: {what}. A captured program does the same in "
        f"every run: compute with tensors (torch.where instead of if), return the tensor and look at it outside, or "
        f"capture less; fullgraph=False runs such a function as it is"
    )
