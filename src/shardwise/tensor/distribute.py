"""Plain tensors laid on a mesh: one that all ranks have, or the parts that they bring in every call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm import AnyMesh, Ranked, as_mesh
from shardwise.errors import MeshError, ShardShapeError
from shardwise.from_local import check_alike, layout_of_shards
from shardwise.layout import Layout, Mesh, Placements, Replicate
from shardwise.local import check_strided, spread
from shardwise.redistribute import plan_moves, run_path
from shardwise.tensor.dtensor import DTensor, plain_shards, wrap


def distribute_tensor(
    tensor: Tensor,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a plain tensor, the same single-device tensor on every rank, on a mesh (by default, that of the `with` block
    around).

    The values of the rank numbered `src_data_rank` on each axis count; None means all ranks have them already. The
    result is contiguous, as a new tensor is.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2, 2), ("dp", "tp"))
    >>> sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0), sw.Shard(1)]).to_local().shape
    torch.Size([2, 2])
    """
    mesh = as_mesh(device_mesh)
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    if isinstance(tensor, DTensor):
        if tensor._layout.mesh is not mesh:
            raise MeshError(f"the tensor is already on {tensor._layout.mesh}, not on {mesh}; use full_tensor() first")
        return tensor.redistribute(placements=placements)
    check_strided(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes leaves of the graph: the gradient of what this tensor was computed from would be "
            "lost. Use DTensor.from_local, which passes gradients on, or detach() the tensor first"
        )
    layout = Layout.of(mesh, tensor.shape, placements)
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.shape):
        raise MeshError(f"src_data_rank={src_data_rank} is not on every axis of {mesh}")
    if src_data_rank is not None:
        _check_equally_long(tensor, mesh)
    with torch.no_grad():
        plain = tensor.detach() if tensor.is_meta else tensor.detach().to(mesh.device_type)
        plain = plain.contiguous()  # what is sent between ranks arrives so
        if src_data_rank is not None and (not plain.is_meta or mesh.device_type == "meta"):
            for axis in range(mesh.ndim):
                plain = mesh.port.broadcast([plain] * len(mesh.held), mesh, (axis,), src_data_rank)[0]
        moves = plan_moves(Layout(mesh, tensor.shape), layout)
        moved = run_path(spread(plain, mesh), moves)
        if all(move.shares_memory for move in moves):  # some ranks would share storage with the user's tensor
            moved = moved.clone()
        made = wrap(moved, layout)
    return made.requires_grad_(tensor.requires_grad)


def _check_equally_long(tensor: Tensor, mesh: Mesh) -> None:
    """Ranks whose batches are not equally long would wait for each other."""
    try:
        check_alike(tensor, mesh)
    except ShardShapeError as error:
        raise ShardShapeError(
            f"distribute_tensor takes the same tensor on every rank of {mesh}: {error}. Where ranks have parts of "
            f"their own, DTensor.from_local(part, mesh, placements, run_check=True) takes uneven ones"
        ) from None


def from_parts(
    part: Tensor, mesh: Mesh, placements: Placements, shape: Sequence[int] | None, *, compare: bool
) -> DTensor:
    """`from_local` of what ranks bring in every call. Where they `compare` it, parts of a dim may be uneven, and other
    shapes or dtypes that differ raise on all ranks."""
    check_strided(part)
    local = part if isinstance(part, Ranked) else spread(part, mesh)
    layout = layout_of_shards(local, mesh, placements, run_check=False, shape=shape, compare=compare)
    return wrap(plain_shards(local, layout), layout)
