"""Where the gradients of all ranks' shards of a tensor meet, so that a hook on it sees them as one.

The simulator runs the backward passes of all ranks at once. A hook needs the gradients of all shards of its tensor, and
the engine hands them over one by one, each when it is about to be used. But it runs nodes in the order opposite to
their making, so whatever contributes to any of the shards has run by then. Contributions are therefore noted on their
way, by hooks on the nodes that they come from, which are looked for when a pass begins; and the first shard whose turn
it is finds all of them. The tensor, its history and its uses stay as they are, whenever the hook comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

_disabled = torch._C.DisableTorchFunctionSubclass
_size = torch._C.TensorBase.size
_Function = torch._C._FunctionBase
_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_task = torch._C._current_graph_task_id
_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback

PLACES = "_rendezvous"
"""Under this name a node, or a leaf, knows what meets there: by the number of the output, a rendezvous and a rank."""

NOTED = "shardwise.noted"
"""Under this name a node knows whose contributions are noted, by their positions."""

rendezvous: WeakSet[Rendezvous] = WeakSet()
"""All there are. While there are none, a pass looks for nothing."""

Gradients = Sequence[Tensor | None]


class Rendezvous:
    """The place in the graph of one tensor's shards, with its hooks. `run` calls these on the gradients of all ranks,
    and returns what they put in their place, if anything."""

    __slots__ = ("__weakref__", "calls", "kinds", "passes", "run")

    def __init__(self, shards: Sequence[Tensor], run: Callable[[list[Callable], Gradients], Gradients | None]) -> None:
        self.calls: OrderedDict[int, Callable] = OrderedDict()
        self.kinds = [(_size(x), x.dtype) for x in shards]
        self.passes: dict[int, _Pass] = {}
        self.run = run
        for rank, shard in enumerate(shards):
            edge = get_gradient_edge(shard)
            _home(edge.node).setdefault(PLACES, {})[edge.output_nr] = self, rank
            shard.register_hook(partial(self.arrive, rank))
        rendezvous.add(self)

    def add(self, hook: Callable) -> RemovableHandle:
        handle = RemovableHandle(self.calls)
        self.calls[handle.id] = hook
        return handle

    def note(self, rank: int, position: int, gave: Gradients, got: Gradients) -> None:
        """A contribution to one rank's gradient. The engine will bring it into shape and add it up in the same way."""
        grad = gave[position]
        if grad is not None and self.calls:
            with _disabled():
                sums = self._pass().sums
                fitted = _fitted(grad, *self.kinds[rank])
                before = sums[rank]
                sums[rank] = fitted if before is None else before + fitted

    def arrive(self, rank: int, grad: Tensor | None) -> Tensor | None:
        """A hook on a shard: its gradient is complete, and so are the others'."""
        if not self.calls:
            return None
        now = self._pass()
        assert grad is None or now.sums[rank] is not None, "this backward pass was not expected"
        if not now.met:
            now.met = True
            now.sums = self.run(list(self.calls.values()), now.sums) or now.sums
        return now.sums[rank]

    def _pass(self) -> _Pass:
        task = _task()
        if task not in self.passes:
            self.passes[task] = _Pass(len(self.kinds))
            _queue_callback(partial(self.passes.pop, task, None))
        return self.passes[task]


class _Pass:
    """What is known of the gradients in one backward pass."""

    __slots__ = ("met", "sums")

    def __init__(self, num_ranks: int) -> None:
        self.sums: Any = [None] * num_ranks
        self.met = False


def _home(node: Any) -> dict[str, Any]:
    """Where it is kept what meets at a node. That of a leaf comes and goes."""
    return node.variable.__dict__ if node.__class__ is _Leaf else node.metadata


def _fitted(grad: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if grad.is_complex() and not dtype.is_complex:
        grad = grad.real
    return (grad if _size(grad) == size else grad.sum_to_size(size)).to(dtype)


def rendezvous_of(shards: Sequence[Tensor]) -> Rendezvous | None:
    """What there is of a tensor as it is now: after a write in place, it has another place in the graph."""
    edge = get_gradient_edge(shards[0])
    return _home(edge.node).get(PLACES, {}).get(edge.output_nr, (None,))[0]


def expect(nodes: Iterable[Any | None]) -> None:
    """Before a backward pass through the graph below some nodes: have the contributions noted."""
    if not rendezvous:
        return
    todo, seen = [node for node in nodes if node is not None], set()
    places: dict[Rendezvous, list[Any]] = {}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for position, (following, output) in enumerate(node.next_functions):
            if following is not None:
                todo.append(following)
                found, rank = _home(following).get(PLACES, {}).get(output, (None, 0))
                if found is not None:
                    places.setdefault(found, []).append(following)
                    _have_noted(node, position, found, rank)
    for held in places.values():  # those of leaves would run first, and all but the first of the others before it
        last = 0 if held[0].__class__ is _Leaf else min(node._sequence_nr() for node in held)
        for node in held:
            node._set_sequence_nr(last)


def _have_noted(node: Any, position: int, found: Rendezvous, rank: int) -> None:
    noted = node.metadata.setdefault(NOTED, {})
    if noted.get(position) is not found:
        noted[position] = found
        register = _Function.register_hook if isinstance(node, _Function) else type(node).register_hook
        register(node, partial(found.note, rank, position))
