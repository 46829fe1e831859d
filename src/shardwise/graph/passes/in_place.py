"""All-reduces that leave their result where their argument was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardwise.graph.draft.draft import Draft, is_contiguous
from shardwise.graph.draft.storages import Storages, makes_memory
from shardwise.graph.nodes import Start, collective_of, may_be_view


def in_place(draft: Draft) -> list[str]:
    """`y = all_reduce(x)` → `y = all_reduce_(x)`, for an `x` that the program has made and does not use any more."""
    storages, count = draft.storages(), 0
    last_uses = _last_uses(draft, storages)
    for node in draft.collectives():
        collective, brought = collective_of(node), node.args[0]
        assert collective is not None
        if collective.kind != "all_reduce" or collective.ranks == 1 or not isinstance(brought, fx.Node):
            continue
        if _is_own(storages, brought) and all(last_uses[storage] is node for storage in storages.of(brought)):
            owned = replace(collective, owned=True)
            node.target = Start(owned) if isinstance(node.target, Start) else owned
            count += 1
    return [f"{count} in place"] if count else []


def _last_uses(draft: Draft, storages: Storages) -> dict[int, fx.Node]:
    """By memory, the last node that reads it or writes to it."""
    found: dict[int, fx.Node] = {}
    for node in draft.graph.nodes:
        for storage in (*storages.read_by(node), *storages.written_by(node)):
            found[storage] = node
    return found


def _is_own(storages: Storages, node: fx.Node) -> bool:
    """Whether a tensor fills memory that the program has made for it."""
    if storages.is_from_outside(node) or not is_contiguous(node.meta["facts"]):
        return False
    made: Any = node
    while may_be_view(made):
        made = made.args[0]
    is_whole = made.meta.get("facts") is not None and made.meta["facts"].bytes == node.meta["facts"].bytes
    return is_whole and made.op == "call_function" and makes_memory(made)
