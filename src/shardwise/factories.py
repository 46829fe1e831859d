"""New DTensors: `zeros ones empty full rand randn`, laid out as they are made.

Random ones are *exact*: bit for bit what one device would draw from the same generator state, whatever their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import AnyMesh, as_mesh, ranked
from shardwise.dispatch.planning.randomness import check_in_step, drawn_shards
from shardwise.layout import Layout, Mesh, Placements, Replicate
from shardwise.redistribute import plan_moves, run_path
from shardwise.tensor import DTensor, wrap


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _mesh_and_layout(size: tuple[Any, ...], device_mesh: Any, placements: Placements | None) -> tuple[Mesh, Layout]:
    mesh = as_mesh(device_mesh)
    return mesh, Layout.of(mesh, _size(size), [Replicate()] * mesh.ndim if placements is None else placements)


def _filled(
    make: Callable[[tuple[int, ...]], Tensor], size: tuple, device_mesh: Any, placements: Any, grad: bool
) -> DTensor:
    """Shards made on their ranks; a value that is to be pending is made on one rank, and zero on the others."""
    mesh, layout = _mesh_and_layout(size, device_mesh, placements)
    settled = layout.with_(pending=[None] * mesh.ndim)
    shards = [make(shape) for shape in settled.held_shapes]
    local = run_path(shards[0] if len(shards) == 1 else ranked(shards), plan_moves(settled, layout))
    return wrap(local, layout).requires_grad_(grad)


def _drawn(
    make: Callable[[tuple[int, ...]], Tensor], size: tuple, device_mesh: Any, placements: Any, grad: bool
) -> DTensor:
    mesh, layout = _mesh_and_layout(size, device_mesh, placements)
    check_in_step(mesh)
    reduced = layout.with_(pending=[None] * mesh.ndim)
    shards = drawn_shards(make, reduced)
    local = run_path(shards[0] if len(shards) == 1 else ranked(shards), plan_moves(reduced, layout))
    return wrap(local, layout).requires_grad_(grad)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """All zeros.

    >>> import shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> sw.zeros(4, 3, device_mesh=mesh, placements=[sw.Shard(0)]).to_local().shape
    torch.Size([2, 3])
    """
    return _filled(_maker(torch.zeros, dtype, layout, device_mesh), size, device_mesh, placements, requires_grad)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """All ones."""
    return _filled(_maker(torch.ones, dtype, layout, device_mesh), size, device_mesh, placements, requires_grad)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Uninitialised; where replicated, the ranks need not agree until it is written to."""
    return _filled(_maker(torch.empty, dtype, layout, device_mesh), size, device_mesh, placements, requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """The same value everywhere."""

    def make(shape: tuple[int, ...], **options: Any) -> Tensor:
        return torch.full(shape, fill_value, **options)

    return _filled(_maker(make, dtype, layout, device_mesh), (tuple(size),), device_mesh, placements, requires_grad)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Uniform on [0, 1): exactly what `torch.rand` would draw."""
    return _drawn(_maker(torch.rand, dtype, layout, device_mesh), size, device_mesh, placements, requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Standard normal: exactly what `torch.randn` would draw."""
    return _drawn(_maker(torch.randn, dtype, layout, device_mesh), size, device_mesh, placements, requires_grad)


def _maker(
    function: Callable, dtype: torch.dtype | None, layout: torch.layout, device_mesh: Any
) -> Callable[[Any], Tensor]:
    if layout is not torch.strided:
        raise TypeError(f"DTensors are strided; layout={layout} is not supported")
    device = as_mesh(device_mesh).device_type
    return lambda shape: function(shape, dtype=dtype, device=device)
