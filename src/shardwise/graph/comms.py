"""The collectives of a program, in the form in which those of eager programs are recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardwise.comm.record import Comm
from shardwise.graph.nodes import Collective
from shardwise.graph.program import Facts, Line, Program


def comms_of(program: Program, rank: int = 0) -> list[Comm]:
    """The collectives that one of the ranks held here takes part in, in their order."""
    part = program.ranks[0 if program.is_joint else rank]
    nodes = [node for node in part.graph.nodes if isinstance(node.target, Collective)]
    return [_comm(node, node.target, rank if program.is_joint else None) for node in nodes]


def _comm(node: fx.Node, collective: Any, rank: int | None) -> Comm:
    """What is known of a collective; where it was captured, it was noted what it is for."""
    brought = node.args[0] if rank is None else node.args[0][rank]  # type: ignore[index]
    num_bytes = bytes_of(brought)
    known: Comm | None = node.meta.get("comm")
    if known is not None:
        same = (collective.kind, collective.axis_names, collective.ranks)
        return replace(known, kind=same[0], axes=same[1], ranks=same[2], bytes=num_bytes)
    line: Line | None = node.meta.get("line")
    place = ("", 0) if line is None else (line.file, line.number)
    backward = bool(node.meta.get("backward")) or (line is not None and line.backward)
    return Comm(collective.kind, collective.axis_names, collective.ranks, num_bytes, backward, *place)


def bytes_of(value: Any) -> int:
    """The bytes of the tensors that nodes give."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    facts: list[Facts | None] = [node.meta.get("facts") for node in found]
    return sum(x.bytes for x in facts if x is not None)
