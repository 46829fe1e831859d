"""Embeddings and bags of them, with tables split by rows, by columns, or both.

Where rows are split, each rank looks up the indices that name its own and contributes nothing for the others: a pending
sum, and only the owner's row gets a gradient. Gradients are dense, whatever `sparse` says: a sum over ranks of sparse
gradients would have to make them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, has_empty, remembered
from shardwise.rules.kit.indices import Bound, axes_of
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import SUM, Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.lookup.indexing import looked_up
from shardwise.rules.math.reductions import LAST, PROGRAM_COST


def _must_check(table: Layout, index: Layout) -> bool:
    """Whether torch, on its own, would not refuse an index out of range on all ranks alike: some do not see it, or do
    not see that it is, or have no columns to look up and do not look."""
    return bool(table.splits[0]) or any(index.splits) or has_empty([table])


def _axes_of_indices(index: Layout) -> tuple[int, ...]:
    """The axes along which the ranks confer about indices."""
    return tuple(sorted(axes_of([index])))


def _row_starts(layout: Layout) -> HeldValues:
    """Where each held rank's rows begin in the table."""
    return HeldValues([start[0] for start in layout.held_starts])


# Embedding


def _embedding(call: Call) -> list[Strategy]:
    rows: Sequence[Factor] = dims_of(call.inputs[1].ndim, "index")
    free = Factors([[None, "column"], rows], [[*rows, "column"]]).strategies()
    return [*free, Strategy((0, None), (looked_up(call.inputs[0].dtype),))]


def _embedding_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    table, index = ins
    num_rows = call.inputs[0].shape[0]
    if _must_check(table, index):
        bound = Bound(range(num_rows), any(index.splits), own=not table.splits[0])
        args = [bound, call["weight"], call["indices"], _row_starts(table), num_rows, call["padding_idx"]]
        rows = _rows_by_frequency if call["scale_grad_by_freq"] else _rows
        return Local(rows, args, groups=(_axes_of_indices(index),))
    if not call["sparse"]:
        return None
    args, kwargs = call.replace(sparse=False)
    return Local(torch.embedding, args, kwargs, always=True)


def _rows(
    group: Collectives, bound: Bound, table: Tensor, index: Tensor, start: Any, num_rows: int, padding: int
) -> Tensor:
    bound.check(group, index)
    return group.map(_own_rows, table, index, start, num_rows, padding)


def _own_rows(table: Tensor, index: Tensor, start: int, num_rows: int, padding: int) -> Tensor:
    """The rows held here, zeros in place of others."""
    if not index.numel() and len(table):  # torch's second derivative of `embedding` refuses to look nothing up
        return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])
    if len(table) == num_rows:
        return torch.embedding(table, index, padding)
    local, mine = _own(table, index, start)
    if not len(table):  # no rows here: zeros that are still part of the graph
        return _nothing_of(table, (*index.shape, table.shape[1]))
    padding = padding - start if start <= padding < start + len(table) else -1
    return torch.where(mine.unsqueeze(-1), torch.embedding(table, local, padding), table.new_zeros(()))


def _own(table: Tensor, index: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Indices into the rows held here, and which of them name one."""
    local = index - start
    mine = (local >= 0) & (local < len(table))
    return local.clamp(0, max(len(table) - 1, 0)), mine


def _rows_by_frequency(
    group: Collectives, bound: Bound, table: Tensor, index: Tensor, start: Any, num_rows: int, padding: int
) -> Tensor:
    """The same rows with gradients divided by how often each occurs, on all ranks together."""
    rows = _rows(group, bound, table, index, start, num_rows, padding)
    counts = group.reduce(group.map(_count, table, index, start), "sum")
    return group.map(_shared, rows, counts, index, start)


def _count(table: Tensor, index: Tensor, start: int) -> Tensor:
    local, mine = _own(table, index, start)
    counts = table.detach().new_zeros(max(len(table), 1))
    return counts.index_add(0, local.reshape(-1), mine.reshape(-1).to(counts.dtype))


def _shared(rows: Tensor, counts: Tensor, index: Tensor, start: int) -> Tensor:
    local, _ = _own(counts, index, start)
    share = 1 / counts[local].clamp(min=1).unsqueeze(-1)
    return rows * share + (rows * (1 - share)).detach()


register("embedding", rule=Rule(_embedding, _embedding_local))


# Rows that are too long are shortened in place, if they are looked up: columns add up their powers


def _renorm(call: Call) -> list[Strategy]:
    columns = [Strategy((1, None), (1,), PROGRAM_COST)] if call["norm_type"] > 0 else []
    split = [Strategy((None, dim), (None,), PROGRAM_COST) for dim in range(call.inputs[1].ndim)]
    return [replicated(call), Strategy((0, None), (0,)), *columns, *split]


def _renorm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    table, index = ins
    if not any(table.splits) and not any(index.splits):
        return None
    pieces = [index.pieces(dim) for dim in range(len(index.splits))]
    num_rows = call["self"].shape[0]
    bound = Bound(range(-num_rows, num_rows), False)
    args = [pieces, bound, call["self"], call["indices"], _row_starts(table), call["max_norm"], call["norm_type"]]
    return Local(_renorm_rows, args, groups=(table.splits[1], *index.splits))


def _renorm_rows(columns: Collectives, *args: Any) -> Tensor:
    """All ranks that hold a row must know that it is looked up, so split indices are gathered: the table is not."""
    *groups, pieces, bound, table, index, start, max_norm, order = args
    for dim, (group, sizes) in enumerate(zip(groups, pieces, strict=True)):
        index = group.gather(index, dim, sizes)
    bound.check(columns, index)
    rows = columns.map(_rows_of, table, index, start)
    powers = columns.map(_powers, table, rows, order)
    whole = columns.reduce(powers, "max" if math.isinf(order) else "sum")
    columns.map(_shorten, table, rows, whole, max_norm, order)
    return table


def _rows_of(table: Tensor, index: Tensor, start: int) -> Tensor:
    """Which of the rows held here are looked up, each once."""
    local = index.reshape(-1) - start
    return local[(local >= 0) & (local < len(table))].unique()


def _powers(table: Tensor, rows: Tensor, order: float) -> Tensor:
    found = table.detach()[rows].abs()
    if math.isinf(order):
        return found.amax(1) if found.shape[1] else found.new_zeros(len(rows))
    return (found**order).sum(1)


def _shorten(table: Tensor, rows: Tensor, powers: Tensor, max_norm: float, order: float) -> None:
    norms = powers if math.isinf(order) else powers ** (1 / order)
    scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1)  # torch's own guard against division by zero
    table[rows] = table[rows] * scale.unsqueeze(1)


register("embedding_renorm_", rule=Rule(_renorm, _renorm_local))


# Bags


@dataclass(frozen=True, slots=True)
class _Bags:
    """What bags are made of: options and global sizes."""

    mode: str
    include_last: bool
    padding: int | None
    num_items: int  # in all bags, or, where bags are rows of indices, in each


def _padding(call: Call) -> int | None:
    padding = call["padding_idx"]
    return None if padding is None else padding % max(call["weight"].shape[0], 1)


def _embedding_bag(call: Call) -> list[Strategy]:
    """Columns are free, rows are looked up by their owners. Bags that are rows of indices are free too, and the items
    of a bag add up, unless padding among them must be counted, or how often each index occurs."""
    by_bag, weighted = call["offsets"] is None, call["per_sample_weights"] is not None
    rest = [None] * (not by_bag)

    def way(table: int | None, items: int | None, out: Any, cost: float = 0.0) -> Strategy:
        # inputs come in the order of the schema: indices, table, offsets, weights
        return Strategy((items, table, *rest, *[items] * weighted), (out,), cost)

    found = [replicated(call), way(1, None, 1)]
    if call["scale_grad_by_freq"]:  # torch's CPU kernel counts other rows' frequencies: only the whole gives its answer
        return found
    found.append(way(0, None, None, 2 * PROGRAM_COST) if call["mode"] == "max" else way(0, None, SUM))
    if by_bag:
        found.append(way(None, 0, 0))
    if call["mode"] == "sum" or (call["mode"] == "mean" and call["padding_idx"] is None):
        found.append(way(None, 1 if by_bag else 0, SUM))
    return found


def _embedding_bag_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    items, table = ins[:2]
    num_rows, confer = call["weight"].shape[0], _axes_of_indices(items)
    bound = Bound(range(num_rows), any(items.splits))
    if not table.splits[0] and not any(items.splits[-1:]):
        args, kwargs = call.replace(sparse=False)
        if _must_check(table, items):
            return Local(_whole_bags, [bound, *args], kwargs, groups=(confer,), always=True)
        return Local(F.embedding_bag if call["offsets"] is None else _in_order, args, kwargs, always=True)
    bags = _Bags(call["mode"], call["include_last_offset"], _padding(call), call["input"].shape[-1])
    item_starts = HeldValues([start[-1] for start in items.held_starts])
    args = [bound, call["input"], call["weight"], call["offsets"], call["per_sample_weights"]]
    args += [_row_starts(table), item_starts, bags]
    in_bags = _largest_in_bags if bags.mode == "max" else _sums_in_bags
    return Local(in_bags, args, groups=(confer, table.splits[0]))


def _whole_bags(confer: Collectives, bound: Bound, index: Tensor, *args: Any, **options: Any) -> Tensor:
    bound.check(confer, index)
    return confer.map(partial(_in_order, **options), index, *args)


def _in_order(index: Tensor, table: Tensor, offsets: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
    """Torch's own bags. Where one ends before it begins it reads elsewhere, and ranks would not find the same there."""
    if offsets is not None:
        _check_offsets(offsets, len(index))
    return F.embedding_bag(index, table, offsets, *args, **options)


def _begins(index: Tensor, offsets: Tensor | None, item_start: int, bags: _Bags) -> tuple[Tensor, Tensor]:
    """Where each bag begins among the items held here, and how many items it has in all."""
    if offsets is None:
        num_bags, size = index.shape
        begins = torch.arange(num_bags, device=index.device) * size
        return begins, torch.full((num_bags,), bags.num_items, device=index.device)
    _check_offsets(offsets, bags.num_items)
    ends = offsets[1:] if bags.include_last else torch.cat([offsets[1:], offsets.new_tensor([bags.num_items])])
    begins = offsets[:-1] if bags.include_last else offsets
    return (begins - item_start).clamp(0, len(index)), ends - begins


def _check_offsets(offsets: Tensor, num_items: int) -> None:
    """Torch's own complaints, which it makes of the whole; and what it says, mostly, of items before the first."""
    if offsets.device.type != "cpu" or not len(offsets):
        return
    if offsets[0]:
        raise RuntimeError(
            "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. "
            f"However, got {offsets[0]}"
        )
    if offsets[-1] > num_items:
        raise RuntimeError(
            f"offsets[-1] can not be greater than input's length {num_items} but got offsets[-1] of {offsets[-1]}"
        )
    if (offsets[1:] < offsets[:-1]).any():
        if offsets.min() < 0:
            raise IndexError("index out of range in self")
        raise RuntimeError(f"embedding_bag: bags must not end before they begin, but offsets are {offsets.tolist()}")


def _own_items(
    index: Tensor, table: Tensor, offsets: Tensor | None, row_start: int, item_start: int, bags: _Bags
) -> tuple[Tensor, Tensor, Tensor]:
    """Which items name rows held here and are not padding; the bag of each item; how many items each bag has."""
    begins, sizes = _begins(index, offsets, item_start, bags)
    index = index.reshape(-1)
    places = torch.arange(len(index), dtype=begins.dtype, device=index.device)
    bag = torch.searchsorted(begins, places, right=True) - 1
    mine = (index >= row_start) & (index < row_start + len(table))
    if bags.include_last and offsets is not None:  # what comes after the last offset is in no bag
        mine = mine & (places + item_start < offsets[-1])
    if bags.padding is not None:
        mine = mine & (index != bags.padding)
        real = (index != bags.padding).to(sizes.dtype)
        sizes = torch.zeros_like(sizes).index_add(0, bag, real)
    return mine, bag, sizes


def _sums_in_bags(confer: Collectives, group: Collectives, bound: Bound, index: Tensor, *args: Any) -> Tensor:
    bound.check(confer, index)
    return group.map(_sum_in_bags, index, *args)


def _sum_in_bags(
    index: Tensor,
    table: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    row_start: int,
    item_start: int,
    bags: _Bags,
) -> Tensor:
    """The items of our own rows, summed by torch; a mean is divided by the size of the whole bag."""
    mine, bag, sizes = _own_items(index, table, offsets, row_start, item_start, bags)
    if not len(sizes) or not table.numel():
        return _nothing_of(table, (len(sizes), table.shape[1]), weights)
    begins = torch.zeros_like(sizes).index_add(0, bag, mine.to(sizes.dtype)).cumsum(0)
    begins = torch.cat([begins.new_zeros(1), begins[:-1]]).to(index.dtype)
    items = index.reshape(-1)[mine] - row_start
    chosen = None if weights is None else weights.reshape(-1)[mine]
    out = F.embedding_bag(items, table, begins, mode="sum", per_sample_weights=chosen)
    return out / sizes.clamp(min=1).unsqueeze(1).to(out.dtype) if bags.mode == "mean" else out


def _nothing_of(table: Tensor, shape: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """Zeros that depend on a table. Like bags they do not save it: it may be written to before the gradient comes."""
    return remembered(connected_zeros(table, shape, weights, saves=False))


def _largest_in_bags(
    confer: Collectives,
    group: Collectives,
    bound: Bound,
    index: Tensor,
    table: Tensor,
    offsets: Tensor | None,
    weights: None,
    row_start: Any,
    item_start: Any,
    bags: _Bags,
) -> Tensor:
    """The largest of each bag, column by column. The gradient goes to the first item of the bag that attains it, so the
    ranks agree on its place."""
    bound.check(confer, index)
    values, places = group.map(_largest_of_own, index, table, offsets, row_start, item_start, bags)
    best = group.reduce(values, "max")
    place = group.reduce(torch.where(_same(values.detach(), best), places, LAST), "min")
    mine = (place == places) & (place != LAST)
    return group.psum(torch.where(mine, values, 0))


def _largest_of_own(
    index: Tensor, table: Tensor, offsets: Tensor | None, row_start: int, item_start: int, bags: _Bags
) -> tuple[Tensor, Tensor]:
    """The largest of our own items in each bag and column, and its place among all items (`LAST`: none)."""
    mine, bag, sizes = _own_items(index, table, offsets, row_start, item_start, bags)
    shape = (len(sizes), table.shape[1])
    index = index.reshape(-1)
    leads = _is_first(bag, index, len(sizes), bags)
    chosen = mine.nonzero().reshape(-1)
    rows, bag = table[index[chosen] - row_start], bag[chosen].unsqueeze(1).expand(-1, shape[1])
    if not len(chosen):
        return _nothing_of(table, shape) - math.inf, bag.new_full(shape, LAST)
    known = rows.detach()
    passed = known.isnan() & ~leads[chosen].unsqueeze(1)  # nothing is larger than a NaN that comes first; others lose
    known = torch.where(passed, -math.inf, known)
    best = known.new_full(shape, -math.inf).scatter_reduce(0, bag, known, "amax")
    order = torch.arange(len(chosen), device=index.device).unsqueeze(1).expand(-1, shape[1])
    first = torch.where(_same(known, best.gather(0, bag)) & ~passed, order, LAST)
    first = first.new_full(shape, LAST).scatter_reduce(0, bag, first, "amin")
    found = first != LAST
    at = torch.where(found, first, 0)
    return torch.where(found, rows.gather(0, at), -math.inf), torch.where(found, chosen[at], LAST)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _is_first(bag: Tensor, index: Tensor, num_bags: int, bags: _Bags) -> Tensor:
    """Which items are the first of their bags that are not padding."""
    places = torch.arange(len(index), device=index.device)
    if bags.padding is not None:
        places = torch.where(index == bags.padding, LAST, places)
    firsts = places.new_full((num_bags,), LAST).scatter_reduce(0, bag, places, "amin")
    return (places == firsts[bag]) & (places != LAST)


def _renorm_first(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2, **options: Any
) -> tuple[tuple, dict[str, Any]]:
    """Bags of shortened rows: the rows first."""
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    return (input, weight, offsets), options


register_function(
    F.embedding_bag,
    "Tensor input, Tensor weight, Tensor? offsets=None, float? max_norm=None, float norm_type=2, "
    "bool scale_grad_by_freq=False, str mode='mean', bool sparse=False, Tensor? per_sample_weights=None, "
    "bool include_last_offset=False, int? padding_idx=None",
    rule=Rule(_embedding_bag, _embedding_bag_local),
    before=_renorm_first,
)
