"""`context_parallel`: plain tensors of which each rank has a part of the sequence, and attention among all parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from shardwise.comm import AnyMesh, ProcessGroupPort, as_mesh
from shardwise.errors import MeshError, ShardShapeError
from shardwise.layout import Mesh, Shard
from shardwise.tensor import DTensor

SEQUENCE = 2
"""The dim of queries, keys and values that is split."""


@contextmanager
def context_parallel(
    mesh: AnyMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[Tensor] | None = None,
) -> Iterator[None]:
    """Inside, each of `buffers` (inputs, targets, tables of positions) is this rank's part of it along its dim of
    `buffer_seq_dims`, in place, and `F.scaled_dot_product_attention` of plain tensors has each rank's queries meet the
    keys and values of all: gathered by one collective each, and their gradients reduce-scattered. Afterwards buffers
    are what they were, but for `no_restore_buffers`. The mesh has one axis.

    With DTensors nothing of this is needed: distribute the inputs with `Shard` of their sequence.
    """
    own = _mesh_of(mesh)
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(buffers) != len(dims):
        raise ValueError(f"context_parallel: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; each has one")
    left = {id(x) for x in no_restore_buffers or ()}
    if left - set(map(id, buffers)):
        raise ValueError("context_parallel: no_restore_buffers has a tensor that is none of buffers")
    parts = [_part(x, dim, own) for x, dim in zip(buffers, dims, strict=True)]
    kept = [None if id(x) in left else x.detach().clone() for x in buffers]
    try:
        _fill(buffers, parts)
        with _AmongAllParts(own):
            yield
    finally:
        _fill(buffers, kept)


def context_parallel_unshard(mesh: AnyMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[Tensor]:
    """The whole of tensors of which each rank has its part along a dim, such as the outputs of a model."""
    own = _mesh_of(mesh)
    return [DTensor.from_local(x, own, [Shard(dim)]).full_tensor() for x, dim in zip(buffers, seq_dims, strict=True)]


def _mesh_of(mesh: AnyMesh) -> Mesh:
    own = as_mesh(mesh)
    if own.ndim != 1:
        raise MeshError(f"context_parallel splits sequences along one axis, and {own} has {own.ndim}: take one of them")
    if not isinstance(own.port, ProcessGroupPort):
        raise MeshError(
            f"context_parallel has each process keep its part of plain tensors, and all ranks of {own} are in one: "
            f"distribute the inputs with Shard of their sequence instead, which runs attention in the same way"
        )
    return own


def _part(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    if isinstance(x, (DTensor, nn.Parameter)):
        raise TypeError(f"context_parallel: buffers are plain tensors that are split, not a {type(x).__name__}")
    if x.shape[dim] % mesh.size():
        raise ShardShapeError(
            f"context_parallel: dim {dim} of a buffer of shape {list(x.shape)} is no multiple of the {mesh.size()} "
            f"ranks of {mesh}: pad the sequence"
        )
    return x.detach().chunk(mesh.size(), dim)[mesh.get_local_rank(0)].clone()


@torch.no_grad()
def _fill(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    for x, value in zip(buffers, values, strict=True):
        if value is not None:
            x.resize_(value.shape).copy_(value)


class _AmongAllParts(TorchFunctionMode):
    """Attention of plain tensors, as that of DTensors whose sequence is split."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        return self.attention(*args, **kwargs)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **options: Any
    ) -> Any:
        if attn_mask is not None:
            raise ValueError(
                f"{resolve_name(F.scaled_dot_product_attention)}: inside context_parallel no rank knows which part of "
                f"the whole attn_mask is meant; is_causal=True is known. With DTensors masks are taken"
            )
        q, k, v = (DTensor.from_local(x, self.mesh, [Shard(SEQUENCE)]) for x in (query, key, value))
        found: Any = F.scaled_dot_product_attention(q, k, v, None, *args, **options)
        return found.redistribute(placements=[Shard(SEQUENCE)]).to_local()
