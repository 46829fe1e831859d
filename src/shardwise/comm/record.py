"""The record of what was communicated: every port writes here, whoever listens reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import Mesh


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective, as one rank sees it: its kind, the mesh axes it ran over, the bytes this rank contributed."""

    kind: str
    axes: tuple[str, ...]
    ranks: int
    bytes: int
    backward: bool


# A plain list, not a ContextVar: on accelerators the backward pass, and the collectives in it, run on other threads.
listeners: list[list[Comm]] = []


def note(kind: str, mesh: Mesh, axes: tuple[int, ...], payload: Tensor | list[Tensor] | tuple[Tensor, ...]) -> None:
    """Tell every listener about one collective."""
    tensors = [payload] if isinstance(payload, Tensor) else payload
    comm = Comm(
        kind,
        tuple(mesh.names[axis] for axis in axes),
        math.prod(mesh.shape[axis] for axis in axes),
        sum(t.numel() * t.element_size() for t in tensors),
        torch._C._current_graph_task_id() != -1,
    )
    for listener in listeners:
        listener.append(comm)


fallbacks: list[list[str]] = []
"""Listeners for calls without a sharding rule, which gather their inputs."""


def note_fallback(name: str) -> None:
    """Tell every listener about a call that was gathered."""
    for listener in fallbacks:
        listener.append(name)


@contextmanager
def off_the_record() -> Iterator[None]:
    """Inside, nobody is told: for checks that a program did not ask for and that run only once."""
    silenced = listeners[:]
    listeners.clear()
    try:
        yield
    finally:
        listeners[:] = silenced
