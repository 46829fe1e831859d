"""Layouts drawn at random, and tensors laid out so, with terms and replicas that leave nothing to chance."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm import ranked
from shardwise.layout import Layout
from shardwise.tensor import wrap

SUMS, EXTREMA = ("sum", "avg"), ("max", "min")

FACTORS = (1.0, 0.0, -1.0, 2.0, 0.5)
"""A number times one of these, and the rest of it, add up to it without rounding."""


def random_layout(
    chance: random.Random, mesh: Any, shape: Sequence[int], *, pending: Sequence[str] = (), ragged: float = 0.3
) -> Layout:
    """Any axes on any dims in any order, one kind of reduction on some of the rest, and pieces of any size.

    Averages are over two or four ranks, where they do not round.
    """
    splits: list[tuple[int, ...]] = [() for _ in shape]
    reductions: list[sw.Partial | None] = [None] * mesh.ndim
    groups = [[kind for kind in group if kind in pending] for group in (SUMS, EXTREMA[:1], EXTREMA[1:])]
    kinds = chance.choice([group for group in groups if group] or [[]])
    for axis in chance.sample(range(mesh.ndim), mesh.ndim):
        turn = chance.random()
        if shape and turn < 0.6:
            splits[chance.randrange(len(shape))] += (axis,)
        elif kinds and turn < 0.8:
            exact = [kind for kind in kinds if kind != "avg" or mesh.shape[axis] in (1, 2, 4)]
            reductions[axis] = sw.Partial(chance.choice(exact)) if exact else None
    counts = [math.prod(mesh.shape[axis] for axis in axes) for axes in splits]
    sizes = [
        random_pieces(chance, size, count) if axes and chance.random() < ragged else None
        for size, axes, count in zip(shape, splits, counts, strict=True)
    ]
    return Layout(mesh, shape, splits, reductions, sizes)


def random_pieces(chance: random.Random, size: int, count: int) -> tuple[int, ...]:
    cuts = [0, *sorted(chance.randint(0, size) for _ in range(count - 1)), size]
    return tuple(stop - start for start, stop in pairwise(cuts))


def laid_out(x: Tensor, layout: Layout, seed: int = 0) -> sw.DTensor:
    """A leaf with the value of `x`. Terms of a pending reduction differ between ranks, in sign too; no extremum has an
    equal, whose gradient it would share."""
    whole, mesh = x.detach(), layout.mesh
    axes = [axis for axis, pending in enumerate(layout.pending) if pending is not None]
    terms = _terms(whole, layout, axes, torch.Generator().manual_seed(seed)) if axes else {(): whole}
    shards = []
    for coordinate in mesh.held:
        shard = terms[tuple(coordinate[axis] for axis in axes)]
        for dim, (start, size) in enumerate(zip(*layout.box(coordinate), strict=True)):
            shard = shard.narrow(dim, start, size)
        shards.append(shard.clone())
    return wrap(ranked(shards), layout).requires_grad_(x.requires_grad)


def _terms(x: Tensor, layout: Layout, axes: Sequence[int], generator: torch.Generator) -> dict[tuple[int, ...], Tensor]:
    """For every coordinate along some axes, what the ranks there have of a pending value."""
    places = [()]
    for axis in axes:
        places = [(*place, i) for place in places for i in range(layout.mesh.shape[axis])]
    kinds = [layout.pending[axis].reduce_op for axis in axes]
    owner = torch.randint(len(places), x.shape, generator=generator)
    noise = torch.rand(x.shape, dtype=torch.float64, generator=generator)
    if kinds[0] in EXTREMA:
        sign = -1 if kinds[0] == "max" else 1
        beside = [x + (sign * (1 + noise + i)).to(x.dtype) for i in range(len(places))]
        return {place: torch.where(owner == i, x, beside[i]) for i, place in enumerate(places)}
    counted = math.prod(layout.mesh.shape[axis] for axis, kind in zip(axes, kinds, strict=True) if kind == "avg")
    other = (owner + 1) % len(places)
    whole, nothing = x * counted, torch.zeros_like(x)
    factors = torch.tensor(FACTORS, dtype=torch.float64)[(noise * len(FACTORS)).long()].to(x.dtype)
    first = torch.where(torch.isfinite(x) & (owner != other), whole * factors, whole)
    second = torch.where(torch.isfinite(x) & (owner != other), whole - first, nothing)
    return {
        place: torch.where(owner == i, first, nothing) + torch.where(other == i, second, nothing)
        for i, place in enumerate(places)
    }
