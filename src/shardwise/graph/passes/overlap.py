"""Collectives that go on while the program does: started as early as can be, and waited for as late as can be."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from shardwise.graph.draft.draft import Draft
from shardwise.graph.draft.moves import joined_pieces
from shardwise.graph.draft.order import Emission, Needs, arranged, needed_by, needs, sides
from shardwise.graph.nodes import Collective, Start, collective_of, may_be_view, wait
from shardwise.graph.passes.bucket import gradient_reductions
from shardwise.words import counted

_STARTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def overlap(draft: Draft) -> list[str]:
    """`x = f(a); b = g(c); h(x)` → `x = start f(a); b = g(c); h(wait x)`.

    Collectives stay in their order, which is that of all ranks. Each is started as soon as what it is given is there,
    but not before its predecessor's turn in the program: so of what is gathered for later, one thing is under way at a
    time. Whatever needs a gradient's sum, and is not needed by the backward pass, comes after it.
    """
    before = needs(draft)
    arranged(draft, _schedule(draft, before))
    place = {node: position for position, node in enumerate(draft.graph.nodes)}
    count = sum([_split(draft, node, place) for node in draft.collectives()])
    return [f"{counted(count, 'collective')} under way meanwhile"] if count else []


def _schedule(draft: Draft, before: Needs) -> list[fx.Node]:
    order = Emission(before)
    later = _after(before, gradient_reductions(draft, before))
    for side in sides(draft):
        for node in side:
            if node.op == "placeholder":
                order.emit(node)
        position = 0
        for node in [node for node in side if collective_of(node) is not None]:
            order.emit(node)
            until = side.index(node, position)
            for passed in side[position:until]:
                if passed not in later and not _is_idle(passed):
                    order.emit(passed)
            position = until
        for node in side:
            if not _is_idle(node):
                order.emit(node)
        for node in side:
            order.emit(node)
    return order.nodes


def _after(before: Needs, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that needs some nodes, directly or not."""
    users = needed_by(before)
    found: set[fx.Node] = set()
    waiting = [user for node in nodes for user in users[node]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += users[node]
    return found


def _is_idle(node: fx.Node) -> bool:
    """Whether a node only shows what another one made, or puts together what came in pieces: it can come when it is
    needed."""
    if node.op == "output" or node.target is operator.getitem or may_be_view(node):
        return True
    joined = joined_pieces(node)
    return joined is not None and all(piece.target is operator.getitem for piece in joined[0])


def _split(draft: Draft, node: Any, place: dict[fx.Node, int]) -> bool:
    """Have a collective be started where it stands and waited for where it is first used, if something is done between
    the two."""
    collective = node.target
    if not isinstance(collective, Collective) or collective.kind not in _STARTED or collective.ranks == 1:
        return False
    first = min(node.users, key=place.__getitem__, default=None)
    if first is None or not _is_work_between(node, first):
        return False
    with draft.before(first):
        awaited = draft.awaited(node)
    node.replace_all_uses_with(awaited, delete_user_cb=lambda user: user is not awaited)
    node.target = Start(collective)
    return True


def _is_work_between(node: fx.Node, last: fx.Node) -> bool:
    while (node := node.next) is not last:
        if collective_of(node) is None and node.target is not wait and not _is_idle(node):
            return True
    return False
