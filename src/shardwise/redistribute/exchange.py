"""Exchanges along one dim for distributed implementations: windows, gathers and sums, each with its transpose.

All three are linear in the shards, and the transpose of each is another exchange, so gradients of any order are
exchanges too. Intervals are `(start, stop)` in the global dim, one per member of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.cause import inherited, listeners
from shardwise.layout import Mesh
from shardwise.redistribute.backward.double_backward import anchored, left_behind

Interval = tuple[int, int]
Kernel = Callable[[Sequence[Tensor]], list[Tensor]]
_disabled = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class Along:
    """A dim of local tensors, and the merged axes whose ranks exchange parts of it."""

    mesh: Mesh
    axes: tuple[int, ...]
    dim: int

    def numbers(self) -> list[int]:
        """The held ranks' numbers in their groups."""
        return [self.mesh.number(at, self.axes) for at in self.mesh.held]


class Exchange(NamedTuple):
    """What is done to the shards, and to their gradients."""

    forth: Kernel
    back: Kernel

    def reversed(self) -> Exchange:
        return Exchange(self.back, self.forth)


def window(along: Along, have: Sequence[Interval], want: Sequence[Interval]) -> Exchange:
    """From intervals that do not overlap to any others inside them. Back: parts that were sent to several add up."""

    def fetch(shards: Sequence[Tensor]) -> list[Tensor]:
        chunks, shapes = [], []
        for x, me in zip(shards, along.numbers(), strict=True):
            chunks.append([_part(x, along.dim, _common(have[me], w), have[me]) for w in want])
            shapes.append([_shape(x, along.dim, _common(h, want[me])) for h in have])
        rows = along.mesh.port.all_to_all(chunks, along.mesh, along.axes, shapes)
        order = sorted(range(len(have)), key=lambda i: have[i])
        return [torch.cat([row[i] for i in order], along.dim) for row in rows]

    def give_back(shards: Sequence[Tensor]) -> list[Tensor]:
        chunks, shapes = [], []
        for x, me in zip(shards, along.numbers(), strict=True):
            chunks.append([_part(x, along.dim, _common(h, want[me]), want[me]) for h in have])
            shapes.append([_shape(x, along.dim, _common(have[me], w)) for w in want])
        rows = along.mesh.port.all_to_all(chunks, along.mesh, along.axes, shapes)
        out = []
        for x, me, row in zip(shards, along.numbers(), rows, strict=True):
            total = x.new_zeros(_shape(x, along.dim, have[me]))
            for part, w in zip(row, want, strict=True):
                _part(total, along.dim, _common(have[me], w), have[me]).add_(part)
            out.append(total)
        return out

    return Exchange(fetch, give_back)


def gather(along: Along, sizes: Sequence[int]) -> Exchange:
    """Every member's part, joined along the dim; back, a sum of which each member keeps its part."""

    def all_gather(shards: Sequence[Tensor]) -> list[Tensor]:
        shapes = [[_shape(x, along.dim, (0, size)) for size in sizes] for x in shards]
        rows = along.mesh.port.all_gather(shards, along.mesh, along.axes, shapes)
        return [torch.cat(row, along.dim) for row in rows]

    def reduce_scatter(shards: Sequence[Tensor]) -> list[Tensor]:
        chunks = [list(x.split(list(sizes), along.dim)) for x in shards]
        return along.mesh.port.reduce_scatter(chunks, along.mesh, along.axes, "sum")

    return Exchange(all_gather, reduce_scatter)


def run_exchange(exchange: Exchange, shards: Sequence[Tensor]) -> list[Tensor]:
    """Run an exchange on the held shards."""
    with _disabled():
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in shards)):
            return exchange.forth(shards)
        out = _Exchanged.apply(exchange, *shards)
        return [out] if isinstance(out, Tensor) else list(out)


class _Exchanged(torch.autograd.Function):
    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *shards: Tensor) -> Any:
        ctx.exchange = exchange
        out = exchange.forth(shards)
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.exchange.reversed()
        if not torch.is_grad_enabled():
            return None, *run_exchange(back, grads)
        with _disabled():
            out = left_behind(run_exchange(back, anchored(grads)))
            if listeners:
                inherited(out, grads)
            return None, *out


def _common(a: Interval, b: Interval) -> Interval:
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def _part(x: Tensor, dim: int, interval: Interval, inside: Interval) -> Tensor:
    """The part of `x`, which fills the interval `inside`, that is in `interval`."""
    start, stop = interval
    return x.narrow(dim, start - inside[0], stop - start) if stop > start else x.narrow(dim, 0, 0)


def _shape(x: Tensor, dim: int, interval: Interval) -> tuple[int, ...]:
    return (*x.shape[:dim], interval[1] - interval[0], *x.shape[dim + 1 :])
