"""What was recorded falls apart: into what the host computes, and what each rank does with its shards.

Numbers of the host (learning rates, counts of steps, seeds) depend on nothing that is computed on shards, so all of
them can be computed first. Shards of different ranks only meet in collectives: there the programs of the ranks fall
apart.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.nodes import Collective, Draw, bases_of, draws, has_effects, may_be_view, written
from shardwise.graph.program import FromHost, Part, Source

_aten = torch.ops.aten


def host_nodes(graph: fx.Graph, wanted: Iterable[fx.Node]) -> set[fx.Node]:
    """What the host computes: numbers, what they are computed of, and all that is written to that."""
    found: set[fx.Node] = set()
    drawn = _drawn(graph)
    if drawn is None:  # then numbers are drawn where the program comes to it
        numbers = [node for node in graph.nodes if is_number(node) and not isinstance(node.target, Draw)]
    else:
        numbers = [*drawn, *(node for node in graph.nodes if is_number(node))]
    waiting, drawn_here = [*wanted, *numbers], set(drawn or ())
    bases = bases_of(graph)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.meta.get("host") or node in drawn_here:
            for target in written(node):
                writers.setdefault(bases[target], []).append(node)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
            waiting += writers.get(bases[node], ())
    return found | _copies(graph, found, bases)


def _drawn(graph: fx.Graph) -> list[fx.Node] | None:
    """Ops that draw from a generator as it is, and so in turn with those that seeds are drawn by. The host draws all of
    these, if what is drawn does not depend on what is computed; else None."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and draws(node):
            if not _is_free(node):
                return None
            found.append(node)
    return found


def _is_free(node: fx.Node) -> bool:
    """Whether a node depends on no input."""
    waiting, seen = list(node.all_input_nodes), {node}
    while waiting:
        before = waiting.pop()
        if before.op == "placeholder" or isinstance(before.target, Collective):
            return False
        if before not in seen:
            seen.add(before)
            waiting += before.all_input_nodes
    return True


def is_number(node: fx.Node) -> bool:
    """Whether a node gives a number of the host: one that is not read out of data."""
    return "number" in node.meta and "data" not in node.meta


def _copies(graph: fx.Graph, host: set[fx.Node], bases: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The host's part runs first. So what is read before the host writes there (a count that is used before it counts
    on) is read of a copy, which the host makes."""
    memory = {bases[node] for node in host}
    made: set[fx.Node] = set()
    reads: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for node in list(graph.nodes):
        if node in host:
            for target in written(node):
                for reader, read in reads.pop(bases[target], ()):
                    made |= _copied(reader, read)
        elif node.op == "call_function" and not may_be_view(node):
            for read in node.all_input_nodes:
                if bases[read] in memory:
                    reads.setdefault(bases[read], []).append((node, read))
    return made


def _copied(reader: fx.Node, read: fx.Node) -> set[fx.Node]:
    """Have a node read a copy: the nodes that make it."""
    made, views = set(), [read]
    while views:
        node = views.pop()
        made.add(node)
        views += node.all_input_nodes
    with reader.graph.inserting_before(reader):
        copy = reader.graph.call_function(_aten.clone.default, (read,))
    copy.meta.update(read.meta)
    reader.replace_input_with(read, copy)
    return {*made, copy}


class Copying:
    """A graph that is made of nodes of another one."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sources: list[Source] = []
        self.env: dict[fx.Node, Any] = {}

    def input(self, node: fx.Node, source: Source) -> None:
        made = self.env[node] = self.graph.placeholder(node.name)
        made.meta.update(node.meta)
        self.sources.append(source)

    def copy(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def done(self, outputs: Sequence[fx.Node]) -> Part:
        self.graph.output(tuple(self.env[node] for node in outputs))
        _inputs_first(self)
        return Part(self.graph, tuple(self.sources))


def _inputs_first(made: Copying) -> None:
    """Placeholders in front, as a graph has them."""
    last = None
    for node in [node for node in made.graph.nodes if node.op == "placeholder"]:
        before = next(iter(made.graph.nodes)) if last is None else last.next
        if before is not node:
            before.prepend(node)
        last = node


def host_part(
    graph: fx.Graph, host: set[fx.Node], sources: dict[fx.Node, Source], results: Collection[fx.Node]
) -> tuple[Part, list[fx.Node]]:
    """What the host computes; and which of that others use, or is a result, in the order of its outputs."""
    made = Copying()
    for node in graph.nodes:
        if node in host:
            made.input(node, sources[node]) if node.op == "placeholder" else made.copy(node)
    computed = [node for node in graph.nodes if node in host and node.op != "placeholder"]
    used = [node for node in computed if node in results or any(user not in host for user in node.users)]
    return without_unused(made.done(used)), used


def conditions_part(
    graph: fx.Graph, host: set[fx.Node], sources: dict[fx.Node, Source], wanted: Sequence[fx.Node]
) -> Part:
    """What computes some of the host's numbers again, and leaves everything as it is."""
    made = Copying()
    needed = _needed(graph, host, wanted)
    for node in graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            made.input(node, sources[node])
            if "facts" in node.meta:
                made.env[node] = made.graph.call_function(_aten.clone.default, (made.env[node],))
        else:
            made.copy(node)
    return made.done(wanted)


def _needed(graph: fx.Graph, host: set[fx.Node], wanted: Sequence[fx.Node]) -> set[fx.Node]:
    bases = bases_of(graph)
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in host and (node in needed or any(bases[target] in needed for target in written(node))):
            needed |= {node, *node.all_input_nodes, *(bases[given] for given in node.all_input_nodes)}
    return needed


class Split:
    """The programs of the ranks held here, taken out of one that was recorded of all of them."""

    def __init__(
        self,
        graph: fx.Graph,
        on_host: set[fx.Node],
        sources: dict[fx.Node, Source],
        ranks: dict[fx.Node, int | None],
        count: int,
    ) -> None:
        self.graph, self.on_host, self.sources, self.count = graph, on_host, sources, count
        self.ranks: dict[fx.Node, int | None] = {node: rank if count > 1 else 0 for node, rank in ranks.items()}

    def is_possible(self) -> bool:
        """Whether shards of different ranks meet in collectives only. What belongs to no rank is done by each, so it
        must do no more than to compute."""
        for node in self.graph.nodes:
            if node.op != "call_function" or node in self.on_host:
                continue
            if isinstance(node.target, Collective):
                brought: Any = node.args[0]
                if not all(self.ranks.get(one) in (rank, None) for rank, one in enumerate(brought)):
                    return False  # a rank brings what another has, as the simulator lets it
                continue
            if self.count == 1:
                self.ranks[node] = 0
                continue
            if _is_part_of_collective(node):
                self.ranks[node] = node.args[1]
                continue
            found = {self.ranks.get(arg) for arg in node.all_input_nodes} - {None}
            if len(found) > 1 or (not found and has_effects(node)):
                return False
            self.ranks[node] = found.pop() if found else None
        return True

    def part(self, rank: int, host: dict[fx.Node, int], outputs: Sequence[fx.Node]) -> Part:
        """The program of one rank; `host` are the values that it is given by the host."""
        made = Copying()
        for node in self.graph.nodes:
            if node in host:
                made.input(node, FromHost(host[node]))
            elif node.op == "placeholder":
                if self.ranks.get(node) in (rank, None):
                    made.input(node, self.sources[node])
            elif node in self.on_host:
                continue
            elif isinstance(node.target, Collective):
                (brought,) = node.args
                made.env[node] = made.graph.call_function(
                    node.target, (fx.map_arg(brought[rank], made.env.__getitem__),)
                )
                made.env[node].meta.update(node.meta)
            elif node.op == "call_function" and self.ranks.get(node, rank) in (rank, None):
                if _is_part_of_collective(node):
                    made.env[node] = made.env[node.args[0]]
                    made.env[node].meta.update(node.meta)
                else:
                    made.copy(node)
        return without_unused(made.done(outputs))


def _is_part_of_collective(node: Any) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0].target, Collective)


def without_unused(part: Part) -> Part:
    """The same without what is computed for nothing, and without inputs that nobody reads."""
    for node in reversed(part.graph.nodes):
        if not node.users and not has_effects(node):
            part.graph.erase_node(node)
    sources = []
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    for node, source in zip(inputs, part.sources, strict=True):
        if node.users:
            sources.append(source)
        else:
            part.graph.erase_node(node)
    return Part(part.graph, tuple(sources), part.overwritten)
