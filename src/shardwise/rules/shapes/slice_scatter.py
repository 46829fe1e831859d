"""Writing one tensor over a part of another: a row, a slice, a diagonal.

The other dims are free. Where the dim that is written to is sharded, the source is whole, and each rank takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PENDING, Call, HeldValues, Local, Rule, Strategy, replicated

BOTH_PENDING = Strategy((PENDING, PENDING), (PENDING,))


def _starts(layout: Layout) -> HeldValues:
    return HeldValues(layout.held_starts)


def _insertion(call: Call, part: Tensor, source: Sequence[Factor], written: Sequence[int]) -> list[Strategy]:
    """Factors for dims that source and target share; a dim that is written to may be sharded alone. `part` has the
    shape that the source must have; torch refuses any other only when it runs."""
    if part.shape != call.inputs[1].shape:
        return [replicated(call)]
    names = [None if dim in written else name for dim, name in enumerate(dims_of(call.inputs[0].ndim))]
    alone = [Strategy((dim, None), (dim,)) for dim in written]
    return [*Factors([names, source], [names]).strategies(), *alone, BOTH_PENDING]


def _meta(call: Call) -> Tensor:
    return torch.empty(call.inputs[0].shape, device="meta")


# One index of a dim


def _select_scatter(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    names = dims_of(call.inputs[0].ndim)
    part = _meta(call).select(dim, call["index"])
    return _insertion(call, part, [*names[:dim], *names[dim + 1 :]], [dim])


def _select_scatter_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    index = call["index"] % call.inputs[0].shape[dim]
    return Local(_select_scatter_here, [_starts(ins[0]), *call.inputs, dim, index])


def _select_scatter_here(starts: tuple[int, ...], x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """Where the row is another rank's, the source is still part of the graph: every rank takes part in backward."""
    local = index - starts[dim]
    count = int(0 <= local < x.shape[dim])
    start = local if count else 0
    return torch.slice_scatter(x, source.unsqueeze(dim).narrow(dim, 0, count), dim, start, start + count)


register("select_scatter", rule=Rule(_select_scatter, _select_scatter_local))


# A slice


def _slice_scatter(call: Call) -> list[Strategy]:
    x, source = call.inputs
    (dim,) = call.dims()
    names: list[Factor] = list(dims_of(x.ndim))
    names[dim] = None
    part = _meta(call)[(slice(None),) * dim + (slice(call["start"], call["end"], call["step"]),)]
    found = _insertion(call, part, names, [dim])
    if source.shape == x.shape and call["step"] == 1:  # all of it
        found.append(Strategy((dim, dim), (dim,)))
    return found


def _slice_scatter_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, source = call.inputs
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    if ins[1].splits[dim]:
        return Local(torch.slice_scatter, [x, source, dim])
    start, end, _ = slice(call["start"], call["end"]).indices(x.shape[dim])
    parts = []
    for begin, extent in (ins[0].box(coordinate) for coordinate in ins[0].mesh.held):
        parts.append(_slice_part(range(start, end, call["step"]), begin[dim], extent[dim]))
    return Local(_slice_scatter_here, [x, source, dim, call["step"], HeldValues(parts)])


def _slice_part(wanted: range, start: int, size: int) -> tuple[int, int, int]:
    """Of the indices wanted, those in a piece: the number of those before it, where the first is in it, how many."""
    before = len(range(wanted.start, min(start, wanted.stop), wanted.step)) if start > wanted.start else 0
    here = wanted[before:]
    count = len(range(here.start, min(here.stop, start + size), here.step)) if here else 0
    return (before, here.start - start, count) if count else (0, 0, 0)


def _slice_scatter_here(x: Tensor, source: Tensor, dim: int, step: int, part: tuple[int, int, int]) -> Tensor:
    before, first, count = part
    end = first + (count - 1) * step + 1 if count else first
    return torch.slice_scatter(x, source.narrow(dim, before, count), dim, first, end, step)


register("slice_scatter", rule=Rule(_slice_scatter, _slice_scatter_local))


# A diagonal


def _diagonal_scatter(call: Call) -> list[Strategy]:
    written = [call.dims("dim1")[0], call.dims("dim2")[0]]
    names = dims_of(call.inputs[0].ndim)
    part = _meta(call).diagonal(call["offset"], *written)
    return _insertion(call, part, [*(name for dim, name in enumerate(names) if dim not in written), None], written)


def _diagonal_scatter_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    rows, columns = call.dims("dim1")[0], call.dims("dim2")[0]
    if not ins[0].splits[rows] and not ins[0].splits[columns]:
        return None
    return Local(_diagonal_scatter_here, [_starts(ins[0]), *call.inputs, call["offset"], rows, columns])


def _diagonal_scatter_here(
    starts: tuple[int, ...], x: Tensor, source: Tensor, offset: int, rows: int, columns: int
) -> Tensor:
    """The k-th element of the diagonal lies at row k + max(-offset, 0), column k + max(offset, 0)."""
    row, column = max(-offset, 0) - starts[rows], max(offset, 0) - starts[columns]
    first = max(-row, -column, 0)
    last = min(x.shape[rows] - row, x.shape[columns] - column, source.shape[-1])
    part = source.narrow(-1, first if last > first else 0, max(last - first, 0))
    return torch.diagonal_scatter(x, part, column - row, rows, columns)


register("diagonal_scatter", rule=Rule(_diagonal_scatter, _diagonal_scatter_local))
