"""What is said of a program: what it is for, what it costs, its ops, and its collectives as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.comm.record import Comm
from shardwise.comm.recording import RecordingPort
from shardwise.debug.table import tables
from shardwise.graph.cost.comms import comms_of
from shardwise.graph.cost.memory import memory_of
from shardwise.graph.guards.guards import Guards
from shardwise.graph.guards.kinds import said
from shardwise.graph.guards.names import place_of
from shardwise.graph.nodes import Draw, collective_of
from shardwise.graph.program import Program
from shardwise.graph.show.part import ShownPart
from shardwise.graph.show.text import Page, Text, labelled, plain
from shardwise.layout import Mesh
from shardwise.words import counted, size


@dataclass(frozen=True)
class Report:
    """What is said of one program, which `runs` in some way."""

    program: Program
    guards: Guards
    runs: str
    width: int
    every: bool

    def page(self) -> Page:
        part = ShownPart(self.program, self.guards, every=self.every)
        comms = list(tables(self.comms, self.width)) if self.comms else []
        return [*self._facts(len(part.ops)), plain(""), *part.page(self.width), *([plain("")] * bool(comms)), *comms]

    def _facts(self, num_ops: int) -> Iterator[Text]:
        for label, what in (
            ("given", ", ".join(self._given()) or "nothing"),
            ("ranks", self._ranks()),
            ("run", self.runs),
            ("ops", f"{num_ops}{self._on_host()}"),
            ("sends", self._sends()),
            ("memory", self._memory()),
            *(("" if number else "passes", words) for number, words in enumerate(self._passes())),
        ):
            yield from labelled(label, what, self.width)

    def _given(self) -> Iterator[str]:
        """The arguments that it was captured for."""
        for number, kind in enumerate(self.guards.kinds.of):
            name = self.guards.names.leaf(number)
            if isinstance(kind, tuple):
                yield f"{name}{'=' if len(kind) == 2 else ' '}{said(kind)}"
            else:
                yield name

    def _ranks(self) -> str:
        mesh = self.mesh
        if mesh is None:
            return "one: there are no DTensors in it"
        axes = " × ".join(f"{name}={extent}" for name, extent in zip(mesh.names, mesh.shape, strict=True))
        if isinstance(mesh.port, RecordingPort):
            return f"{axes}, recorded: rank 0 of {mesh.size()}, without data"
        if self.program.is_joint:
            return f"{axes}, simulated, in one program, since more than collectives joins them"
        if len(mesh.held) > 1:
            return f"{axes}, simulated: {len(mesh.held)} programs in lockstep, of which rank 0's is shown"
        return f"{axes}: rank {mesh.get_rank()} of {mesh.size()}"

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of all ranks that take part."""
        part = self.program.ranks[0]
        meshes = [x.mesh for node in part.graph.nodes if (x := collective_of(node)) is not None]
        places = [place for source in part.sources if (place := place_of(source)) is not None]
        meshes += [layout.mesh for place in places if (layout := self.guards.layout_at(place)) is not None]
        return meshes[0].root if meshes else None

    def _on_host(self) -> str:
        nodes = [node for node in self.program.host.graph.nodes if node.op == "call_function"]
        seeds = sum(isinstance(node.target, Draw) for node in nodes)
        drawn = f", {counted(seeds, 'seed')} drawn" if seeds else ""
        return f", and {len(nodes)} on numbers of the host{drawn}" if nodes else ""

    @cached_property
    def comms(self) -> list[Comm]:
        return comms_of(self.program, self.guards.layout_at)

    def _sends(self) -> str:
        kinds = Counter(comm.kind for comm in self.comms)
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        sent = size(sum(comm.wire_bytes for comm in self.comms))
        return f"{sent} in {counted(len(self.comms), 'collective')} ({named})" if kinds else "nothing"

    def _passes(self) -> list[str]:
        """What passes have changed."""
        return [str(x) for x in self.program.reports if x.notes or x.left_out or x.before != x.after]

    def _memory(self) -> str:
        need = memory_of(self.program.ranks[0].graph)
        whose = " for all ranks together" if self.program.is_joint else ""
        parts = f"{size(need.given)} that it is given, and {size(need.made)} that it makes"
        return f"{size(need.peak)} at most{whose}: {parts}"
