"""Parameters that are gathered for the forward pass and again for the backward pass, instead of being kept whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardwise.graph.draft.draft import NUMBERS, Draft, in_backward
from shardwise.graph.draft.moves import Moved, moves
from shardwise.graph.draft.storages import Storages, is_view
from shardwise.graph.passes.narrow import carried
from shardwise.words import counted

_aten = torch.ops.aten


def gather_again(draft: Draft) -> list[str]:
    """`w = gather(s); f(w); backward(w)` → `w = gather(s); f(w); v = gather(s); backward(v)`.

    What the backward pass uses first is kept: it would be gathered again at once.
    """
    storages = draft.storages()
    found = [use for move in moves(draft) if (use := _use(storages, move)) is not None]
    found.sort(key=lambda use: storages.position[use.first])
    for use in found[1:]:
        _gather_again(draft, use)
    return [f"{counted(len(found) - 1, 'parameter')} gathered again"] if len(found) > 1 else []


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter that is gathered in the forward pass, and the nodes of the backward pass that use it, or what the
    forward pass has made of it: views and casts."""

    move: Moved
    forms: frozenset[fx.Node]
    users: Sequence[fx.Node]

    @property
    def first(self) -> fx.Node:
        return self.users[0]


def _use(storages: Storages, move: Moved) -> _Use | None:
    if move.collective.kind != "all_gather" or in_backward(move.node) or storages.is_written(move.after):
        return None
    parameter, begins = _origin(move.before), storages.position[move.node]
    if parameter.op != "placeholder" or storages.escapes(move.after):
        return None
    forms = frozenset(_forms(move.after))
    users = {user for form in forms for user in form.users if in_backward(user)}
    if not users or any(storages.is_written(form) for form in forms):
        return None
    in_order = sorted(users, key=storages.position.__getitem__)
    if storages.is_written_between(parameter, begins, storages.position[in_order[0]]):
        return None
    return _Use(move, forms, in_order)


def _origin(node: fx.Node) -> fx.Node:
    while is_view(node) or node.target is _aten._to_copy.default:
        source: Any = node.args[0]
        node = source
    return node


def _forms(node: fx.Node) -> Iterator[fx.Node]:
    """A tensor and its views and casts in the forward pass."""
    yield node
    for user in node.users:
        if (is_view(user) or user.target is _aten._to_copy.default) and not in_backward(user):
            yield from _forms(user)


def _gather_again(draft: Draft, use: _Use) -> None:
    move = use.move
    with draft.before(use.first):
        whole = carried(draft, move, move.before)
    made = {move.after: whole}
    gathered: Any = whole.args[0]
    again = gathered[0].args[0]
    for node in (again, *again.users, whole):
        node.meta.update({key: use.first.meta[key] for key in ("line", "backward") if key in use.first.meta})
    again.meta["comm"] = replace(move.comm, backward=True, why=f"{move.comm.why}, and gathered again")
    again.meta[NUMBERS] = (*again.meta[NUMBERS], "again")

    def form(node: fx.Node) -> fx.Node:
        if node not in made:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda given: form(given) if given in use.forms else given
            )
            with draft.before(use.first):
                made[node] = draft.call(node.target, *args, like=use.first, **kwargs)
        return made[node]

    for user in use.users:
        for given in [given for given in user.all_input_nodes if given in use.forms]:
            user.replace_input_with(given, form(given))
