"""What a rank's part needs of memory: how many bytes are alive at a time, when it runs node by node in its order."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwise.graph.nodes import collective_of, is_op, op_of, wait
from shardwise.graph.program import Facts

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a part is given (parameters, state and arguments stay alive), and the most that is alive at a time of
    what it makes; that is so when `at` runs."""

    given: int
    made: int
    at: fx.Node | None

    @property
    def peak(self) -> int:
        return self.given + self.made


def memory_of(graph: fx.Graph) -> Memory:
    """What a part needs. Memory is counted once, by however many views it is seen; it is let go of behind the last node
    that reads it, as Python does when it runs the graph, and what the part gives is kept."""
    owners = _owners(graph)
    sizes = {node: size for node in graph.nodes if (size := _size(node))}
    given = sum(sizes.get(node, 0) for node in graph.nodes if node.op == "placeholder")
    last = _last_reads(graph, owners)
    alive = most = 0
    at = None
    for node in graph.nodes:
        mine = owners[node]
        if node.op != "placeholder" and node in mine:
            alive += sizes.get(node, 0)
        if alive > most:
            most, at = alive, node
        for owner in last.get(node, ()):
            alive -= sizes.get(owner, 0)
    return Memory(given, most, at)


def _owners(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """By node, the nodes that made the memory it gives: itself, or those that it sees through."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        seen = _seen_through(node)
        owners = frozenset().union(*(found[x] for x in seen)) if seen else frozenset((node,))
        found[node] = owners
    return found


def _seen_through(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory a node gives again: of views, of what is written to, and of one out of several."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return [source] if _gives_operands(source) else []
    if node.target is wait:
        return _seen_through(source)
    if (collective := collective_of(node)) is not None:
        return [source] if collective.owned else []
    return list(node.all_input_nodes[:1]) if _gives_operands(node) else []


def _gives_operands(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    op = op_of(node)
    if not is_op(op) or not node.all_input_nodes:
        return False
    return bool(op.is_view or op._schema.is_mutable or op is _aten._unsafe_view.default)


def _size(node: fx.Node) -> int:
    facts: Facts | None = node.meta.get("facts")
    return 0 if facts is None else facts.bytes


def _last_reads(graph: fx.Graph, owners: dict[fx.Node, frozenset[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """By node, whose memory nobody reads behind it. What is given, and what comes out, is kept."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for read in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(owners[read], node))
    found: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last.items():
        if owner.op != "placeholder" and node.op != "output":
            found.setdefault(node, []).append(owner)
    return found
