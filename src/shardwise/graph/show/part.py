"""The part of the first rank held here, as lines of a page: its ops by phases, what it returns, and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from shardwise.graph.guards.guards import Guards
from shardwise.graph.guards.names import place_of
from shardwise.graph.program import FromGradient, FromHost, FromObject, Given, Output, Place, Program, Result, Source
from shardwise.graph.show.expressions import expressions
from shardwise.graph.show.layouts import layouts_of
from shardwise.graph.show.lines import MOST, Lines, OpLine
from shardwise.graph.show.phases import phases_of
from shardwise.graph.show.repeats import folded
from shardwise.graph.show.text import Text, broken, labelled, laid_out, plain
from shardwise.layout import Layout
from shardwise.words import short_dtype

TYPES = "f32[8,4] S(0)@dp: a whole tensor and how it lies; f32(4,4): this rank's, where that is not known"


class ShownPart:
    """The ops of a part, and what stands behind them."""

    def __init__(self, program: Program, guards: Guards, *, every: bool) -> None:
        self.program, self.guards, self.every = program, guards, every
        self.part = program.ranks[0]
        nodes = [node for node in self.part.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(nodes, self.part.sources, strict=True))
        names = {node: self._name(node, source) for node, source in self.inputs.items()}
        graph = self.part.graph
        layouts = {} if program.is_joint else layouts_of(graph, self._input_layouts(), 0)
        self._lines = Lines(names, layouts, phases_of(graph, self._kept_by_optimizers()), every=every)
        self.ops: list[OpLine] = self._lines.of(graph)

    def page(self, width: int) -> Iterator[Text]:
        yield from (plain(line, "place") for line in broken(TYPES, width))
        for phase, found in groupby(self.ops, key=lambda line: line.phase):
            lines = list(found)
            yield plain(phase, "head")
            yield from laid_out(lines if self.every else folded(lines), width)
        yield from self._ends(width)

    # What comes in

    @cached_property
    def _numbers(self) -> list[str]:
        """What the host computes, by the number of its outputs."""
        host = self.program.host
        nodes = [node for node in host.graph.nodes if node.op == "placeholder"]
        names = {node: self.guards.names.of(source) for node, source in zip(nodes, host.sources, strict=True)}
        return expressions(host.graph, names)

    def _name(self, node: fx.Node, source: Source) -> str:
        if isinstance(source, FromHost):
            return self._numbers[source.number]
        if name := self.guards.names.of(source):
            return name
        if not node.meta.get("constant") or not isinstance(source, FromObject):
            return "a tensor"
        is_number = not source.tensor.dim() and source.tensor.device.type == "cpu"
        return repr(source.tensor.item()) if is_number else "a constant"

    def _input_layouts(self) -> dict[fx.Node, Layout]:
        found = {}
        for node, source in self.inputs.items():
            place = place_of(source)
            layout = self.guards.layout_at(place) if place is not None else None
            if layout is not None:
                found[node] = layout.gradient if isinstance(source, FromGradient) else layout
        return found

    def _kept_by_optimizers(self) -> set[fx.Node]:
        kept: set[int] = set()
        for optimizer in self.guards.optimizers:
            kept |= {id(param) for group in optimizer.param_groups for param in group["params"]}
            kept |= {id(x) for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)}
        return {x for x, source in self.inputs.items() if isinstance(source, FromObject) and id(source.owner) in kept}

    # What comes out

    def _ends(self, width: int) -> Iterator[Text]:
        *_, last = self.part.graph.nodes
        outputs: Any = last.args[0]
        returned = [x for x in tree_leaves(self.program.results) if isinstance(x, (Result, Given))]
        made: list[tuple[Place, Output | None, tuple[int, ...]]] = [
            (x.of, x.output, ()) for x in self.program.gradients
        ]
        if self.program.differentiable is not None:
            made += [(leaf.of, leaf.gradient, leaf.reduced) for leaf in self.program.differentiable.leaves]
        gradients = [
            self._gradient(of, outputs[output.number], reduced)
            for of, output, reduced in made
            if output is not None and output.rank == 0
        ]
        for label, said in (("returns", [self._result(x, outputs) for x in returned]), ("leaves", gradients)):
            shown = said if self.every or len(said) <= MOST + 1 else [*said[:MOST], f"and {len(said) - MOST} more"]
            if shown:
                yield from labelled(label, ", ".join(shown), width)

    def _gradient(self, of: Place, made: fx.Node, reduced: Sequence[int]) -> str:
        layout = self.guards.layout_at(of)
        axes = "" if layout is None else "×".join(layout.mesh.names[axis] for axis in reduced)
        term = f" (a term of a sum over {axes})" if axes else ""
        return f"{self.guards.names.of(FromGradient(of))} = {self._lines.value(made)}{term}"

    def _result(self, result: Result | Given, outputs: Sequence[fx.Node]) -> str:
        if isinstance(result, Given):
            return self.guards.names.of_place(result.place) or "a tensor that it was given"
        made = outputs[result.shards[0].number]
        facts = made.meta.get("facts")
        kind = self._lines.type_of(made)
        if facts is not None and result.layout is not None:
            kind = f"{short_dtype(facts.dtype)}{result.layout}"
        return f"{self._lines.value(made)} {kind}".rstrip()
