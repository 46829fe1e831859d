"""The port: the only way data passes between ranks.

A port holds the shards of one or more ranks. Every method takes one entry per *held* rank and returns one entry per
held rank: a process holds one, the simulator holds all. `axes` are axes of `mesh`, merged into one group whose
members are numbered in row-major order of those axes, in the order given. Nothing here knows about layouts or autograd.

Each collective has a form that starts it and returns a `Handle`; the other form waits as well. What all ports have in
common is here: axes of one rank are left out, so that a group of one communicates nothing, and the rest is recorded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shardwise.comm import record
from shardwise.layout import Mesh

Shards = Sequence[Tensor]
Chunks = Sequence[Sequence[Tensor]]
Axes = tuple[int, ...]
Shapes = Sequence[Sequence[tuple]]

_as_subclass = torch._C.TensorBase.as_subclass
_T = TypeVar("_T")


class Handle(Generic[_T]):
    """A collective under way. It keeps the memory that is sent from and received into, and is waited for at the latest
    when nobody wants it any more: a backend may still write there."""

    __slots__ = ("__weakref__", "_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._finish: Callable[[], _T] | None = finish
        self._error: Exception | None = None
        self._result: Any = None

    @property
    def is_done(self) -> bool:
        return self._finish is None

    def wait(self) -> _T:
        """What the collective brings, once it has."""
        if self._finish is not None:
            try:
                self._result = self._finish()
            except Exception as error:
                self._error = error
            self._finish = None
        if self._error is not None:
            raise self._error
        return self._result

    def __del__(self) -> None:
        if self._finish is not None:
            with suppress(Exception):  # nobody asks how it ended
                self.wait()


def done(result: _T) -> Handle[_T]:
    """The handle of a collective that is complete."""
    handle = Handle(lambda: result)
    handle.wait()
    return handle


def communicating(mesh: Mesh, axes: Axes) -> Axes:
    """The axes with several ranks."""
    return tuple([axis for axis in axes if mesh.shape[axis] > 1])


_ALONE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: x.clone(),
    "all_gather": lambda x: [x.clone()],
    "reduce_scatter": lambda chunks: chunks[0].clone(),
    "all_to_all": lambda chunks: [chunks[0].clone()],
    "broadcast": lambda x: x.clone(),
}
"""What a collective gives the only member of a group."""


class Port(ABC):
    """What every port can do. Each has the underlined forms of the collectives, over axes with several ranks."""

    overlaps = False
    """Whether collectives go on while the program does; otherwise they are complete when they have been started."""

    alias: Callable[[Tensor, type[Tensor]], Tensor] = staticmethod(_as_subclass)
    """`alias(x, Tensor)` is a plain tensor with the storage and the history of a shard."""

    def all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str, *, owned: bool = False) -> list[Tensor]:
        """Each member gets the reduction (`sum`, `max`, `min`, `product`) over its group. `owned` says that the shards
        are contiguous and nobody else's: they may be written to."""
        return self.start_all_reduce(shards, mesh, axes, op, owned=owned, awaited=True).wait()

    def start_all_reduce(
        self, shards: Shards, mesh: Mesh, axes: Axes, op: str, **options: bool
    ) -> Handle[list[Tensor]]:
        return self._start("all_reduce", shards, mesh, axes, op, **options)

    def all_gather(self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        """Each member gets all members' shards; `shapes[held][member]` are theirs."""
        return self.start_all_gather(shards, mesh, axes, shapes, awaited=True).wait()

    def start_all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes, *, awaited: bool = False
    ) -> Handle[list[list[Tensor]]]:
        return self._start("all_gather", shards, mesh, axes, shapes, awaited=awaited)

    def stack(self, shards: Shards, mesh: Mesh, axes: Axes) -> list[Tensor]:
        """Each member gets all members' shards, which are of one shape, along a new first dim."""
        size = math.prod(mesh.shape[axis] for axis in axes)
        rows = self.all_gather(shards, mesh, axes, [[tuple(shard.shape)] * size for shard in shards])
        return [torch.stack(row) for row in rows]

    def reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        """Each member brings one chunk per member and gets the reduction of the chunks meant for it."""
        return self.start_reduce_scatter(chunks, mesh, axes, op, awaited=True).wait()

    def start_reduce_scatter(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str, *, awaited: bool = False
    ) -> Handle[list[Tensor]]:
        return self._start("reduce_scatter", chunks, mesh, axes, op, awaited=awaited)

    def all_to_all(self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes) -> list[list[Tensor]]:
        """Each member brings one chunk per member and gets those meant for it; `shapes[held][member]` are theirs."""
        return self.start_all_to_all(chunks, mesh, axes, shapes, awaited=True).wait()

    def start_all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes, *, awaited: bool = False
    ) -> Handle[list[list[Tensor]]]:
        return self._start("all_to_all", chunks, mesh, axes, shapes, awaited=awaited)

    def broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        """Each member gets the shard of the member numbered `source`."""
        return self._start("broadcast", shards, mesh, axes, source, awaited=True).wait()

    def _start(
        self, kind: str, brought: Sequence[Any], mesh: Mesh, axes: Axes, how: Any, **options: bool
    ) -> Handle[Any]:
        axes = communicating(mesh, axes)
        if not axes:
            return done([_ALONE[kind](one) for one in brought])
        if record.listeners:
            sent = brought[:1] if isinstance(brought[0], Tensor) else brought[0]
            # A shard may come as the DTensor that it is the storage of, whose `numel` is global.
            record.note(kind, mesh, axes, [_as_subclass(x, Tensor) for x in sent])
        return self._begin(getattr(self, f"_{kind}"), brought, mesh, axes, how, **options)

    def _begin(self, run: Callable[..., Any], *given: Any, awaited: bool = False, **options: bool) -> Handle[Any]:
        """Begin a collective, which is `awaited` at once or not. Here it is over when it returns."""
        return done(run(*given))

    @abstractmethod
    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        """How pickle makes the mesh again."""
