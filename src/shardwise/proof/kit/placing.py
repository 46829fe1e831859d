"""Laying a plain tensor out so that nothing is easy: what is pending differs between ranks, in sign too. It is cut by
`narrow`, so that nothing of what is to be judged is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.comm import ranked, simulate
from shardwise.layout import Layout, Mesh, Placement
from shardwise.tensor import DTensor, wrap

FACTORS = (-1.0, 2.0)
"""A number times either of these, and the rest, are two terms that add up without rounding."""


@lru_cache
def mesh_of(shape: Sequence[int]) -> Mesh:
    return simulate(tuple(shape), ("a", "b")[: len(shape)])


def place(x: Tensor, mesh: Mesh, placements: Sequence[Placement], seed: int = 0) -> DTensor:
    """A leaf DTensor with the value of `x`, whose shards order the dims in memory as it does."""
    layout = Layout.of(mesh, x.shape, list(placements))
    found = shards_of_whole(x.detach(), layout, seed)
    assert found is not None
    return wrap(ranked([_ordered_as(x, shard) for shard in found]), layout).requires_grad_(x.requires_grad)


def _ordered_as(x: Tensor, shard: Tensor) -> Tensor:
    """A shard with its dims in the order that those of a copy of the whole have in memory, dims of size 1 included."""
    order = torch.empty_like(x, device="meta").stride()
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (order[dim], -dim)):
        strides[dim] = step
        step *= max(shard.shape[dim], 1)
    return torch.empty_strided(shard.shape, strides, dtype=shard.dtype).copy_(shard)


def shards_of_whole(x: Tensor, layout: Layout, seed: int = 0) -> list[Tensor] | None:
    """What each rank held here has of a tensor; None where no terms of its dtype make up what is pending."""
    shape = layout.mesh.shape
    pending = [(axis, p.reduce_op) for axis, p in enumerate(layout.pending) if p is not None]
    found = terms(x, [(op, shape[axis]) for axis, op in pending], seed) if pending else [x]
    if found is None:
        return None
    shards = []
    for coordinate in layout.mesh.held:
        term = 0  # ranks that differ on the pending axes have different ones
        for axis, _ in pending:
            term = term * shape[axis] + coordinate[axis]
        shards.append(_cut(found[term], layout.box(coordinate)))
    return shards


def _cut(x: Tensor, box: tuple[Sequence[int], Sequence[int]]) -> Tensor:
    for dim, (start, extent) in enumerate(zip(*box, strict=True)):
        x = x.narrow(dim, start, extent)
    return x.clone(memory_format=torch.contiguous_format)


def terms(x: Tensor, pending: Sequence[tuple[str, int]], seed: int = 0) -> list[Tensor] | None:
    """What ranks may hold that reductions, each over so many ranks, make `x` of; None where nothing of its dtype does.

    Of a sum two terms of each number are not zero, and add up without rounding; an extremum is with one rank."""
    generator = torch.Generator().manual_seed(seed)
    num_ranks = math.prod(size for _, size in pending)
    averaged = math.prod(size for op, size in pending if op == "avg")
    owner = torch.randint(num_ranks, x.shape, generator=generator)
    inexact = x.is_floating_point() or x.is_complex()
    match "sum" if averaged > 1 else pending[0][0]:
        case "sum" if inexact or (averaged == 1 and x.dtype != torch.bool):
            other = (owner + torch.randint(1, max(num_ranks, 2), x.shape, generator=generator)) % num_ranks
            factors = torch.tensor(FACTORS)[torch.randint(len(FACTORS), x.shape, generator=generator)].to(x.dtype)
            first = torch.where(torch.isfinite(x), x * averaged * factors, x)
            second = torch.where(torch.isfinite(x), x * averaged - first, torch.zeros_like(x))
            pairs = [(torch.where(owner == rank, first, 0), other == rank) for rank in range(num_ranks)]
            return [one + torch.where(here, second, 0) for one, here in pairs]
        case "max" | "min" as op if not x.is_complex():
            return [torch.where(owner == rank, x, _beyond(x, op, generator)) for rank in range(num_ranks)]
        case "product" if x.is_floating_point():
            parts = [1 + torch.rand(x.shape, dtype=x.dtype, generator=generator) for _ in range(num_ranks - 1)]
            return [*parts, x / math.prod(parts)]
    return None


def _beyond(x: Tensor, op: str, generator: torch.Generator) -> Tensor:
    """Values that lose against `x`."""
    if x.dtype == torch.bool:
        return torch.zeros_like(x) if op == "max" else torch.ones_like(x)
    step = torch.randint(1, 4, x.shape, generator=generator).to(x.dtype)
    if not x.is_floating_point():  # at the ends of the range there is no room beyond
        limits = torch.iinfo(x.dtype)
        step = torch.where((x < limits.min + 8) | (x > limits.max - 8), 0, step).to(x.dtype)
    return x - step if op == "max" else x + step
