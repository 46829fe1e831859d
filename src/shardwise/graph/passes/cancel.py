"""Moves that come to nothing: what is gathered and cut again, cut and gathered again, or moved to and fro."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shardwise.comm import running_mesh
from shardwise.graph.draft.draft import Draft, elements
from shardwise.graph.draft.moves import (
    Moved,
    coordinate,
    cut,
    is_part,
    is_slice,
    joined_pieces,
    member,
    moves,
    relative,
    shape,
)
from shardwise.graph.draft.storages import Storages
from shardwise.graph.nodes import Collective, collective_of
from shardwise.layout import Layout, Mesh, Replicate
from shardwise.words import counted

_aten = torch.ops.aten


def cancel(draft: Draft) -> list[str]:
    """`S → R → S`, `R → S → R`, `S(0) → S(1) → S(0)` → nothing."""
    before = count = len(draft.collectives())
    while count:
        for undo in (_there_and_back, _slices_of_joined, _own_part_of_gathered, _gathered_again):
            undo(draft)
            draft.sweep()
        if count == (count := len(draft.collectives())):  # what is left may come to nothing without what is gone
            break
    return [f"{counted(before - count, 'collective')} not needed"] if count < before else []


def _slices_of_joined(draft: Draft) -> None:
    """A slice of joined pieces that is one of them."""
    storages = draft.storages()
    for node in list(draft.graph.nodes):
        if not is_slice(node):
            continue
        base, box = cut(node)
        for piece, where in _pieces(base):
            is_safe = not storages.is_written(base) and not storages.is_written(piece)
            if is_part(box, where) and shape(node) == shape(piece) and is_safe and not storages.escapes(node):
                draft.replace(node, piece)
                break


def _pieces(node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    """The pieces that a node joins, with their boxes in it."""
    found = joined_pieces(node)
    if found is None:
        return
    pieces, dim = found
    start = 0
    for piece in pieces:
        starts = tuple(start if i == dim else 0 for i in range(len(shape(piece))))
        yield piece, (starts, shape(piece))
        start += shape(piece)[dim] if shape(piece) else 0


def _own_part_of_gathered(draft: Draft) -> None:
    """Of what is gathered, only the part that this rank has itself."""
    storages = draft.storages()
    for node in draft.collectives():
        collective, used = node.target, dict(elements(node))
        if not isinstance(collective, Collective) or collective.kind != "all_gather" or "facts" in node.meta:
            continue
        if len(used) == 1 and len(node.users) == 1 and member(collective, draft) in used:
            brought: Any = node.args[0]
            (piece,) = used.values()
            _put(draft, storages, piece, brought, node)


def _there_and_back(draft: Draft) -> None:
    """A move from one layout to another, and the move back."""
    storages, ends = draft.storages(), dict[fx.Node, Moved]()
    for move in moves(draft):
        first = ends.get(move.before)
        if first is not None and _is_inverse(first, move) and _is_as_moved(storages, first, move):
            _put(draft, storages, move.after, first.before, move.node)
        else:
            ends[move.after] = move


def _is_inverse(first: Moved, second: Moved) -> bool:
    same = first.source.unreduced is second.target.unreduced and first.target.unreduced is second.source.unreduced
    return same and {first.collective.kind, second.collective.kind} == {"all_to_all"}


def _is_as_moved(storages: Storages, first: Moved, second: Moved) -> bool:
    """Whether neither what is moved to and fro, nor what it is meanwhile, is written to before the way back."""
    start, stop = storages.position[first.node], storages.position[second.node]
    return not any(storages.is_written_between(x, start, stop) for x in (first.before, first.after))


def _gathered_again(draft: Draft) -> None:
    """A part, of what all ranks have alike, that each cuts out and all gather."""
    storages = draft.storages()
    for move in moves(draft):
        if move.collective.kind != "all_gather":
            continue
        own: Any = move.before
        whole, box = cut(own.args[0] if own.target is _aten.clone.default else own)
        at = coordinate(move.collective, draft)
        wanted = relative(move.source.box(at), move.target.box(at))
        is_whole = shape(whole) == shape(move.after) and is_part(box, wanted)
        if (
            is_whole
            and whole is not own
            and _is_alike(whole, move.collective)
            and _is_as_cut(storages, own, whole, move)
        ):
            _put(draft, storages, move.after, whole, move.node)


def _is_as_cut(storages: Storages, own: fx.Node, whole: fx.Node, move: Moved) -> bool:
    """Whether neither a part nor the whole is written to before the part is gathered."""
    first, last = storages.position[own], storages.position[move.node]
    return not any(storages.is_written_between(node, first, last) for node in (own, whole))


def _is_alike(node: fx.Node, collective: Collective) -> bool:
    """Whether all members of a collective's groups are sure to have the same value of a node."""
    wanted = _roots(collective.mesh, collective.axes)
    layout: Layout | None = node.meta.get("layout")
    if layout is not None and running_mesh(layout.mesh).port is collective.mesh.port:
        pairs = zip(layout.mesh.root_axes, layout.placements, strict=True)
        if wanted <= {axis for axis, placement in pairs if isinstance(placement, Replicate)}:
            return True
    made_by = collective_of(node)
    if made_by is None or made_by.kind not in ("all_reduce", "broadcast"):
        return False
    return collective.mesh.port is made_by.mesh.port and wanted <= _roots(made_by.mesh, made_by.axes)


def _roots(mesh: Mesh, axes: tuple[int, ...]) -> set[int]:
    return {mesh.root_axes[axis] for axis in axes}


def _put(draft: Draft, storages: Storages, old: fx.Node, value: fx.Node, where: fx.Node) -> None:
    """Have a value that there is already take the place of another, that is made by the node `where`: itself, or a copy
    if either is written to meanwhile, or given back."""
    own = storages.is_written(old) or storages.escapes(old)
    if own or storages.is_written_between(value, storages.position[where], storages.last_read(old)):
        with draft.before(where):
            value = draft.call(_aten.clone.default, value, like=where, memory_format=torch.contiguous_format)
    draft.replace(old, value)
