"""Embeddings and bags of them, with tables split by rows, by columns, or both.

Where rows are split, each rank looks up the indices of its own rows and contributes zero for the others: a pending sum,
and only the owner's row gets a gradient. Gradients are dense, whatever `sparse` says: a sum over ranks of sparse
gradients would have to make them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, has_empty, remembered
from shardwise.rules.kit.indices import Bound, checked_call, checked_look_up, owned
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import SUM, Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.lookup.indexing import looked_up
from shardwise.rules.math.reductions import PROGRAM_COST


def _must_check(table: Layout, index: Layout) -> bool:
    """Whether torch may refuse an index that is out of range on some ranks only: others do not hold it, or hold no row
    or column to look up."""
    return bool(table.splits[0]) or any(index.splits) or has_empty([table])


def _row_starts(layout: Layout) -> HeldValues:
    """Where each held rank's rows begin in the table."""
    return HeldValues([start[0] for start in layout.held_starts])


# Embedding


def _embedding(call: Call) -> list[Strategy]:
    """Gradients may be divided by how often each row is looked up, which only the full index says."""
    indices: Sequence[Factor] = dims_of(call.inputs[1].ndim, "index")
    if call["scale_grad_by_freq"]:
        free: list[Factor] = [None] * len(indices)
        return Factors([[None, "column"], free], [[*free, "column"]]).strategies()
    free_ways = Factors([[None, "column"], indices], [[*indices, "column"]]).strategies()
    return [*free_ways, Strategy((0, None), (looked_up(call.inputs[0].dtype),))]


def _embedding_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    table, index = ins
    if _must_check(table, index):
        bound = Bound(range(table.shape[0]), any(index.splits), own=not table.splits[0])
        options = [_row_starts(table), table.shape[0], call["padding_idx"], call["scale_grad_by_freq"]]
        return checked_look_up(bound, index, Local(_rows, [call["weight"], call["indices"], *options]), argument=1)
    if not call["sparse"]:
        return None
    args, kwargs = call.replace(sparse=False)
    return Local(torch.embedding, args, kwargs, always=True)


def _rows(table: Tensor, index: Tensor, start: int, num_rows: int, padding: int, by_frequency: bool) -> Tensor:
    """The rows held here, zeros in place of others."""
    if not index.numel() and len(table):  # torch's second derivative of `embedding` refuses an empty index
        return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])
    if len(table) == num_rows:
        return torch.embedding(table, index, padding, by_frequency)
    if not len(table):
        return _zeros_of(table, (*index.shape, table.shape[1]))
    mine, local = owned(index, start, len(table))
    padding = padding - start if start <= padding < start + len(table) else -1
    rows = torch.embedding(table, local.clamp(0, len(table) - 1), padding)
    return torch.where(mine.unsqueeze(-1), rows, table.new_zeros(()))


def _zeros_of(table: Tensor, shape: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """Zeros that depend on a table. Like bags they do not save it: it may be written to before the gradient comes."""
    return remembered(connected_zeros(table, shape, weights, saves=False))


register("embedding", rule=Rule(_embedding, _embedding_local))


# Rows longer than `max_norm` are shortened in place, if they are looked up. Ranks with some columns each add up powers


def _renorm(call: Call) -> list[Strategy]:
    columns = [Strategy((1, None), (1,), PROGRAM_COST)] if call["norm_type"] > 0 else []
    split = [Strategy((None, dim), (None,), PROGRAM_COST) for dim in range(call.inputs[1].ndim)]
    return [replicated(call), Strategy((0, None), (0,)), *columns, *split]


def _renorm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    table, index = ins
    if not any(table.splits) and not any(index.splits):
        return None
    pieces = [index.pieces(dim) for dim in range(len(index.splits))]
    bound = Bound(range(-table.shape[0], table.shape[0]), False)
    args = [pieces, bound, call["self"], call["indices"], _row_starts(table), call["max_norm"], call["norm_type"]]
    return Local(_renorm_rows, args, groups=(table.splits[1], *index.splits))


def _renorm_rows(columns: Collectives, *args: Any) -> Tensor:
    """All ranks that hold a row must know that it is looked up, so split indices are gathered: the table is not."""
    *groups, pieces, bound, table, index, start, max_norm, order = args
    for dim, (group, sizes) in enumerate(zip(groups, pieces, strict=True)):
        index = group.gather(index, dim, sizes)
    bound.check(columns, index)
    rows = columns.map(_rows_of, table, index, start)
    norms = columns.map(_norms, table, rows, order)
    if math.isinf(order):
        norms = columns.reduce(norms, "max")
    elif columns.size > 1:
        norms = columns.reduce(norms**order, "sum") ** (1 / order)
    columns.map(_shorten, table, rows, norms, max_norm)
    return table


def _rows_of(table: Tensor, index: Tensor, start: int) -> Tensor:
    """Which of the rows held here are looked up, each once."""
    mine, local = owned(index.reshape(-1), start, len(table))
    return local[mine].unique()


def _norms(table: Tensor, rows: Tensor, order: float) -> Tensor:
    found = table.detach()[rows]
    return torch.linalg.vector_norm(found if found.shape[1] else F.pad(found, (0, 1)), order, 1)


def _shorten(table: Tensor, rows: Tensor, norms: Tensor, max_norm: float) -> None:
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


def _embedding_bag(call: Call) -> list[Strategy]:
    """Columns are free; rows are looked up by their owners, if they are summed. Bags that are rows of indices are free
    too, and the items of a bag add up, unless padding among them must be counted. Only the full index counts the
    frequencies that gradients may be divided by."""
    by_bag, weighted = call["offsets"] is None, call["per_sample_weights"] is not None
    offsets = [None] * (not by_bag)

    def way(table: int | None, items: int | None, out: Any) -> Strategy:
        return Strategy((items, table, *offsets, *[items] * weighted), (out,))  # in the order of the schema

    found = [replicated(call), way(1, None, 1)]
    if call["scale_grad_by_freq"]:
        return found
    if by_bag:
        found.append(way(None, 0, 0))
    if call["mode"] != "max":
        found.append(way(0, None, SUM))
    if call["mode"] == "sum" or (call["mode"] == "mean" and call["padding_idx"] is None):
        found.append(way(None, 1 if by_bag else 0, SUM))
    return found


def _embedding_bag_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    items, table = ins[:2]
    num_rows = table.shape[0]
    bound = Bound(range(num_rows), any(items.splits))
    if not table.splits[0] and not any(items.splits[-1:]):
        args, kwargs = call.replace(sparse=False)
        local = Local(F.embedding_bag if call["offsets"] is None else _in_order, args, kwargs, always=True)
        return replace(checked_call(bound, items, local, 0), always=True) if _must_check(table, items) else local
    padding = None if call["padding_idx"] is None else call["padding_idx"] % max(num_rows, 1)
    bags = _Bags(call["mode"], call["include_last_offset"], padding, items.shape[-1])
    starts = HeldValues([(a[0], b[-1]) for a, b in zip(table.held_starts, items.held_starts, strict=True)])
    args = [call["input"], call["weight"], call["offsets"], call["per_sample_weights"], starts, bags]
    return checked_call(bound, items, Local(_sums, args), argument=0)


def _in_order(index: Tensor, table: Tensor, offsets: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
    """Torch's own bags. Where one ends before it begins, torch reads outside of it, and ranks would differ."""
    if offsets is not None:
        _check_offsets(offsets, len(index))
    return F.embedding_bag(index, table, offsets, *args, **options)


def _check_offsets(offsets: Tensor, num_items: int) -> None:
    if offsets.device.type != "cpu" or not len(offsets):
        return
    if offsets[0] or offsets[-1] > num_items or (offsets[1:] < offsets[:-1]).any():
        raise RuntimeError(
            f"embedding_bag: offsets must begin at 0, not decrease, and not exceed the number of items, {num_items}; "
            f"but they are {offsets.tolist()}"
        )


def _sums(
    index: Tensor, table: Tensor, offsets: Tensor | None, weights: Tensor | None, starts: Any, bags: _Bags
) -> Tensor:
    """The rows held here, summed by torch; a mean is divided by the size of the bag on all ranks."""
    row_start, item_start = starts
    begins, sizes = _begins(index, offsets, item_start, bags)
    index = index.reshape(-1)
    places = torch.arange(len(index), dtype=begins.dtype, device=index.device)
    bag = torch.searchsorted(begins, places, right=True) - 1
    mine, local = owned(index, row_start, len(table))
    if bags.include_last and offsets is not None:  # what comes after the last offset is in no bag
        mine = mine & (places + item_start < offsets[-1])
    if bags.padding is not None:
        real = index != bags.padding
        mine, sizes = mine & real, torch.zeros_like(sizes).index_add(0, bag, real.to(sizes.dtype))
    if not len(sizes) or not table.numel():
        return _zeros_of(table, (len(sizes), table.shape[1]), weights)
    ends = torch.zeros_like(sizes).index_add(0, bag, mine.to(sizes.dtype)).cumsum(0)
    begins = F.pad(ends[:-1], (1, 0)).to(index.dtype)
    chosen = None if weights is None else weights.reshape(-1)[mine]
    out = F.embedding_bag(local[mine], table, begins, mode="sum", per_sample_weights=chosen)
    return out / sizes.clamp(min=1).unsqueeze(1).to(out.dtype) if bags.mode == "mean" else out


def _begins(index: Tensor, offsets: Tensor | None, item_start: int, bags: _Bags) -> tuple[Tensor, Tensor]:
    """Where each bag begins among the items held here, and how many items it has on all ranks."""
    if offsets is None:
        num_bags, size = index.shape
        begins = torch.arange(num_bags, device=index.device) * size
        return begins, torch.full((num_bags,), bags.num_items, device=index.device)
    _check_offsets(offsets, bags.num_items)
    ends = offsets[1:] if bags.include_last else F.pad(offsets[1:], (0, 1), value=bags.num_items)
    begins = offsets[:-1] if bags.include_last else offsets
    return (begins - item_start).clamp(0, len(index)), ends - begins


def _renorm_first(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2, **options: Any
) -> tuple[tuple, dict[str, Any]]:
    """Rows are shortened before bags are made of them."""
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
