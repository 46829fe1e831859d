"""What distributed implementations of ops see of the port: one group of merged axes, on local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.captured import noters
from shardwise.comm.ranked import PerRank, Ranked, join, per_rank, pick, shards_of
from shardwise.layout import SUM, Layout, Mesh
from shardwise.redistribute import exchange
from shardwise.redistribute.exchange import Interval
from shardwise.redistribute.execute import recorded, run_path
from shardwise.redistribute.kernels import members, run_move
from shardwise.redistribute.move_cache import forget
from shardwise.redistribute.transitions import Move, Typed
from shardwise.rules.math.reductions import wide

_disabled = torch._C.DisableTorchFunctionSubclass


class Group:
    """The ranks along some axes of a mesh; implements the `Collectives` that rules are written against."""

    __slots__ = ("_psum", "_summed", "_vary", "axes", "ins", "mesh")

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], ins: Sequence[Layout]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.ins = ins
        whole = Layout(mesh, ())
        pending = whole.with_(pending=[SUM if axis in axes else None for axis in range(mesh.ndim)])
        self._psum = (Move(Typed(pending), Typed(whole), axes),) if axes else ()
        self._vary = (Move(Typed(whole), Typed(whole, frozenset(axes)), axes),) if axes else ()
        self._summed = Move(Typed(pending), Typed(whole, frozenset(axes)), axes)

    def psum(self, x: Tensor) -> Tensor:
        return run_path(x, self._psum)

    def vary(self, x: Tensor) -> Tensor:
        return run_path(x, self._vary)

    def reduce(self, x: Tensor, op: str) -> Tensor:
        if not self.axes:
            return x.detach()
        with _disabled():
            shards = [shard.detach() for shard in shards_of(x)]
            return self._local(self.mesh.port.all_reduce(shards, self.mesh, self.axes, op), x)

    def stack(self, x: Tensor) -> Tensor:
        with _disabled():
            shards = [shard.detach() for shard in shards_of(x)]
            shapes = [[tuple(shard.shape)] * self.size for shard in shards]
            rows = self.mesh.port.all_gather(shards, self.mesh, self.axes, shapes)
            return self._local([torch.stack(row) for row in rows], x)

    def verify(self, number: Any, check: Callable[[Any], None]) -> None:
        if noters:
            noters[-1].check(shards_of(number)[0], check)
        else:
            check(number.item())

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
        return per_rank([members(self.mesh, self.axes, at).index(tuple(at)) for at in self.mesh.held])

    def offset(self, position: int, dim: int) -> Any:
        return per_rank([start[dim] for start in self.ins[position].held_starts])

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        if not any(isinstance(arg, (Ranked, PerRank)) for arg in args):
            return function(*args)
        with _disabled():
            return join([function(*pick(args, rank)) for rank in range(len(self.mesh.held))])

    def attach(self, value: Tensor, gradient_of: Tensor) -> Tensor:
        return self.map(_Attach.apply, value, gradient_of)

    def softmax(self, x: Tensor, known: Tensor, dim: int, *, log: bool) -> Tensor:
        shards = shards_of(x)
        if not (torch.is_grad_enabled() and any(shard.requires_grad for shard in shards)):
            return known
        with _disabled():
            out = _Softmax.apply(self._summed, dim, log, *shards, *shards_of(known))
            return self._local([out] if isinstance(out, Tensor) else out, x)

    @staticmethod
    def _local(shards: Sequence[Tensor], like: Tensor) -> Tensor:
        return join(shards) if isinstance(like, Ranked) else shards[0]


def _narrowed(x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval], me: int) -> Tensor:
    """A window of our own shard."""
    (start, stop), first = want[me], have[me][0]
    return x.narrow(dim, start - first, stop - start) if start < stop else x.narrow(dim, 0, 0)


class _Softmax(torch.autograd.Function):
    """The shards of a tensor and of its softmax, or of the logarithm of that, along a sharded dim → the latter. Only
    that is kept; the backward pass sums one number for each row."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, summed: Move, dim: int, log: bool, *tensors: Tensor) -> Any:
        ctx.summed, ctx.dim, ctx.log, ctx.dtype = summed, dim, log, tensors[0].dtype
        out = [known.detach() for known in tensors[len(tensors) // 2 :]]
        ctx.save_for_backward(*out)
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forget(ctx.summed.source.layout.mesh)
        known = ctx.saved_tensors  # here a checkpoint recomputes, and with DTensors
        with _disabled():
            grads, known = tuple(map(wide, grads)), tuple(map(wide, known))
            pairs = zip(grads, known, strict=True)
            terms = [(g if ctx.log else g * y).sum(ctx.dim, keepdim=True) for g, y in pairs]
            sums = (recorded if torch.is_grad_enabled() else run_move)(ctx.summed, terms)
            each = zip(grads, known, sums, strict=True)
            found = [g.addcmul(y.exp(), total, value=-1) if ctx.log else (g - total).mul_(y) for g, y, total in each]
            return None, None, None, *(x.to(ctx.dtype) for x in found), *(None for _ in known)


class _Attach(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor) -> Tensor:
        return value.detach()  # torch refuses writes to views that a function returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad
