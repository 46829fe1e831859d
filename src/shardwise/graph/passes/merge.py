"""Small collectives that follow one another, made as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from shardwise.graph.draft.draft import CHUNK, Draft, in_backward
from shardwise.graph.draft.joined import bring_together, can_be_joined, facts_of, join, key_of
from shardwise.graph.draft.order import Needs, needs
from shardwise.graph.passes.bucket import gradient_reductions

SMALL, LARGEST = 1 << 16, 1 << 20
"""Bytes up to which a collective is small, and of what is brought together at most."""


def merge(draft: Draft) -> list[str]:
    """`f(x), f(y)` → `f(x, y)`, for small collectives of one kind, group and dtype that stand next to each other among
    the collectives and do not depend on each other. Gradients have buckets of their own; what is communicated in the
    backward pass stays there."""
    before = needs(draft)
    latest, left_alone = _latest(draft, before), set(gradient_reductions(draft, before))
    groups: list[_Group] = []
    for number, node in enumerate(draft.collectives()):
        can_be = can_be_joined(node) and node not in left_alone and CHUNK not in node.meta
        small = _bytes(node) if can_be else None
        key = None if small is None else (key_of(node), in_backward(node))
        last = groups[-1] if groups else None
        if last is not None and last.takes(key, small, latest[node]):
            last.nodes.append(node)
            last.bytes += small or 0
        else:
            groups.append(_Group(key, number, [node], small or 0))
    joined = [group.nodes for group in groups if len(group.nodes) > 1]
    bring_together(draft, before, joined)
    for nodes in joined:
        join(draft, nodes, what="values")
    return [f"{sum(map(len, joined))} small collectives in {len(joined)}"] if joined else []


@dataclass(slots=True)
class _Group:
    """Collectives that follow one another, from that of a number on."""

    key: Any
    first: int
    nodes: list[fx.Node]
    bytes: int

    def takes(self, key: Any, small: int | None, depends_on: int) -> bool:
        """Whether a collective may be one of them that depends on those up to a number."""
        return small is not None and key == self.key and depends_on < self.first and self.bytes + small <= LARGEST


def _latest(draft: Draft, before: Needs) -> dict[fx.Node, int]:
    """For each collective, the number of the last one that it depends on."""
    numbers = {node: number for number, node in enumerate(draft.collectives())}
    reached: dict[fx.Node, int] = {}
    found: dict[fx.Node, int] = {}
    for node in draft.graph.nodes:
        last = max((reached[needed] for needed in before[node]), default=-1)
        if node in numbers:
            found[node] = last
        reached[node] = numbers.get(node, last)
    return found


def _bytes(node: fx.Node) -> int | None:
    """The bytes that a small collective brings, as far as all ranks know; None of others."""
    comm, facts = node.meta.get("comm"), facts_of(node)
    if comm is not None and comm.source is not None and comm.target is not None:
        found = max(comm.source.largest_numel, comm.target.largest_numel) * facts.dtype.itemsize
        return found if found <= SMALL else None
    return facts.dtype.itemsize if not facts.shape else None
