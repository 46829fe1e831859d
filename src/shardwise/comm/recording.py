"""The port that only counts: one rank of a mesh of any size, on meta shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.port import Axes, Chunks, Port, Shapes, Shards
from shardwise.comm.simulated import checked_axes
from shardwise.layout import Mesh


class RecordingPort(Port):
    """One rank of a mesh of any size, on meta shards: nothing moves, everything is counted."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.shape = shape
        self.names = names

    def _all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        return [x.clone(memory_format=torch.contiguous_format) for x in shards]

    def _all_gather(self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        return [[shards[0].new_empty(shape) for shape in shapes[0]]]

    def _reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        return [chunks[0][0].clone(memory_format=torch.contiguous_format)]

    def _all_to_all(self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        return [[chunks[0][0].new_empty(shape) for shape in shapes[0]]]

    def _broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        return [x.clone(memory_format=torch.contiguous_format) for x in shards]

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return rebuild_recording, (self.shape, self.names, mesh.names)


@lru_cache(maxsize=1024)
def _recording(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(
        RecordingPort(shape, names),
        names=names,
        shape=shape,
        root_axes=tuple(range(len(shape))),
        held=((0,) * len(shape),),
        device_type="meta",
    )


def recording(shape: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
    """A mesh of any size that holds no data: programs run on meta shards of rank 0 and their collectives are counted.

    >>> recording((128, 80), ("dp", "tp")).size()
    10240
    """
    return _recording(*checked_axes(shape, names))


def rebuild_recording(shape: tuple[int, ...], names: tuple[str, ...], kept: tuple[str, ...]) -> Mesh:
    return recording(shape, names)[kept]
