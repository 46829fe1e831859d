"""What is said of a program: what it is for, what it costs, its ops, and its collectives as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from shardwise.comm.recording import RecordingPort
from shardwise.debug.table import size, tables
from shardwise.dispatch.planning.fallback import short_dtype
from shardwise.graph.comms import comms_of
from shardwise.graph.guards import Guards
from shardwise.graph.memory import memory_of
from shardwise.graph.nodes import Collective, Draw
from shardwise.graph.program import (
    FromArgument,
    FromGradient,
    FromHost,
    FromObject,
    Given,
    Part,
    Place,
    Program,
    Result,
    Source,
)
from shardwise.graph.reached import PLAIN
from shardwise.graph.show.expressions import expressions
from shardwise.graph.show.layouts import layouts_of
from shardwise.graph.show.lines import MOST, Lines, OpLine
from shardwise.graph.show.phases import phases_of
from shardwise.graph.show.repeats import folded
from shardwise.graph.show.text import Page, Text, labelled, laid_out, plain
from shardwise.layout import Layout, Mesh


@dataclass(frozen=True)
class Report:
    """What is said of one program. Of the ranks held here, the first one's part is shown."""

    program: Program
    guards: Guards
    runs: str
    width: int
    every: bool

    def page(self) -> Page:
        ops: list[OpLine] = self._lines.of(self.part.graph)
        return [*self._facts(ops), plain(""), *self._ops(ops), *self._ends(), plain(""), *self._collectives()]

    # What it is for, and what it costs

    def _facts(self, ops: Sequence[OpLine]) -> Iterator[Text]:
        for label, said in (
            ("given", ", ".join(self._given()) or "nothing"),
            ("ranks", self._ranks()),
            ("run", self.runs),
            ("ops", f"{len(ops)}, and {self._host_says()}"),
            ("sends", self._sends()),
            ("memory", self._memory()),
        ):
            yield from labelled(label, said, self.width)

    def _given(self) -> Iterator[str]:
        """The arguments that it was captured for."""
        for number, kind in enumerate(self.guards.kinds):
            name = self.guards.names.leaf(number)
            if isinstance(kind, tuple) and len(kind) > 2:
                _, layout, own, dtype, *_ = kind
                yield f"{name} {short_dtype(dtype)}{layout or '[' + ','.join(map(str, own[0][0])) + ']'}"
            elif isinstance(kind, tuple) and kind[0] in PLAIN:
                yield f"{name}={kind[1]!r}"
            else:
                yield name

    def _ranks(self) -> str:
        if self.mesh is None:
            return "one: there are no DTensors in it"
        held, mesh = len(self.mesh.held), self.mesh
        axes = " × ".join(f"{name}={extent}" for name, extent in zip(mesh.names, mesh.shape, strict=True))
        if isinstance(mesh.port, RecordingPort):
            return f"{axes}, recorded: rank 0 of {mesh.size()}, without data"
        if self.program.is_joint:
            return f"{axes}, simulated, in one program, since more than collectives joins them"
        if held > 1:
            return f"{axes}, simulated: {held} programs in lockstep, of which rank 0's is shown"
        return f"{axes}: rank {mesh.get_rank()} of {mesh.size()}"

    def _host_says(self) -> str:
        nodes = [node for node in self.program.host.graph.nodes if node.op == "call_function"]
        seeds = sum(isinstance(node.target, Draw) for node in nodes)
        return f"{len(nodes)} on numbers of the host" + (f", {_some(seeds, 'seed')} drawn" if seeds else "")

    def _sends(self) -> str:
        comms = comms_of(self.program)
        if not comms:
            return "nothing"
        kinds = Counter(comm.kind for comm in comms)
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return f"{size(sum(comm.wire_bytes for comm in comms))} in {_some(len(comms), 'collective')} ({named})"

    def _memory(self) -> str:
        need = memory_of(self.part.graph)
        return f"{size(need.peak)} at most: {size(need.given)} that it is given, and {size(need.made)} that it makes"

    # Its ops

    @cached_property
    def part(self) -> Part:
        return self.program.ranks[0]

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of all ranks that take part."""
        meshes = [node.target.mesh for node in self.part.graph.nodes if isinstance(node.target, Collective)]
        layouts = [_layout_of(x) for source in self.part.sources if (x := _owner(source)) is not None]
        meshes += [layout.mesh for layout in layouts if layout is not None]
        meshes += [
            kind[1].mesh for kind in self.guards.kinds if isinstance(kind, tuple) and isinstance(kind[1], Layout)
        ]
        return meshes[0].root if meshes else None

    @cached_property
    def inputs(self) -> dict[fx.Node, Source]:
        nodes = [node for node in self.part.graph.nodes if node.op == "placeholder"]
        return dict(zip(nodes, self.part.sources, strict=True))

    @cached_property
    def _numbers(self) -> list[str]:
        """What the host computes, by the number of its outputs."""
        host = self.program.host
        nodes = [node for node in host.graph.nodes if node.op == "placeholder"]
        names = {node: self.guards.names.of(source) for node, source in zip(nodes, host.sources, strict=True)}
        return expressions(host.graph, names)

    @cached_property
    def _lines(self) -> Lines:
        graph, every = self.part.graph, self.every
        names = {node: self._name(source) for node, source in self.inputs.items()}
        layouts = {} if self.program.is_joint else layouts_of(graph, self._input_layouts(), 0)
        return Lines(names, layouts, phases_of(graph, self._kept_by_optimizers()), every=every)

    def _name(self, source: Source) -> str:
        if isinstance(source, FromHost):
            return self._numbers[source.number]
        if name := self.guards.names.of(source):
            return name
        if isinstance(source, FromObject) and not source.tensor.dim() and source.tensor.device.type == "cpu":
            return repr(source.tensor.item())
        return "constant"

    def _input_layouts(self) -> dict[fx.Node, Layout]:
        found = {}
        for node, source in self.inputs.items():
            place = source.of if isinstance(source, FromGradient) else source
            layout = self._layout_at(place) if isinstance(place, (FromArgument, FromObject)) else None
            if layout is not None:
                found[node] = layout.gradient if isinstance(source, FromGradient) else layout
        return found

    def _layout_at(self, place: Place) -> Layout | None:
        if isinstance(place, FromObject):
            return _layout_of(place.owner)
        layout: Layout | None = self.guards.kinds[place.leaf][1]
        return layout

    def _kept_by_optimizers(self) -> set[fx.Node]:
        kept: set[int] = set()
        for optimizer, state, _ in self.guards.states:
            kept |= {id(param) for group in optimizer.param_groups for param in group["params"]}
            kept |= {id(x) for own in state.values() for x in tree_flatten(own)[0] if isinstance(x, Tensor)}
        return {
            node for node, source in self.inputs.items() if isinstance(source, FromObject) and id(source.owner) in kept
        }

    def _ops(self, ops: Sequence[OpLine]) -> Iterator[Text]:
        if self.mesh is not None:
            yield plain("f32[8,4] S(0)@dp: a whole tensor and how it lies; f32(4,4): this rank's, where that is not known", "place")
        for phase, found in groupby(ops, key=lambda line: line.phase):
            lines = list(found)
            yield plain(phase, "head")
            yield from laid_out(lines if self.every else folded(lines), self.width)

    # What comes out

    def _ends(self) -> Iterator[Text]:
        outputs = list(self.part.graph.nodes)[-1].args[0]
        returned = [x for x in tree_flatten(self.program.results)[0] if isinstance(x, (Result, Given))]
        said = [self._result(x, outputs) for x in returned]
        gradients = []
        for gradient in self.program.gradients:
            if gradient.output is not None and gradient.output.rank == 0:
                made = self._lines.value(outputs[gradient.output.number])
                gradients.append(f"{self.guards.names.of(FromGradient(gradient.of))} = {made}")
        for label, values in (("returns", said), ("leaves", gradients)):
            shown = values if self.every or len(values) <= MOST + 1 else [*values[:MOST], f"{len(values) - MOST} more"]
            if shown:
                yield from labelled(label, ", ".join(shown), self.width)

    def _result(self, result: Result | Given, outputs: Any) -> str:
        if isinstance(result, Given):
            return self.guards.names.of_place(result.place) or "a tensor that it was given"
        made = outputs[result.shards[0].number]
        facts = made.meta.get("facts")
        kind = "" if facts is None else f" {short_dtype(facts.dtype)}{result.layout}" if result.layout else ""
        return f"{self._lines.value(made)}{kind}"

    def _collectives(self) -> Page:
        comms = comms_of(self.program)
        return list(tables(comms, self.width)) if comms else []


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _owner(source: Source) -> Tensor | None:
    place = source.of if isinstance(source, FromGradient) else source
    return place.owner if isinstance(place, FromObject) else None


def _layout_of(x: Tensor) -> Layout | None:
    layout: Layout | None = x.__dict__.get("_layout")
    return layout
