"""The port: the only way data passes between ranks.

A port holds the shards of one or more ranks. Every method takes one entry per *held* rank and returns one entry per
held rank: a process holds one, the simulator holds all. `axes` are axes of `mesh`, merged into one group whose
members are numbered in row-major order of those axes, in the order given. Nothing here knows about layouts or autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from shardwise.layout import Mesh

Shards = Sequence[Tensor]
Chunks = Sequence[Sequence[Tensor]]
Axes = tuple[int, ...]


class Port(Protocol):
    """What every port can do."""

    def all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        """Each member gets the reduction (`sum`, `max`, `min`, `product`) over its group."""

    def all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        """Each member gets all members' shards; `shapes[held][member]` are theirs."""

    def reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        """Each member brings one chunk per member and gets the reduction of the chunks meant for it."""

    def all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        """Each member brings one chunk per member and gets those meant for it; `shapes[held][member]` are theirs."""

    def broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        """Each member gets the shard of the member numbered `source`."""

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        """How pickle makes the mesh again."""
