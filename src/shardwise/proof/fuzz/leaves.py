"""Where a program's data comes from: tensors that follow from a seed, on one device or laid out on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import as_mesh, ranked
from shardwise.layout import Layout, Mesh, Partial, Placement
from shardwise.tensor import DTensor, distribute_tensor


class Device:
    """What makes a program's leaves: on one device without a mesh, else on the mesh. The values are the same.

    >>> import shardwise as sw
    >>> Device(None).leaf((2, 3), torch.float64, seed=1).equal(
    ...     Device(sw.simulate((2,))).leaf((2, 3), torch.float64, [sw.Partial("max")], seed=1).full_tensor())
    True
    """

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = None if mesh is None else as_mesh(mesh)

    def leaf(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Sequence[Placement] = (),
        *,
        seed: int,
        high: int | None = None,
        sizes: Sequence[int] | None = None,
        local: bool = False,
        grad: bool = False,
    ) -> Tensor:
        """A leaf of the graph. `high`: integers from 0 up to it; `sizes`: how many rows each rank brings of the one dim
        that is sharded; `local`: the ranks bring their shards themselves."""
        whole = values(shape, dtype, seed, high)
        if self.mesh is None:
            return whole.requires_grad_(grad)
        if sizes is None and not local and not any(isinstance(p, Partial) for p in placements):
            return distribute_tensor(whole, self.mesh, list(placements)).requires_grad_(grad)
        layout = _layout(self.mesh, shape, placements, sizes)
        shards = _shards(whole, layout, seed)
        brought = ranked(shards) if len(shards) > 1 else shards[0]
        made = DTensor.from_local(brought, self.mesh, list(placements), run_check=sizes is not None, shape=list(shape))
        return made.requires_grad_(grad)

    def redistribute(self, x: Tensor, placements: Sequence[Placement]) -> Tensor:
        """A copy in other placements. It is contiguous, as what is moved need not have the strides of its source."""
        if not isinstance(x, DTensor) or x.placements == tuple(placements):
            return x.clone(memory_format=torch.contiguous_format)
        return x.redistribute(placements=list(placements)).contiguous()


def values(shape: Sequence[int], dtype: torch.dtype, seed: int, high: int | None = None) -> Tensor:
    """Numbers of about 1, of either sign, none near 0: what comes of them is far from overflow and from ties."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if not dtype.is_floating_point and not dtype.is_complex:
        low, top = (-3, 4) if high is None else (0, high)
        return torch.randint(low, top, shape, generator=generator, dtype=dtype)
    if dtype.is_complex:
        return torch.complex(_numbers(shape, generator), _numbers(shape, generator)).to(dtype)
    return _numbers(shape, generator).to(dtype)


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    size = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.2 + 0.3
    return torch.where(torch.rand(shape, generator=generator) < 0.5, size, -size)


def _layout(mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int] | None) -> Layout:
    layout = Layout.of(mesh, shape, list(placements))
    if sizes is None:
        return layout
    pieces = [tuple(sizes) if axes else None for axes in layout.splits]
    return Layout(mesh, shape, layout.splits, layout.pending, pieces)


def _shards(whole: Tensor, layout: Layout, seed: int) -> list[Tensor]:
    """What each rank held here brings."""
    pending = [axis for axis, p in enumerate(layout.pending) if p is not None]
    count = math.prod(layout.mesh.shape[axis] for axis in pending)
    op = next((p.reduce_op for p in layout.pending if p is not None), "sum")
    terms = _terms(whole, count, op, torch.Generator().manual_seed(seed + 1)) if pending else [whole]
    return [_cut(terms[_term(coordinate, pending, layout.mesh)], layout, coordinate) for coordinate in layout.mesh.held]


def _term(coordinate: Sequence[int], pending: Sequence[int], mesh: Mesh) -> int:
    """Which of the terms the rank at a coordinate has: ranks that differ on the pending axes have different ones."""
    term = 0
    for axis in pending:
        term = term * mesh.shape[axis] + coordinate[axis]
    return term


def _cut(x: Tensor, layout: Layout, coordinate: Sequence[int]) -> Tensor:
    starts, extents = layout.box(coordinate)
    return x[tuple(slice(start, start + extent) for start, extent in zip(starts, extents, strict=True))].clone()


def _terms(x: Tensor, count: int, op: str, generator: torch.Generator) -> list[Tensor]:
    """Terms that differ between ranks, in sign too, and give the value without rounding: of a sum two are not zero, and
    an extremum lies with one rank."""
    if count == 1:
        return [x]
    owner = torch.randint(count, x.shape, generator=generator)
    other = (owner + torch.randint(1, count, x.shape, generator=generator)) % count
    step = torch.randint(3, x.shape, generator=generator).to(x.dtype)
    if op in ("max", "min"):
        away = step + 1
        return [torch.where(owner == i, x, x - away if op == "max" else x + away) for i in range(count)]
    nothing, scale = torch.zeros_like(x), count if op == "avg" else 1
    first = x * (step - 1) * 2
    terms = [
        torch.where(owner == i, first, nothing) + torch.where(other == i, x - first, nothing) for i in range(count)
    ]
    return [term * scale for term in terms]
