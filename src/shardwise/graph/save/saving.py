"""Saving the programs of a function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.errors import SavedProgramError
from shardwise.graph.guards.guards import Guards
from shardwise.graph.program import Program
from shardwise.graph.run.run import Run
from shardwise.graph.save.files import write
from shardwise.graph.save.needs import mesh_said, needs_of
from shardwise.graph.save.programs import ProgramWriter
from shardwise.layout import Layout


def save(name: str, runs: Sequence[tuple[Guards, Run]], folder: Path) -> None:
    """Save programs, those of the ranks held in this process."""
    constants: list[Tensor] = []
    found = []
    for guards, run in runs:
        try:
            entry, own = _entry(run.program, guards)
        except SavedProgramError as error:
            raise SavedProgramError(f"{name}: {error}") from None
        entry["constants"] = [len(constants), len(constants) + len(own)]
        found.append(entry)
        constants += own
    write(folder, found, constants)


def _entry(program: Program, guards: Guards) -> tuple[dict[str, Any], list[Tensor]]:
    """A program, with all that is needed to find out whether it fits, and to bind it."""
    writer = ProgramWriter(guards.names)
    written = writer.write(program)
    objects = dict(sorted(writer.objects.items()))
    return {
        "why": guards.why,
        "needs": needs_of(guards, objects),
        "asked": sorted(guards.asked),
        "objects": {name: _mesh(x.__dict__.get("_layout"), writer) for name, x in objects.items()},
        "arguments": [_mesh(kind[1] if isinstance(kind, tuple) else None, writer) for kind in guards.kinds.of],
        "meshes": [mesh_said(mesh) for mesh in writer.meshes],
        "program": written,
        "shared": writer.values.shared,
    }, writer.constants


def _mesh(layout: Any, writer: ProgramWriter) -> int | None:
    """The number of the mesh that a tensor is on, if it is on one."""
    return writer.number_of(layout.mesh) if isinstance(layout, Layout) else None
