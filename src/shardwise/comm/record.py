"""The record of what was communicated, and why: every port writes here, whoever listens reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.comm import cause as causes
from shardwise.comm.cause import OF_REPLICATED, UNSEEN, Cause, listeners
from shardwise.comm.ring import ring_bytes_of
from shardwise.layout import Layout, Mesh


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective, as one rank sees it.

    `kind` and the mesh `axes` it ran over, the number of `ranks` in its group, the `bytes` that this rank brought,
    whether it ran in the `backward` pass; then the user's `file` and `line`, the `function` called there and the
    `argument` that moved, from `source` to `target`, and `why`. In the backward pass line, function and argument are of
    the forward call whose gradient it moves.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    bytes: int
    backward: bool
    file: str = ""
    line: int = 0
    function: str = ""
    argument: str = ""
    source: Layout | None = None
    target: Layout | None = None
    why: str = ""

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank sends, by the ring model."""
        return math.ceil(ring_bytes_of(self.kind, self.bytes, self.ranks))


def note(kind: str, mesh: Mesh, axes: tuple[int, ...], payload: Tensor | list[Tensor] | tuple[Tensor, ...]) -> None:
    """Tell every listener about one collective."""
    if not listeners:
        return
    tensors = [payload] if isinstance(payload, Tensor) else payload
    facts = (
        kind,
        tuple(mesh.names[axis] for axis in axes),
        math.prod(mesh.shape[axis] for axis in axes),
        sum(t.numel() * t.element_size() for t in tensors),
        causes.in_backward(),
    )
    comm = Comm(*facts, **_explained(kind, axes))
    for listener in listeners:
        listener.append(comm)


def _explained(kind: str, axes: tuple[int, ...]) -> dict[str, Any]:
    """What a collective is for, as fields of its `Comm`."""
    cause, of_gradient = causes.cause()
    if cause is None:
        return {"why": UNSEEN}
    source, target, why = _ends(cause, kind, axes, of_gradient)
    said = {"file": cause.file, "line": cause.line, "function": cause.function, "argument": cause.argument}
    return {**said, "source": source, "target": target, "why": why}


def _ends(
    cause: Cause, kind: str, axes: tuple[int, ...], of_gradient: bool
) -> tuple[Layout | None, Layout | None, str]:
    """From where to where a collective moves something, and why. Programs inside of functions move parts of values."""
    why = f"gradient: {cause.why}" if of_gradient else cause.why
    if not cause.path or cause.why == causes.INSIDE:
        return None, None, why
    back = [move.dual for move in reversed(cause.path)] if of_gradient else []
    found = [move for move in (*back, *cause.path) if (move.kind, move.axes) == (kind, axes)]
    if found and of_gradient and found[0] in back and found[0].dual.kind == "nothing":
        why = OF_REPLICATED
    found = found[:1] or back or list(cause.path)  # several collectives may make one move
    return found[0].source.layout, found[-1].target.layout, why


fallbacks: list[list[str]] = []
"""Listeners for calls without a sharding rule, which gather their inputs."""


def note_fallback(name: str) -> None:
    """Tell every listener about a call that was gathered."""
    for listener in fallbacks:
        listener.append(name)


@contextmanager
def off_the_record() -> Iterator[None]:
    """Inside, nothing is recorded: for checks that a program did not ask for and that run only once."""
    silenced = listeners[:]
    listeners.clear()
    try:
        yield
    finally:
        listeners[:] = silenced
