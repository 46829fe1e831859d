"""Gradients reduced in buckets: those of many parameters by one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.draft.draft import Draft, in_backward
from shardwise.graph.draft.joined import bring_together, can_be_joined, facts_of, join, key_of
from shardwise.graph.draft.order import Needs, ancestors, needed_by, needs
from shardwise.graph.draft.storages import is_view
from shardwise.graph.nodes import Collective
from shardwise.redistribute.backward import buckets

_aten = torch.ops.aten
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
"""Products of matrices: what takes time."""


def bucket(draft: Draft) -> list[str]:
    """`reduce(x), …, reduce(y)` → `reduce(x, …, y)`, for gradients that nothing else in the backward pass waits for:
    one collective for each 25 MB.

    Bytes are those of the largest shard, which all ranks know. The last bucket takes products of matrices: nothing
    waits for these, so they can be computed while all others are reduced. Sums of three or more real ranks may be
    rounded otherwise: who adds up first depends on where a number lies.
    """
    before = needs(draft)
    reductions = gradient_reductions(draft, before)
    by_kind: dict[Any, list[fx.Node]] = {}
    for node in reductions:
        if can_be_joined(node) and _bytes(node):
            by_kind.setdefault((key_of(node), node.meta.get("backward")), []).append(node)
    found = [_buckets(together) for together in by_kind.values()]
    joined = [nodes for filled in found for nodes in filled if len(nodes) > 1]
    late = [_needed_only_by(draft, before, filled[-1]) for filled in found if len(filled) > 1]
    bring_together(draft, before, joined, late=set().union(*late), than=reductions)
    for nodes in joined:
        join(draft, nodes, what="gradients")
    left = len(reductions) - sum(map(len, joined)) + len(joined)
    return [f"{len(reductions)} reductions of gradients in {left}"] if joined else []


def _needed_only_by(draft: Draft, before: Needs, wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes of a backward pass that only some of its nodes need, and these."""
    found = set(wanted)
    candidates = ancestors(before, wanted)
    users = needed_by(before)
    for node in reversed(draft.graph.nodes):
        if node in candidates and in_backward(node) and all(user in found for user in users[node]):
            found.add(node)
    return found


def gradient_reductions(draft: Draft, before: Needs) -> list[fx.Node]:
    """Sums of a backward pass that nothing else which is communicated there depends on."""
    backward = [node for node in draft.collectives() if in_backward(node)]
    waited_for = ancestors(before, backward)
    return [node for node in backward if node not in waited_for and _is_sum(node)]


def _is_sum(node: fx.Node) -> bool:
    collective = node.target
    is_reduction = isinstance(collective, Collective) and collective.kind in ("all_reduce", "reduce_scatter")
    return is_reduction and collective.how == "sum"  # type: ignore[union-attr]


def _bytes(node: fx.Node) -> int:
    """The bytes of a gradient, on the rank that has the most of it; 0 if that is not known."""
    comm = node.meta.get("comm")
    if comm is None or comm.source is None or comm.target is None:
        return 0
    return max(comm.source.largest_numel, comm.target.largest_numel) * facts_of(node).dtype.itemsize


# Which go together


def _buckets(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Gradients that are reduced together, the last ones last."""
    late = _last_products(nodes)
    others, last = [node for node in nodes if node not in late], [node for node in nodes if node in late]
    found = [*_filled(others), last]
    most = sum(map(_bytes, nodes)) / buckets.LARGEST if buckets.LARGEST else len(nodes)
    return found if late and len(found) <= math.ceil(most) else _filled(nodes)


def _filled(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Buckets in the order in which they are full. What fills one alone stays alone, and is not copied."""
    found: list[list[fx.Node]] = []
    filling: list[fx.Node] = []
    room = buckets.LARGEST
    for node in nodes:
        size = _bytes(node)
        if size >= buckets.LARGEST:
            found.append([node])
            continue
        filling.append(node)
        room -= size
        if room <= 0:
            found.append(filling)
            filling, room = [], buckets.LARGEST
    return [*found, filling] if filling else found


def _last_products(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The last gradients that are products of matrices, enough to fill a bucket, but not all gradients."""
    found: set[fx.Node] = set()
    room = buckets.LARGEST
    for node in reversed(nodes):
        if room <= 0 or len(found) + 1 == len(nodes):
            break
        if _is_product(node):
            found.add(node)
            room -= _bytes(node)
    return found


def _is_product(node: fx.Node) -> bool:
    brought: Any = node.args[0]
    made = brought if isinstance(brought, fx.Node) else brought[0]
    while is_view(made):
        made = made.args[0]
    return made.target in PRODUCTS
