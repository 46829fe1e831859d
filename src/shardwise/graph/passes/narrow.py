"""What is gathered, gathered in fewer bytes: before a cast to a narrower dtype, after one to a wider dtype, and once
instead of twice where two gathered tensors are only computed with together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardwise.graph.draft.draft import Draft, elements
from shardwise.graph.draft.moves import Moved, cut, joined_pieces, moves, shape
from shardwise.graph.draft.storages import Storages
from shardwise.graph.passes.report import bytes_of
from shardwise.graph.passes.scatter import is_pointwise, sliced

_aten = torch.ops.aten
_KINDS = ("all_gather", "all_to_all")


def narrow(draft: Draft) -> list[str]:
    """`bf16(gather(x))` → `gather(bf16(x))`; `gather(f32(x))` → `f32(gather(x))`; `gather(x) + gather(y)` →
    `gather(x + y)`. A cast, or a sum, of parts is that of the whole, bit for bit."""
    counts = [_each(draft, rewrite) for rewrite in (_cast_first, _cast_last, _compute_first)]
    said = ("cast before the gather", "cast behind the gather", "computed with before the gather")
    return [f"{count} {what}" for count, what in zip(counts, said, strict=True) if count]


def _each(draft: Draft, rewrite: Any) -> int:
    """Rewrite until nothing is left to do; a round does all that does not depend on one another."""
    total = 0
    while count := rewrite(draft, draft.storages()):
        draft.sweep()
        total += count
    return total


def _cast_first(draft: Draft, storages: Storages) -> int:
    """`narrow(gather(x))` → `gather(narrow(x))`."""
    count = 0
    for move in _gathers(draft):
        (cast, *others) = move.after.users
        if not others and _is_cast(cast) and _size(cast) < _size(move.after) and not storages.is_written(move.after):
            with draft.before(move.node):
                less = draft.call(cast.target, move.before, like=cast, **cast.kwargs)
                draft.replace(cast, carried(draft, move, less))
            count += 1
    return count


def _cast_last(draft: Draft, storages: Storages) -> int:
    """`gather(wide(x))` → `wide(gather(x))`."""
    count = 0
    for move in _gathers(draft):
        cast = move.before
        if not _is_cast(cast):
            continue
        value: Any = cast.args[0]
        is_same = not storages.is_written(cast) and not _changes(storages, value, cast, move.node)
        if is_same and shape(value) == shape(cast) and _size(value) < _size(cast):
            with draft.before(move.node):
                whole = carried(draft, move, value)
                draft.replace(move.after, draft.call(cast.target, whole, like=cast, **cast.kwargs))
            count += 1
    return count


def _compute_first(draft: Draft, storages: Storages) -> int:
    """`op(gather(x), gather(y))` → `gather(op(x, y))`."""
    by_end = {move.after: move for move in _gathers(draft)}
    count = 0
    for node in list(draft.graph.nodes):
        if not is_pointwise(node):
            continue
        met = [by_end[given] for given in node.all_input_nodes if given in by_end]
        if len(met) > 1 and _are_alike(met, node) and not any(_changes(storages, x.before, x.node, node) for x in met):
            last = max((move.node for move in met), key=storages.position.__getitem__)
            with draft.before(last):
                args, kwargs = _mapped(node, {move.after: move.before for move in met})
                value = draft.call(node.target, *args, like=node, **kwargs)
                draft.replace(node, carried(draft, met[0], value))
            for move in met:
                del by_end[move.after]
            count += 1
    return count


def _mapped(node: fx.Node, other: dict[fx.Node, fx.Node]) -> Any:
    """The arguments of a node, with others in the place of some."""
    return fx.map_arg((node.args, node.kwargs), lambda given: other.get(given, given))


def _gathers(draft: Draft) -> list[Moved]:
    return [move for move in moves(draft) if move.collective.kind in _KINDS and move.after.users]


def _is_cast(node: fx.Node) -> bool:
    return node.target is _aten._to_copy.default and set(node.kwargs) == {"dtype"}


def _size(node: fx.Node) -> int:
    return node.meta["facts"].dtype.itemsize


def _changes(storages: Storages, value: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Whether a value is written to between two nodes."""
    return storages.is_written_between(value, storages.position[first], storages.position[last])


def _are_alike(met: list[Moved], node: fx.Node) -> bool:
    """Whether all that an op computes with are results of the same move, that nobody else uses; and whether its own
    result is no more than all of these."""
    first = met[0]
    same = all(
        move.collective == first.collective and (move.source, move.target) == (first.source, first.target)
        for move in met
    )
    ends = [move.after for move in met]
    rest = [given for given in node.all_input_nodes if given not in ends]
    alone = all(list(end.users) == [node] for end in ends) and all(shape(given) == () for given in rest)
    return same and alone and shape(node) == shape(ends[0]) and _size(node) <= sum(map(_size, ends))


def carried(draft: Draft, move: Moved, value: fx.Node) -> fx.Node:
    """A move, made with another value of the same shape."""
    dtype = value.meta["facts"].dtype
    brought: Any = value
    if move.collective.kind != "all_gather":
        chunks: Any = move.node.args[0]
        brought = [sliced(draft, value, cut(chunk)[1]) for chunk in chunks]
    comm = replace(move.comm, bytes=bytes_of(brought))
    node = draft.collective(move.collective, brought, like=move.node, comm=comm)
    pieces = {
        number: draft.element(node, number, replace(piece.meta["facts"], dtype=dtype))
        for number, piece in sorted(elements(move.node))
    }
    _, dim = joined_pieces(move.after) or ((), 0)
    return draft.call(_aten.cat.default, list(pieces.values()), dim, like=move.after)
