"""The port of the simulator: one process holds every rank, and a collective is a torch op among their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.port import Axes, Chunks, Port, Shapes, Shards
from shardwise.errors import MeshError
from shardwise.layout import Mesh

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class SimulatedPort(Port):
    """All ranks of a mesh, numbered row-major over its axes."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.shape = shape
        self.names = names
        self.coordinates = tuple(product(*(range(extent) for extent in shape)))
        self._groups: dict[Axes, list[list[int]]] = {}

    def groups(self, mesh: Mesh, axes: Axes) -> list[list[int]]:
        """The groups over some axes, each a list of ranks in row-major order of the axes as given."""
        roots = tuple(mesh.root_axes[axis] for axis in axes)
        if roots not in self._groups:
            found: dict[tuple, list[tuple[tuple, int]]] = {}
            for rank, coordinate in enumerate(self.coordinates):
                rest = tuple(at for axis, at in enumerate(coordinate) if axis not in roots)
                found.setdefault(rest, []).append((tuple(coordinate[axis] for axis in roots), rank))
            self._groups[roots] = [[rank for _, rank in sorted(members)] for members in found.values()]
        return self._groups[roots]

    def _each(self, mesh: Mesh, axes: Axes, run: Callable[[list[int]], Sequence[Any]]) -> list[Any]:
        results: list[Any] = [None] * len(self.coordinates)
        for group in self.groups(mesh, axes):
            for rank, result in zip(group, run(group), strict=True):
                results[rank] = result
        return results

    def _all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        def run(group: list[int]) -> list[Tensor]:
            total = reduce(_REDUCE[op], [shards[rank] for rank in group])
            return [total.clone() for _ in group]

        return self._each(mesh, axes, run)

    def _all_gather(self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        return self._each(mesh, axes, lambda group: [[shards[rank] for rank in group]] * len(group))

    def _reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        def run(group: list[int]) -> list[Tensor]:
            mine = [[chunks[rank][member] for rank in group] for member in range(len(group))]
            return [reduce(_REDUCE[op], terms).clone() for terms in mine]

        return self._each(mesh, axes, run)

    def _all_to_all(self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        def run(group: list[int]) -> list[list[Tensor]]:
            return [[chunks[rank][member].clone() for rank in group] for member in range(len(group))]

        return self._each(mesh, axes, run)

    def _broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        return self._each(mesh, axes, lambda group: [shards[group[source]].clone() for _ in group])

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return rebuild_simulated, (self.shape, self.names, mesh.device_type, mesh.names)


def checked_axes(shape: Sequence[int], names: Sequence[str] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """A mesh's shape and names as tuples, with names made up where none are given."""
    extents = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
    if not extents or any(not isinstance(extent, int) or extent < 1 for extent in extents):
        raise MeshError(f"a mesh needs at least one axis, each of at least one rank; got the shape {shape}")
    given = (names,) if isinstance(names, str) else names
    labels = tuple(f"axis{i}" for i in range(len(extents))) if given is None else tuple(given)
    if len(labels) != len(extents) or len(set(labels)) != len(labels):
        raise MeshError(f"a mesh of shape {extents} needs {len(extents)} distinct axis names; got {labels}")
    return extents, labels


def simulate(shape: Sequence[int], names: Sequence[str] | None = None, *, device: str = "cpu") -> Mesh:
    """A mesh whose ranks all live in this process: the same program as under torchrun, without a launcher.

    >>> simulate((2, 4), ("dp", "tp"))
    Mesh(dp=2, tp=4)
    """
    return _simulate(*checked_axes(shape, names), device)


@lru_cache(maxsize=1024)
def _simulate(shape: tuple[int, ...], names: tuple[str, ...], device: str) -> Mesh:
    port = SimulatedPort(shape, names)
    return Mesh(
        port,
        names=names,
        shape=shape,
        root_axes=tuple(range(len(shape))),
        held=port.coordinates,
        device_type=device,
    )


def rebuild_simulated(shape: tuple[int, ...], names: tuple[str, ...], device: str, kept: tuple[str, ...]) -> Mesh:
    return simulate(shape, names, device=device)[kept]
