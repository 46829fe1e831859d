"""The collectives of a program, in the form in which those of eager programs are recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from shardwise.comm import running_mesh
from shardwise.comm.record import Comm, listeners, off_the_record
from shardwise.graph.nodes import collective_of
from shardwise.graph.program import Facts, Line, Part, Place, Program
from shardwise.graph.run.python_ops import given_shards
from shardwise.layout import Layout
from shardwise.layout.placement import SUM

Runner = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]
"""What runs the programs of the ranks held here: from the inputs of each to the outputs of each."""

BEHIND = "gradient of a replicated tensor used on shards: summed behind the program, with others"


def comms_of(program: Program, layout_at: Callable[[Place], Layout | None]) -> list[Comm]:
    """The collectives that the first rank held here takes part in, in their order; behind them those of gradients that
    the program leaves to whatever it is a part of, to be reduced in buckets. `layout_at` knows the layouts of tensors
    that the program is given."""
    return [*comms_in(program.ranks[0], is_joint=program.is_joint), *_left(program, layout_at)]


def comms_in(part: Part, *, is_joint: bool) -> list[Comm]:
    """The collectives of a part; of one that all ranks have together, as the first of them sees them."""
    nodes = [(node, x) for node in part.graph.nodes if (x := collective_of(node)) is not None]
    return [_comm(node, x, is_joint=is_joint) for node, x in nodes]


def _left(program: Program, layout_at: Callable[[Place], Layout | None]) -> Iterator[Comm]:
    if program.differentiable is None:
        return
    *_, last = program.ranks[0].graph.nodes
    for leaf in program.differentiable.leaves:
        layout = layout_at(leaf.of) if leaf.reduced else None
        if layout is None or leaf.gradient is None or leaf.gradient.rank:
            continue
        made = last.args[0][leaf.gradient.number]
        axes = tuple(layout.mesh.names[axis] for axis in leaf.reduced)
        ranks = math.prod(layout.mesh.shape[axis] for axis in leaf.reduced)
        if ranks > 1:
            whole = layout.gradient
            terms = [SUM if axis in leaf.reduced else kept for axis, kept in enumerate(whole.pending)]
            ends = {"source": whole.with_(pending=terms), "target": whole, "why": BEHIND}
            yield Comm("all_reduce", axes, ranks, bytes_of(made), True, **ends)  # type: ignore[arg-type]


def _comm(node: fx.Node, collective: Any, *, is_joint: bool) -> Comm:
    """What is known of a collective; where it was captured, it was noted what it is for."""
    brought = node.args[0][0] if is_joint else node.args[0]  # type: ignore[index]
    num_bytes = bytes_of(brought)
    known: Comm | None = node.meta.get("comm")
    if known is not None:
        kind, axes, ranks = collective.kind, collective.axis_names, collective.ranks
        source, target = _running(known.source), _running(known.target)
        return replace(known, kind=kind, axes=axes, ranks=ranks, bytes=num_bytes, source=source, target=target)
    line: Line | None = node.meta.get("line")
    place = ("", 0) if line is None else (line.file, line.number)
    backward = bool(node.meta.get("backward")) or (line is not None and line.backward)
    return Comm(collective.kind, collective.axis_names, collective.ranks, num_bytes, backward, *place)


def _running(layout: Layout | None) -> Layout | None:
    """A layout on the mesh that the program runs on."""
    return None if layout is None else layout.on(running_mesh(layout.mesh))


def bytes_of(value: Any) -> int:
    """The bytes of the tensors that nodes give."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    facts: list[Facts | None] = [node.meta.get("facts") for node in found]
    return sum(x.bytes for x in facts if x is not None)


class Told:
    """What runs parts, and tells whoever listens what they communicate, with what it is for: nobody would see it of a
    program that is compiled."""

    def __init__(self, runner: Runner, parts: Sequence[Part], is_joint: bool) -> None:
        self.runner, self.parts, self.is_joint = given_shards(runner, parts), parts, is_joint

    @cached_property
    def comms(self) -> list[Comm]:
        return comms_in(self.parts[0], is_joint=self.is_joint)

    def __call__(self, inputs: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        if not listeners:
            return self.runner(inputs)
        with off_the_record():
            outputs = self.runner(inputs)
        for listener in listeners:
            listener.extend(self.comms)
        return outputs
