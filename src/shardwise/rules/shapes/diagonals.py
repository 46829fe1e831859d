"""Diagonals and triangles of sharded matrices. A shard's part of them is its own, with the diagonal shifted by where
the shard starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout, intervals
from shardwise.rules.kit.notation import Factors, dims_but, dims_of, factor_rule, moved, moved_along
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Local, Resize, Rule, Strategy
from shardwise.rules.kit.windows import inside
from shardwise.rules.shapes.views import copying


def _shifted(diagonal: int, layout: Layout, rows: int, columns: int) -> HeldValues:
    """A diagonal's number on each held rank: rows that begin later bring later columns with them."""
    return HeldValues([diagonal + start[rows] - start[columns] for start in layout.held_starts])


# Triangles


def _triangle_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits[-2:]):
        return None
    return Local(getattr(Tensor, call.name), [call.inputs[0], _shifted(call["diagonal"], ins[0], -2, -1)])


register("tril", "triu", rule=factor_rule(moved_along, _triangle_local))


# The diagonal of a matrix: each row, or column, that is ours has at most one element of it, in order


def _diagonal(call: Call) -> list[Strategy]:
    x, out = call.inputs[0], call.outputs[0]
    rows, columns = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    offset, last = call["offset"], out.ndim - 1
    names = dims_but(x.ndim, (rows, columns))
    kept = [name for name in names if name is not None]
    along = [
        Strategy((dim,), (last,), resize=_crossed(first, out.shape[last]))
        for dim, first in ((rows, max(-offset, 0)), (columns, max(offset, 0)))
    ]
    return [*moved([names], [[*kept, None]]).strategies(), *along]


def _crossed(first: int, count: int) -> Resize:
    """How many of the `count` rows from `first` on, which the diagonal crosses, each piece has."""
    return lambda sizes: [
        tuple(stop - start for start, stop in (inside(piece, count, first) for piece in intervals(sizes)))
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


def _trace(call: Call) -> Factors:
    return Factors([("row", "column")], [()], linear=[frozenset({0})])


def _trace_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return Local(_sum_of_diagonal, [call.inputs[0], _shifted(0, ins[0], 0, 1)]) if any(ins[0].splits) else None


def _sum_of_diagonal(x: Tensor, offset: int) -> Tensor:
    return x.diagonal(offset).sum()


register("trace", rule=factor_rule(_trace, _trace_local))


def _embed(call: Call) -> Factors:
    """Matrices with given diagonals: one diagonal is replicated, others are free."""
    ndim = call.outputs[0].ndim
    names = dims_of(call.inputs[0].ndim - 1)
    left = iter(names)
    out = [None if d in (call["dim1"] % ndim, call["dim2"] % ndim) else next(left) for d in range(ndim)]
    return moved([[*names, None]], [out])


register("diag_embed", rule=factor_rule(_embed))
