"""New DTensors: `zeros ones empty full rand randn`, laid out as they are made.

Random ones are *exact*: bit for bit what one device would draw from the same generator state, whatever their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import AnyMesh, as_mesh, local_tensor
from shardwise.dispatch.planning.randomness import check_in_step, drawn_shards
from shardwise.layout import Layout, Placements, Replicate
from shardwise.redistribute import plan_moves, run_path
from shardwise.tensor import DTensor, wrap


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


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
    return _made(torch.zeros, size, dtype, layout, device_mesh, placements, requires_grad)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """All ones."""
    return _made(torch.ones, size, dtype, layout, device_mesh, placements, requires_grad)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Uninitialised; where replicated, the ranks need not agree until it is written to."""
    return _made(torch.empty, size, dtype, layout, device_mesh, placements, requires_grad)


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
    make = partial(torch.full, fill_value=fill_value)
    return _made(make, (tuple(size),), dtype, layout, device_mesh, placements, requires_grad)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Uniform on [0, 1): exactly what `torch.rand` would draw."""
    return _made(torch.rand, size, dtype, layout, device_mesh, placements, requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Standard normal: exactly what `torch.randn` would draw."""
    return _made(torch.randn, size, dtype, layout, device_mesh, placements, requires_grad)


def _made(
    function: Callable[..., Tensor],
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    kind: torch.layout,
    device_mesh: AnyMesh | None,
    placements: Placements | None,
    requires_grad: bool,
) -> DTensor:
    """Shards made on their ranks; a value that is to be pending is made on one rank, and zero on the others."""
    if kind is not torch.strided:
        raise TypeError(f"DTensors are strided; layout={kind} is not supported")
    mesh = as_mesh(device_mesh)
    layout = Layout.of(mesh, _size(size), [Replicate()] * mesh.ndim if placements is None else placements)
    made, make = layout.without_pending, partial(function, dtype=dtype, device=mesh.device_type)
    if function in (torch.rand, torch.randn):
        check_in_step(mesh)
        shards = drawn_shards(make, made)
    else:
        shards = [make(shape) for shape in made.held_shapes]
    return wrap(run_path(local_tensor(shards), plan_moves(made, layout)), layout).requires_grad_(requires_grad)
