"""Try a function in every assignment of placements: all of them on two ranks, a fixed sample on more ranks and axes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from compare import all_layouts, axis_placements, compare, full
from torch import Tensor

import shardwise as sw

MESHES = ((2,), (4,), (2, 2), (2, 1, 2))

Placements = tuple[tuple[sw.Placement, ...], ...]


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return sw.simulate(shape, ("a", "b", "c")[: len(shape)])


def assignments(
    inputs: Sequence[Tensor], *, partial: bool = True, most: int = 36, sample: int = 4
) -> Iterator[tuple[Any, Placements]]:
    """Meshes and placements to try: at most `most` of the ways on two ranks, a third as many on four, where the same
    strategies run on other pieces, and `sample` of those on several axes."""
    chance = random.Random(0)
    each = [axis_placements(x, partial) for x in inputs]
    for shape, limit in zip(MESHES, (most, max(most // 3, 4), sample, sample), strict=True):
        if math.prod(map(len, each)) ** len(shape) <= limit:
            yield from ((mesh_of(shape), way) for way in all_layouts(inputs, len(shape), partial))
        else:
            ways = (tuple(tuple(chance.choices(one, k=len(shape))) for one in each) for _ in range(limit))
            yield from ((mesh_of(shape), way) for way in ways)


def sweep(function: Callable[..., Any], *inputs: Tensor, partial: bool = True, **options: Any) -> None:
    """`function` agrees with itself on plain tensors, value and gradient, wherever its inputs lie."""
    for mesh, placements in assignments(inputs, partial=partial):
        compare(function, inputs, mesh, placements, **options)


def sweep_in_place(function: Callable[..., Any], *inputs: Tensor) -> list[Placements]:
    """The same for a function that writes to its first argument, which may refuse before it has written anything.

    Returns the placements along one axis of two ranks that it accepts.
    """
    accepted = []

    def on_a_copy(target: Tensor, *rest: Tensor) -> Tensor:
        copy = target.clone()
        try:
            result = function(copy, *rest)
        except sw.errors.InPlaceError:
            assert torch.equal(copy, target), "refused after having written"
            raise
        assert result is copy
        return copy

    for mesh, placements in assignments(inputs):
        try:
            compare(on_a_copy, inputs, mesh, placements)
        except sw.errors.InPlaceError:
            assert mesh.size() > 1 and any(p[0] != sw.Replicate() for p in placements)
            continue
        if mesh.shape == (2,):
            accepted.append(placements)
    return accepted


def normal(*shape: int) -> Tensor:
    """Sign-varying data, the same for the same shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def place(x: Tensor, *placements: sw.Placement, mesh: tuple[int, ...] = (2,)) -> sw.DTensor:
    return sw.distribute_tensor(x, mesh_of(mesh), list(placements))


def same(program: Callable[[Tensor], Any], x: Tensor, *placements: sw.Placement, mesh: tuple[int, ...] = (2,)) -> None:
    """A program of a leaf gives the same on a DTensor: what it returns, tensors or None for gradients that there are
    none of, and the gradient of the leaf."""
    plain, dist = x.clone(), place(x.clone(), *placements, mesh=mesh)
    found = []
    for leaf in (plain, dist):
        leaf.requires_grad_(x.is_floating_point() or x.is_complex())
        results = program(leaf)
        found.append([*([results] if isinstance(results, Tensor) else results), leaf.grad])
    for expected, actual in zip(*found, strict=True):
        assert (expected is None) == (actual is None), f"{actual} where torch has {expected}"
        if expected is not None:
            torch.testing.assert_close(full(actual.detach()), expected.detach())
