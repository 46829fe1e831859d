"""The port of a mesh while a program is captured: a collective is not made, but noted where it stands in the program.

A captured mesh stands for another one, whose ranks will run the program. It holds the same ranks, so plans made for it
are plans for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.port import Axes, Chunks, Port, Shapes, Shards
from shardwise.errors import CaptureError
from shardwise.layout import Mesh

Made = Callable[[Sequence[Any]], list[Any]]
"""Makes tensors of the shapes that a collective brings, of what is brought to it."""


class Noter(Protocol):
    """Who captures a program. What it is told of would need data, or would happen on the host."""

    def collective(
        self,
        kind: str,
        brought: Sequence[Any],
        mesh: Mesh,
        axes: Axes,
        how: Any,
        made: Made,
    ) -> list[Any]:
        """A collective of the mesh that runs the program."""
        ...

    def seed(self, draw: Callable[[], int]) -> Any:
        """A number that the host draws, for streams of random numbers."""
        ...

    def stream(self, seed: Any, number: int) -> AbstractContextManager[None]:
        """Inside, random numbers come from the stream of that number."""
        ...

    def meet(self, x: Tensor) -> None:
        """A tensor of the user's is about to enter the program."""
        ...

    def is_alike_beside(self, mesh: Mesh) -> bool:
        """Whether ranks at one place of a mesh have been given the same, wherever they are along other axes."""
        ...

    def set_data(self, x: Tensor, data: Tensor) -> None:
        """A shard is about to get the memory of another one."""
        ...

    def hand_out(self, name: str) -> None:
        """A function of torch's, of that name, is about to hand out data."""
        ...

    def step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        ...

    def check(self, found: Tensor, verify: Callable[[Any], None]) -> None:
        """A tensor of one number, for which `verify` raises if it is bad, on all ranks alike."""
        ...


noters: list[Noter] = []
"""Who captures now, the innermost last. A plain list: the backward pass runs on other threads on accelerators."""


class CapturedPort(Port):
    """The ranks of another port, as a program sees them."""

    def __init__(self, stands_for: Mesh) -> None:
        self.stands_for = stands_for

    @staticmethod
    def alias(x: Tensor, cls: type[Tensor]) -> Tensor:
        return torch.ops.aten.alias.default(x)

    def _all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str, **_: bool) -> list[Tensor]:
        return self._note("all_reduce", shards, mesh, axes, op, lambda shards: [_like(x) for x in shards])

    def _all_gather(self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        return self._note("all_gather", shards, mesh, axes, shapes, lambda shards: _of_shapes(shards, shapes))

    def _reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        own = [mesh.number(at, axes) for at in mesh.held]
        return self._note(
            "reduce_scatter", chunks, mesh, axes, op, lambda chunks: [_like(mine[i]) for mine, i in zip(chunks, own)]
        )

    def _all_to_all(self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        def made(chunks: Chunks) -> list[list[Tensor]]:
            return _of_shapes([mine[0] for mine in chunks], shapes)

        return self._note("all_to_all", chunks, mesh, axes, shapes, made)

    def _broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        return self._note("broadcast", shards, mesh, axes, source, lambda shards: [_like(x) for x in shards])

    def _note(
        self,
        kind: str,
        brought: Sequence[Any],
        mesh: Mesh,
        axes: Axes,
        how: Any,
        made: Made,
    ) -> list[Any]:
        if not noters:
            raise CaptureError(
                f"a tensor on {mesh} is used that has no data, since it was left behind by a capture: what is needed "
                f"outside of a captured function must be returned by it"
            )
        return noters[-1].collective(kind, brought, self.stands_for[mesh.names], axes, how, made)

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return self.stands_for.port.rebuild_mesh(self.stands_for[mesh.names])


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _of_shapes(likes: Sequence[Tensor], shapes: Shapes) -> list[list[Tensor]]:
    return [[like.new_empty(shape) for shape in own] for like, own in zip(likes, shapes, strict=True)]


def captured_mesh(mesh: Mesh) -> Mesh:
    """The mesh that stands for another one in programs that are captured."""
    if isinstance(mesh.port, CapturedPort):
        return mesh
    root = mesh.root
    if root.captured is None:
        root.captured = Mesh(
            CapturedPort(root),
            names=root.names,
            shape=root.shape,
            root_axes=root.root_axes,
            held=root.held,
            device_type=root.device_type,
            origin=root.origin,
        )
    return root.captured.add_submesh(mesh.names, mesh.origin)


def running_mesh(mesh: Mesh) -> Mesh:
    """The mesh that a captured one stands for, or a mesh itself."""
    return mesh.port.stands_for[mesh.names] if isinstance(mesh.port, CapturedPort) else mesh
