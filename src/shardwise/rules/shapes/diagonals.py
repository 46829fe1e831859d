"""Diagonals and triangles of sharded matrices. A shard's part of them is its own, with the diagonal shifted by where
the shard lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.dim_rebuild import Sizes, grown, intervals
from shardwise.rules.kit.notation import Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import ANY_PENDING, Call, HeldValues, Local, Resize, Rule, Strategy
from shardwise.rules.shapes.views import copying


def _shifts(layout: Layout, rows: int, columns: int) -> list[int]:
    """What to add to a diagonal's number on each held rank: rows that begin later bring later columns with them."""
    starts = layout.held_starts
    return [start[rows] - start[columns] for start in starts]


def _shifted(diagonal: int, layout: Layout, rows: int, columns: int) -> HeldValues:
    return HeldValues([diagonal + shift for shift in _shifts(layout, rows, columns)])


# Triangles


def _triangle(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    return [*Factors([names], [names]).strategies(), ANY_PENDING]


def _triangle_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits[-2:]):
        return None
    return Local(getattr(Tensor, call.name), [call.inputs[0], _shifted(call["diagonal"], ins[0], -2, -1)])


register("tril", "triu", rule=Rule(_triangle, _triangle_local))


# The diagonal of a matrix: each row, or column, that is ours has at most one element of it, in order


def _diagonal(call: Call) -> list[Strategy]:
    x, out = call.inputs[0], call.outputs[0]
    rows, columns = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    offset, last = call["offset"], out.ndim - 1
    kept = [name for d, name in enumerate(dims_of(x.ndim)) if d not in (rows, columns)]
    names = [None if d in (rows, columns) else name for d, name in enumerate(dims_of(x.ndim))]
    along = [
        Strategy((dim,), (last,), resize=_inside(first, out.shape[last]))
        for dim, first in ((rows, max(-offset, 0)), (columns, max(offset, 0)))
    ]
    return [*Factors([names], [[*kept, None]]).strategies(), ANY_PENDING, *along]


def _inside(first: int, count: int) -> Resize:
    """How many of the `count` rows from `first` on, which the diagonal crosses, lie in each piece."""
    return lambda sizes: [
        tuple(max(min(stop, first + count) - max(start, first), 0) for start, stop in intervals(sizes))
    ]


def _diagonal_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    ndim = call.inputs[0].ndim
    rows, columns = call["dim1"] % ndim, call["dim2"] % ndim
    if not ins[0].splits[rows] and not ins[0].splits[columns]:
        return None
    args = [call.inputs[0], _shifted(call["offset"], ins[0], rows, columns), rows, columns]
    return Local(torch.diagonal, args, resized=True)


DIAGONAL = register("diagonal", rule=Rule(_diagonal, _diagonal_local))
register("diagonal_copy", rule=copying(DIAGONAL))


# Filling it: each shard knows which of its elements are on it


def _filled(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    return Factors([names], [names]).strategies()


def _filled_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    starts = HeldValues(ins[0].held_starts)
    return Local(_fill_own, [call.inputs[0], call["fill_value"], call["wrap"], starts, call.inputs[0].shape])


def _fill_own(x: Tensor, value: float, wrap: bool, starts: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    places = [torch.arange(start, start + size, device=x.device) for start, size in zip(starts, x.shape, strict=True)]
    first, *others = torch.meshgrid(*places, indexing="ij")
    period = shape[1] + 1 if wrap and x.dim() == 2 else max(shape) + 1  # below its end a tall matrix begins anew
    on = torch.ones_like(first, dtype=torch.bool)
    for other in others:
        on = on & (first % period == other)
    return x.masked_fill_(on, value)


register("fill_diagonal_", rule=Rule(_filled, _filled_local))


def _trace(call: Call) -> Factors:
    return Factors([("row", "column")], [()], linear=[frozenset({0})])


def _trace_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    return Local(_sum_of_diagonal, [call.inputs[0], HeldValues(_shifts(ins[0], 0, 1))])


def _sum_of_diagonal(x: Tensor, offset: int) -> Tensor:
    return x.diagonal(offset).sum()


register("trace", rule=factor_rule(_trace, _trace_local))


# A matrix with a given diagonal: sharded by rows, or by columns


def _embed_dims(call: Call) -> tuple[int, int]:
    ndim = call.outputs[0].ndim
    return call["dim1"] % ndim, call["dim2"] % ndim


def _embed(call: Call) -> list[Strategy]:
    x, (rows, columns), offset = call.inputs[0], _embed_dims(call), call["offset"]
    names = [*dims_of(x.ndim - 1), None]
    left = iter(names[:-1])
    out = [None if d in (rows, columns) else next(left) for d in range(call.outputs[0].ndim)]
    before, after = max(-offset, 0), max(offset, 0)
    along = [
        Strategy((x.ndim - 1,), (dim,), resize=_with_ends(*ends))
        for dim, ends in ((rows, (before, after)), (columns, (after, before)))
    ]
    return [*Factors([names], [out]).strategies(), ANY_PENDING, *along]


def _with_ends(before: int, after: int) -> Resize:
    """The rows of an embedded diagonal stay with it, and those without an element come first or last; not so if that
    would leave most of the rows with one rank."""

    def resize(sizes: Sizes) -> list[Sizes | None] | None:
        new = grown(sizes, before, after)
        return None if new is None else [new]

    return resize


def _embed_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    rows, columns = _embed_dims(call)
    if not ins[0].splits[-1]:
        return None
    offset = _shifted(call["offset"], outs[0], rows, columns)
    return Local(_embedded, [call.inputs[0], HeldValues(outs[0].held_shapes), offset, rows, columns])


def _embedded(x: Tensor, shape: tuple[int, ...], offset: int, rows: int, columns: int) -> Tensor:
    return torch.diagonal_scatter(x.new_zeros(shape), x, offset, rows, columns)


register("diag_embed", rule=Rule(_embed, _embed_local))
