"""What distributed implementations of ops see of the port: one group of merged axes, on local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.ranked import PerRank, Ranked, join, per_rank, pick, shards_of
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import exchange
from shardwise.redistribute.exchange import Interval
from shardwise.redistribute.execute import run_path
from shardwise.redistribute.kernels import members
from shardwise.redistribute.transitions import Move, Typed

_disabled = torch._C.DisableTorchFunctionSubclass


class Group:
    """The ranks along some axes of a mesh; implements the `Collectives` that rules are written against."""

    __slots__ = ("_psum", "_vary", "axes", "ins", "mesh")

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], ins: Sequence[Layout]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.ins = ins
        whole = Layout(mesh, ())
        pending = whole.with_(pending=[Partial("sum") if axis in axes else None for axis in range(mesh.ndim)])
        self._psum = (Move(Typed(pending), Typed(whole), axes),) if axes else ()
        self._vary = (Move(Typed(whole), Typed(whole, frozenset(axes)), axes),) if axes else ()

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

    def window(self, x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval]) -> Tensor:
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
        return per_rank([self.ins[position].box(coordinate)[0][dim] for coordinate in self.mesh.held])

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        if not any(isinstance(arg, (Ranked, PerRank)) for arg in args):
            return function(*args)
        with _disabled():
            return join([function(*pick(args, rank)) for rank in range(len(self.mesh.held))])

    def attach(self, value: Tensor, gradient_of: Tensor) -> Tensor:
        return self.map(_Attach.apply, value, gradient_of)

    @staticmethod
    def _local(shards: Sequence[Tensor], like: Tensor) -> Tensor:
        return join(shards) if isinstance(like, Ranked) else shards[0]


class _Attach(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor) -> Tensor:
        return value.detach()  # torch refuses writes to views that a function returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad
