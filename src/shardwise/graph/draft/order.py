"""Which nodes must come before which, and graphs in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from torch import fx

from shardwise.graph.draft.draft import Draft
from shardwise.graph.draft.storages import Storage
from shardwise.graph.nodes import Check

Needs = dict[fx.Node, list[fx.Node]]
"""For each node, those that must come before it."""


def needs(draft: Draft) -> Needs:
    """What a node must come after: what makes its arguments; the last write to what it reads; what has been read, or
    written, of what it writes to; and the last check, since what is bad must not be computed with."""
    storages = draft.storages()
    found: Needs = {}
    checked: list[fx.Node] = []
    written: dict[Storage, fx.Node] = {}
    read: dict[Storage, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        before = dict.fromkeys([*node.all_input_nodes, *checked])
        writes = storages.written_by(node)
        for storage in (*storages.read_by(node), *writes):
            if storage in written:
                before[written[storage]] = None
        for storage in writes:
            before.update(dict.fromkeys(read.pop(storage, ())))
            written[storage] = node
        for storage in storages.read_by(node):
            read.setdefault(storage, []).append(node)
        found[node] = sorted(before, key=storages.position.__getitem__)
        checked = [node] if isinstance(node.target, Check) else checked
    return found


def arranged(draft: Draft, order: Iterable[fx.Node]) -> None:
    """Bring the nodes of a graph into an order."""
    last = None
    for node in order:
        if last is not None and last.next is not node:
            last.append(node)
        last = node


def sides(draft: Draft) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a program that is to be cut, before and after the cut; those of others are all before it."""
    before: list[fx.Node] = []
    after: list[fx.Node] = []
    for node in draft.graph.nodes:
        (after if node.meta.get("backward") or (after and node.op == "output") else before).append(node)
    return before, after


def rearranged(draft: Draft, before: Needs, rank: Callable[[fx.Node], Any]) -> None:
    """Bring the nodes of a graph into the order of their ranks, as far as what they need comes before them."""
    nodes = list(draft.graph.nodes)
    ranks = {node: (rank(node), position) for position, node in enumerate(nodes)}
    missing, users = {node: len(before[node]) for node in nodes}, needed_by(before)
    ready = [(ranks[node], node) for node in nodes if not missing[node]]
    heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heappush(ready, (ranks[user], user))
    assert len(order) == len(nodes), "nodes need each other in a circle"
    arranged(draft, order)


def needed_by(before: Needs) -> Needs:
    """For each node, those that it must come before."""
    found: Needs = {node: [] for node in before}
    for node, needed in before.items():
        for other in needed:
            found[other].append(node)
    return found


def ancestors(before: Needs, wanted: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some nodes need, directly or not."""
    found: set[fx.Node] = set()
    waiting = [needed for node in wanted for needed in before[node]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += before[node]
    return found


class Emission:
    """Nodes in a new order: each is preceded by what it needs."""

    def __init__(self, before: Needs) -> None:
        self._before = before
        self.nodes: list[fx.Node] = []
        self.done: set[fx.Node] = set()

    def emit(self, wanted: fx.Node) -> None:
        """Add a node, and before it all that it needs."""
        waiting = [wanted]
        while waiting:
            node = waiting[-1]
            missing = [] if node in self.done else [x for x in self._before[node] if x not in self.done]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if node not in self.done:
                self.done.add(node)
                self.nodes.append(node)
