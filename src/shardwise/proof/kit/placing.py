"""Laying a plain tensor out so that nothing is easy: the terms of a pending sum differ between ranks, in sign too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm import ranked, shards_of
from shardwise.layout import Layout, Mesh, Partial, Placement, Replicate
from shardwise.proof.kit.samples import seeded
from shardwise.tensor import DTensor, distribute_tensor, wrap


def place(x: Tensor, mesh: Mesh, placements: Sequence[Placement], seed: int = 0) -> DTensor:
    """A leaf DTensor with the value of `x`, whose shards order the dims in memory as it does. The terms of a pending
    sum differ in sign and size, and add up exactly."""
    pending = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    whole = x.detach()
    if not pending and x.is_contiguous():
        return distribute_tensor(whole, mesh, list(placements)).requires_grad_(x.requires_grad)
    with seeded("terms", seed):
        terms = _terms(whole, math.prod(mesh.shape[axis] for axis in pending)) if pending else [whole]
    base = [Replicate() if axis in pending else p for axis, p in enumerate(placements)]
    laid = [shards_of(distribute_tensor(term, mesh, base).to_local()) for term in terms]
    shards = []
    for rank, coordinate in enumerate(mesh.held):
        term = 0
        for axis in pending:
            term = term * mesh.shape[axis] + coordinate[axis]
        shards.append(_ordered_as(x, laid[term][rank].as_subclass(Tensor)))
    return wrap(ranked(shards), Layout.of(mesh, x.shape, list(placements))).requires_grad_(x.requires_grad)


def _ordered_as(x: Tensor, shard: Tensor) -> Tensor:
    """A shard whose dims lie in memory in the order of those of a copy of the whole, dims with one index included."""
    order = torch.empty_like(x, device="meta").stride()
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (order[dim], -dim)):
        strides[dim] = step
        step *= max(shard.shape[dim], 1)
    return torch.empty_strided(shard.shape, strides, dtype=shard.dtype).copy_(shard)


_FACTORS = (1.0, 0.0, -1.0, 2.0, 0.5)
"""Times these, and the rest, a number is split into two terms without rounding."""


def _terms(x: Tensor, count: int) -> list[Tensor]:
    """Terms of a sum, added without rounding in any order: two of them at each element, the others zero."""
    factors = torch.tensor(_FACTORS, dtype=torch.float64)[torch.randint(len(_FACTORS), x.shape)]
    first = torch.where(torch.isfinite(x), x * factors.to(x.dtype), x)
    second = torch.where(torch.isfinite(x), x - first, torch.zeros_like(x))
    owner = torch.randint(count, x.shape)
    other = (owner + torch.randint(1, count, x.shape)) % count if count > 1 else owner
    nothing = torch.zeros_like(x)
    return [torch.where(owner == i, first, nothing) + torch.where(other == i, second, nothing) for i in range(count)]
