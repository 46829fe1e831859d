"""Products of matrices together with the collective before or after them, in chunks: one chunk is communicated while
another is multiplied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from shardwise.graph.draft.draft import CHUNK, NUMBERS, Draft, contiguous
from shardwise.graph.draft.moves import Moved, cut, joined_pieces, moves, shape
from shardwise.graph.draft.order import needs
from shardwise.graph.draft.storages import Storages, is_view
from shardwise.graph.nodes import Collective
from shardwise.graph.passes.bucket import gradient_reductions
from shardwise.graph.passes.report import bytes_of
from shardwise.words import counted

_aten = torch.ops.aten
CHUNKS = 2
_ROWS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Products whose rows do not depend on each other, and which argument has the rows."""
_FLAT = frozenset({_aten.view.default, _aten._unsafe_view.default})

Bounds = tuple[int, int]


def async_tensor_parallel(draft: Draft) -> list[str]:
    """`mm(gather(x))` → `x0, x1 = halves(x); join(mm(gather(x0)), mm(gather(x1)))`, and
    `reduce_scatter(mm(x))` → `join(reduce_scatter(mm(x0)), reduce_scatter(mm(x1)))`.

    Each row is computed of the same numbers; kernels may add them up in another order for another number of rows.
    """
    gathers = [found for move in moves(draft) if (found := _of_gathered(move)) is not None]
    wholes = [(gathered.move.after, _gather_in_chunks(draft, gathered)) for gathered in gathers]
    draft.sweep()
    place = {node: position for position, node in enumerate(draft.graph.nodes)}
    for gathered, (whole, rows) in zip(gathers, wholes, strict=True):
        if whole in place:  # others need it as well
            with draft.before(min(whole.users, key=place.__getitem__)):
                draft.replace(whole, _joined(draft, rows, gathered.dim, whole))
    draft.sweep()
    storages, gradients = draft.storages(), gradient_reductions(draft, needs(draft))  # these have buckets
    scatters = [
        found
        for move in moves(draft)
        if move.node not in gradients and (found := _of_scattered(storages, move)) is not None
    ]
    for scattered in scatters:
        _scatter_in_chunks(draft, scattered)
    draft.sweep()
    count = len(gathers) + len(scatters)
    return [f"{counted(count, 'collective')} in {CHUNKS} chunks, each with its products"] if count else []


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of matrices whose rows are those of a tensor of any number of dims."""

    node: fx.Node
    rows: fx.Node

    def of(self, draft: Draft, rows: fx.Node) -> fx.Node:
        """The product of other rows, with their dims."""
        lead, inner = shape(rows)[:-1], shape(rows)[-1]
        flat = draft.call(_aten.view.default, rows, [math.prod(lead), inner], like=self.node)
        args: list[Any] = list(self.node.args)
        args[_ROWS[self.node.target]] = flat  # type: ignore[index]
        found = draft.call(self.node.target, *args, like=self.node, **self.node.kwargs)
        return draft.call(_aten.view.default, found, [*lead, shape(self.node)[-1]], like=self.node)


def _products(node: fx.Node) -> Iterator[_Product]:
    """The products whose rows are those of a tensor, or of views of it that leave its rows as they are."""
    waiting = [node]
    for form in waiting:
        for user in form.users:
            if user.target in _ROWS and user.args[_ROWS[user.target]] is form:
                if shape(form)[-1] == shape(node)[-1]:
                    yield _Product(user, node)
            elif user.target in _FLAT and shape(user)[-1:] == shape(node)[-1:]:
                waiting.append(user)


def _dim_of(move: Moved) -> int | None:
    """The dim along which a collective joins, or takes apart, if it has rows enough and is not that of the columns."""
    dims = [dim for dim, (a, b) in enumerate(zip(move.source.splits, move.target.splits, strict=True)) if a != b]
    split = move.source if move.collective.kind == "all_gather" else move.target
    is_one = len(dims) == 1 and dims[0] < len(split.shape) - 1
    return dims[0] if is_one and max(split.pieces(dims[0])) >= CHUNKS else None


def _chunk(size: int, number: int) -> Bounds:
    """The part of some rows that a chunk has."""
    return size * number // CHUNKS, size * (number + 1) // CHUNKS


@dataclass(frozen=True, slots=True)
class _Chunked:
    """A collective that can be made in chunks of a dim, with the products next to it."""

    move: Moved
    dim: int
    products: Sequence[_Product]


# A gather before products


def _of_gathered(move: Moved) -> _Chunked | None:
    dim = _dim_of(move)
    if move.collective.kind != "all_gather" or dim is None or CHUNK in move.node.meta:
        return None
    joined, products = joined_pieces(move.after), list(_products(move.after))
    return _Chunked(move, dim, products) if products and joined is not None and joined[1] == dim else None


def _gather_in_chunks(draft: Draft, gathered: _Chunked) -> list[list[fx.Node]]:
    """What all members have of each chunk."""
    move, dim = gathered.move, gathered.dim
    with draft.before(move.node):
        rows = [_gathered_chunk(draft, move, dim, number) for number in range(CHUNKS)]
    for product in gathered.products:
        with draft.before(product.node):
            parts = []
            for pieces in rows:
                made = product.of(draft, draft.call(_aten.cat.default, pieces, dim, like=product.node))
                parts.append(_apart(draft, made, [shape(piece)[dim] for piece in pieces], dim))
            found = _joined(draft, parts, dim, product.node)
            flat = draft.call(_aten.view.default, found, list(shape(product.node)), like=product.node)
        draft.replace(product.node, flat)
    return rows


def _gathered_chunk(draft: Draft, move: Moved, dim: int, number: int) -> list[fx.Node]:
    """What all members have of a chunk."""
    how = [[_of_chunk(own, dim, number) for own in held] for held in move.collective.how]
    part = _rows(draft, move.before, dim, *_chunk(shape(move.before)[dim], number))
    node = _collective(draft, move, replace(move.collective, how=how), part, number)
    facts = move.before.meta["facts"]
    return [draft.element(node, i, contiguous(facts, own)) for i, own in enumerate(how[draft.held])]


def _of_chunk(own: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    """The shape of a chunk of a tensor of a shape."""
    start, stop = _chunk(own[dim], number)
    return (*own[:dim], stop - start, *own[dim + 1 :])


# A reduce-scatter after a product


def _of_scattered(storages: Storages, move: Moved) -> _Chunked | None:
    dim = _dim_of(move)
    if move.collective.kind != "reduce_scatter" or dim is None or CHUNK in move.node.meta:
        return None
    whole = move.before
    if storages.is_written(whole) or storages.escapes(whole) or not _is_only_cut(whole, move.node, dim):
        return None
    made: Any = whole
    while is_view(made) and len(made.args[0].users) == 1:
        made = made.args[0]
    if made.target not in _ROWS:
        return None
    rows: Any = made.args[_ROWS[made.target]]
    while rows.target in _FLAT and shape(rows)[:-1] != shape(whole)[:-1]:
        rows = rows.args[0]
    inner = shape(made.args[_ROWS[made.target]])[-1]
    is_flat = shape(rows) == (*shape(whole)[:-1], inner) and shape(made)[-1] == shape(whole)[-1]
    return _Chunked(move, dim, [_Product(made, rows)]) if is_flat else None


def _is_only_cut(whole: fx.Node, node: fx.Node, dim: int) -> bool:
    """Whether a tensor is used for the chunks of a collective only, which are slices along one dim."""
    chunks: Any = node.args[0]
    used = set(chunks)
    users = {user for user in whole.users if user is not node}
    return users <= used and all(
        size == shape(whole)[i] for chunk in used for i, size in enumerate(shape(chunk)) if i != dim
    )


def _scatter_in_chunks(draft: Draft, scattered: _Chunked) -> None:
    move, dim, (product,) = scattered.move, scattered.dim, scattered.products
    chunks: Any = move.node.args[0]
    windows = [cut(chunk)[1] for chunk in chunks]
    with draft.before(move.node):
        found = []
        for number in range(CHUNKS):
            bounds = [_chunk(sizes[dim], number) for _, sizes in windows]
            parts = [
                _rows(draft, product.rows, dim, starts[dim] + start, starts[dim] + stop)
                for (starts, _), (start, stop) in zip(windows, bounds, strict=True)
            ]
            made = product.of(draft, draft.call(_aten.cat.default, parts, dim, like=product.node))
            brought = _apart(draft, made, [stop - start for start, stop in bounds], dim)
            node = _collective(draft, move, move.collective, brought, number)
            own = move.node.meta["facts"]
            node.meta["facts"] = contiguous(own, _of_chunk(own.shape, dim, number))
            found.append(node)
        draft.replace(move.node, draft.call(_aten.cat.default, found, dim, like=move.node))


# Parts


def _rows(draft: Draft, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    return draft.call(_aten.slice.Tensor, node, dim, start, stop, like=node)


def _apart(draft: Draft, node: fx.Node, sizes: Sequence[int], dim: int) -> list[fx.Node]:
    """What was joined along a dim."""
    stops = list(accumulate(sizes))
    return [_rows(draft, node, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _joined(draft: Draft, chunks: Sequence[Sequence[fx.Node]], dim: int, like: fx.Node) -> fx.Node:
    """What all members have of all chunks, in the order of the rows: those of the first member first."""
    return draft.call(_aten.cat.default, [piece for of_member in zip(*chunks) for piece in of_member], dim, like=like)


def _collective(draft: Draft, move: Moved, target: Collective, brought: Any, number: int) -> fx.Node:
    node = draft.collective(target, brought, like=move.node, comm=replace(move.comm, bytes=bytes_of(brought)))
    node.meta[NUMBERS] = (*move.node.meta[NUMBERS], f"chunk {number}")
    node.meta[CHUNK] = number
    return node
