"""What distributed implementations of ops see of the port: one group of merged axes, on local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm.captured import noters
from shardwise.comm.cause import listeners
from shardwise.comm.faked import plain_alias
from shardwise.comm.ranked import PerRank, Ranked, join, per_rank, pick, shards_of
from shardwise.comm.record import note
from shardwise.comm.told_later import window_of, windows
from shardwise.layout import SUM, Layout, Mesh
from shardwise.redistribute import exchange
from shardwise.redistribute.backward.double_backward import anchored, left_behind
from shardwise.redistribute.backward.ownership import own_node
from shardwise.redistribute.cost import transition_cost
from shardwise.redistribute.exchange import Interval
from shardwise.redistribute.execute import applied, recorded, run_path
from shardwise.redistribute.masks import placeholder
from shardwise.redistribute.move_cache import forget
from shardwise.redistribute.transitions import Move, Typed
from shardwise.rules.kit.types import Gradient, GradientByResult, Saved

_disabled = torch._C.DisableTorchFunctionSubclass
_enabled = torch._C._EnableTorchFunction  # which a pass may have disabled


class Group:
    """The ranks along some axes of a mesh; implements the `Collectives` that rules are written against."""

    __slots__ = ("_along", "_psum", "_reducers", "_vary", "axes", "ins", "mesh")

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], ins: Sequence[Layout]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.ins = ins
        self._along: dict[tuple[int, ...], Group] = {}
        self._reducers: dict[str, Callable[[Tensor], None]] = {}
        whole = Layout(mesh, ())
        pending = whole.with_(pending=[SUM if axis in axes else None for axis in range(mesh.ndim)])
        self._psum = (Move(Typed(pending), Typed(whole), axes),) if axes else ()
        self._vary = (Move(Typed(whole), Typed(whole, frozenset(axes)), axes),) if axes else ()

    def along(self, axes: tuple[int, ...]) -> Group:
        if axes not in self._along:
            self._along[axes] = type(self)(self.mesh, axes, self.ins)
        return self._along[axes]

    def psum(self, x: Tensor) -> Tensor:
        return self._run(x, self._psum)

    def vary(self, x: Tensor) -> Tensor:
        return self._run(x, self._vary)

    def _run(self, x: Tensor, moves: Sequence[Move]) -> Tensor:
        return run_path(x, moves)

    def reduce(self, x: Tensor, op: str) -> Tensor:
        if not self.axes:
            return x.detach()
        with _disabled():
            shards = [shard.detach() for shard in shards_of(x)]
            return self._local(self.mesh.port.all_reduce(shards, self.mesh, self.axes, op), x)

    def reduce_in_place(self, x: Tensor, op: str) -> None:
        if not self.axes:
            return
        port, held = self.mesh.port, shards_of(x)
        if hasattr(port, "reducer"):
            reduce = self._reducers.get(op)
            if reduce is None:
                reduce = self._reducers[op] = port.reducer(self.mesh, self.axes, op, keep_nans=False)
            reduce(x)
            return
        with _disabled():
            for shard, found in zip(held, port.all_reduce(held, self.mesh, self.axes, op), strict=True):
                shard.copy_(found)

    def stack(self, x: Tensor) -> Tensor:
        with _disabled():
            shards = [shard.detach() for shard in shards_of(x)]
            return self._local(self.mesh.port.stack(shards, self.mesh, self.axes), x)

    def tells_all(self, numel: int) -> bool:
        gathered = transition_cost("all_gather", numel * self.size, self.size)
        return gathered < 2 * transition_cost("all_reduce", numel, self.size)

    def verify(self, number: Any, check: Callable[[Any], None]) -> None:
        if noters:
            noters[-1].check(shards_of(number)[0], check)
        else:
            check(number.item())

    @property
    def may_wait(self) -> bool:
        return bool(windows) and window_of(self.mesh, self.axes) is not None

    def tell(self, bad: int | None, refuse: Callable[[int], None]) -> None:
        window = window_of(self.mesh, self.axes)
        assert window is not None
        if listeners:
            note("all_reduce", self.mesh, self.axes, torch.tensor(0, device="cpu"))
        window.tell(bad, refuse)

    @property
    def is_captured(self) -> bool:
        return bool(noters)

    def window(self, x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval]) -> Tensor:
        if all(w[0] >= w[1] or (h[0] <= w[0] and w[1] <= h[1]) for h, w in zip(have, want, strict=True)):
            return self.map(_narrowed, x, dim, tuple(have), tuple(want), self.index())
        return self._exchange(exchange.window(exchange.Along(self.mesh, self.axes, dim), have, want), x)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return self._exchange(exchange.gather(exchange.Along(self.mesh, self.axes, dim), sizes), x)

    def scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return self._exchange(exchange.gather(exchange.Along(self.mesh, self.axes, dim), sizes).reversed(), x)

    def _exchange(self, what: exchange.Exchange, x: Tensor) -> Tensor:
        if not self.axes:
            return x
        return self._local(exchange.run_exchange(what, shards_of(x)), x)

    @property
    def size(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def index(self) -> Any:
        return per_rank([self.mesh.number(at, self.axes) for at in self.mesh.held])

    def offset(self, position: int, dim: int) -> Any:
        return per_rank([start[dim] for start in self.ins[position].held_starts])

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        if len(self.mesh.held) == 1 or not any(isinstance(arg, (Ranked, PerRank)) for arg in args):
            return function(*args)
        with _disabled():
            return join([function(*pick(args, rank)) for rank in range(len(self.mesh.held))])

    def attach(self, value: Tensor, gradient_of: Tensor) -> Tensor:
        return self.map(_Attach.apply, value, gradient_of)

    def place(self, x: Tensor) -> Tensor:
        return self.map(_place, x)

    def with_gradient(self, value: Tensor, gradient: Gradient, inputs: Sequence[Tensor], saved: Saved) -> Tensor:
        if not (torch.is_grad_enabled() and any(shard.requires_grad for x in inputs for shard in shards_of(x))):
            return value
        given = [shards_of(x) for x in (*inputs, *saved.values(), value)]
        with _disabled():
            out = _known(self, gradient, tuple(saved), *(shard for shards in given for shard in shards))
            return self._local([out] if isinstance(out, Tensor) else out, value)

    def with_gradient_by_itself(self, value: Tensor, gradient: GradientByResult, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and any(shard.requires_grad for shard in shards_of(x))):
            return value
        with _disabled():
            out = _by_itself(self, gradient, *shards_of(x), *shards_of(value))
            return self._local([out] if isinstance(out, Tensor) else _known_as(out), value)

    @staticmethod
    def _local(shards: Sequence[Tensor], like: Tensor) -> Tensor:
        return join(shards) if isinstance(like, Ranked) else shards[0]


def _narrowed(x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval], me: int) -> Tensor:
    """A window of our own shard."""
    (start, stop), first = want[me], have[me][0]
    return x.narrow(dim, start - first, stop - start) if start < stop else x.narrow(dim, 0, 0)


class _InRecordedPass(Group):
    """The same ranks, in a backward pass that will be differentiated: what they communicate there is part of the graph
    on all of them, whatever each has."""

    __slots__ = ()

    def _run(self, x: Tensor, moves: Sequence[Move]) -> Tensor:
        with _disabled():
            shards: Sequence[Tensor] = shards_of(x)
            for move in moves:
                shards = recorded(move, shards)
            return self._local(shards, x)

    def _exchange(self, what: exchange.Exchange, x: Tensor) -> Tensor:
        if not self.axes:
            return x
        with _disabled():
            return self._local(left_behind(exchange.run_exchange(what, anchored(shards_of(x)))), x)

    def with_gradient(self, value: Tensor, gradient: Gradient, inputs: Sequence[Tensor], saved: Saved) -> Tensor:
        with _disabled():
            tied = [self._local(anchored(shards_of(x)), x) for x in inputs]
        out = super().with_gradient(value, gradient, tied, saved)
        left_behind(shards_of(out))
        return out

    def with_gradient_by_itself(self, value: Tensor, gradient: GradientByResult, x: Tensor) -> Tensor:
        with _disabled():
            tied = self._local(anchored(shards_of(x)), x)
        out = super().with_gradient_by_itself(value, gradient, tied)
        left_behind(shards_of(out))
        return out


class _Known(torch.autograd.Function):
    """The shards of some inputs, of what is saved, and of a known value → the latter, with its gradient."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, group: Group, gradient: Gradient, names: tuple[str, ...], *shards: Tensor) -> Any:
        count = len(group.mesh.held)
        ctx.group, ctx.gradient, ctx.names = group, gradient, names
        ctx.save_for_backward(*shards[:-count])
        out = [shard.detach() for shard in shards[-count:]]
        return out[0] if count == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forget(ctx.group.mesh)
        shards, count = ctx.saved_tensors, len(grads)  # here a checkpoint recomputes, and with DTensors
        with _disabled():
            known = [_joined(shards[at : at + count]) for at in range(0, len(shards), count)]
            inputs, saved = known[: len(known) - len(ctx.names)], known[len(known) - len(ctx.names) :]
            group, grad = _in_this_pass(ctx.group), _joined(grads)
        with _disabled() if count == 1 else _enabled():  # `Ranked` tensors are functions' to map
            found = ctx.gradient(group, grad, inputs, dict(zip(ctx.names, saved, strict=True)))
        each = [shards_of(x) if x is not None else (None,) * count for x in found]
        return None, None, None, *(x for shards in each for x in shards), *(None,) * (count * (len(saved) + 1))


_known = applied(_Known)


class _ByItself(torch.autograd.Function):
    """The shards of an input and of a known value → the latter, with its gradient, a function of itself. It is kept as
    the result that it is: a gradient of the gradient goes through it, and whoever watches it is told."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, group: Group, gradient: GradientByResult, *shards: Tensor) -> Any:
        count = len(group.mesh.held)
        ctx.group, ctx.gradient, ctx.results = group, gradient, ()
        out = [shard.detach() for shard in shards[count:]]
        ctx.save_for_backward(*out)
        return out[0] if count == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forget(ctx.group.mesh)
        kept, count = ctx.saved_tensors, len(grads)
        with _disabled():
            seen = [result() for result in ctx.results]
            if torch.is_grad_enabled() and seen and all(x is not None and _follows(x, ctx) for x in seen):
                kept = seen
            group, grad, known = _in_this_pass(ctx.group), _joined(grads), _joined(kept)
        with _disabled() if count == 1 else _enabled():
            found = ctx.gradient(group, grad, known)
        return None, None, *shards_of(found), *(None,) * count


_by_itself = applied(_ByItself)


def _known_as(shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """Results of one node for all ranks, as those that users have: each of a node of its own. The one node hears of
    them, and does not keep them alive."""
    found = [own_node(shard) for shard in shards]
    shards[0].grad_fn.results = [ref(x) for x in found]  # type: ignore[union-attr]
    return found


def _follows(x: Tensor, node: Any) -> bool:
    """Whether a tensor is still the result that it was made as: not detached, nor written to."""
    return x.grad_fn is not None and x.grad_fn.next_functions[0][0] is node


def _in_this_pass(group: Group) -> Group:
    kind = _InRecordedPass if torch.is_grad_enabled() else Group
    return group if type(group) is kind else kind(group.mesh, group.axes, group.ins)


def _joined(shards: Sequence[Tensor]) -> Tensor:
    """The ranks' tensors as one, without making their objects part of it."""
    if len(shards) > 1:
        return join([shard.view_as(shard) for shard in shards])
    return shards[0] if type(shards[0]) is Tensor else plain_alias(shards[0])


def _place(x: Tensor) -> Tensor:
    return placeholder(x) if x.requires_grad and torch.is_grad_enabled() else x.detach()


class _Attach(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor) -> Tensor:
        return value.detach()  # torch refuses writes to views that a function returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad
