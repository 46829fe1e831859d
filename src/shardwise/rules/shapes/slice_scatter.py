"""Writing one tensor over a part of another: a row, a slice, a diagonal.

The other dims are free. Where the dim that is written to is sharded, the source is replicated, and each rank takes its
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import Factor, dims_but, dims_of, moved
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Interval, Local, Rule, Strategy, replicated
from shardwise.rules.kit.windows import indices_inside


def _insertion(
    call: Call, part: Tensor, source: Sequence[Factor], written: Sequence[int], alone: Sequence[int] = ()
) -> list[Strategy]:
    """Factors for dims that source and target share; dims that are sharded in the target `alone`. `part` has the shape
    that the source must have; torch refuses any other only when it runs."""
    if part.shape != call.inputs[1].shape:
        return [replicated(call)]
    names = dims_but(call.inputs[0].ndim, written)
    return [*moved([names, source], [names]).strategies(), *(Strategy((dim, None), (dim,)) for dim in alone)]


def _meta(call: Call) -> Tensor:
    return torch.empty(call.inputs[0].shape, device="meta")


# One index of a dim, or a slice


def _select_scatter(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    names = dims_of(call.inputs[0].ndim)
    part = _meta(call).select(dim, call["index"])
    return _insertion(call, part, [*names[:dim], *names[dim + 1 :]], [dim], [dim])


def _slice_scatter(call: Call) -> list[Strategy]:
    x, source = call.inputs
    (dim,) = call.dims()
    part = _meta(call)[(slice(None),) * dim + (slice(call["start"], call["end"], call["step"]),)]
    found = _insertion(call, part, dims_but(x.ndim, [dim]), [dim], [dim])
    if source.shape == x.shape and call["step"] == 1:  # all of it
        found.append(Strategy((dim, dim), (dim,)))
    return found


def _written(call: Call) -> range:
    """The indices of a dim that are written to."""
    size = call.inputs[0].shape[call.dims()[0]]
    if call.name.startswith("select"):
        return range(call["index"] % size, call["index"] % size + 1)
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    return range(start, end, call["step"])


def _slice_scatter_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (x, source), (dim,) = call.inputs, call.dims()
    if not ins[0].splits[dim]:
        return None
    if len(ins[1].shape) == len(ins[0].shape) and ins[1].splits[dim]:
        return Local(torch.slice_scatter, [x, source, dim])
    return Local(_write_own, [x, source, dim, _written(call), HeldValues(ins[0].held_intervals(dim))])


def _write_own(x: Tensor, source: Tensor, dim: int, written: range, piece: Interval) -> Tensor:
    """Where nothing is ours, the source is still part of the graph: every rank takes part in backward."""
    part = indices_inside(written, piece)
    before = written.index(part.start + piece[0]) if part else 0
    source = source if source.ndim == x.ndim else source.unsqueeze(dim)
    return torch.slice_scatter(x, source.narrow(dim, before, len(part)), dim, part.start, part.stop, part.step)


register("select_scatter", rule=Rule(_select_scatter, _slice_scatter_local))
register("slice_scatter", rule=Rule(_slice_scatter, _slice_scatter_local))


def _diagonal_scatter(call: Call) -> list[Strategy]:
    written = [call.dims("dim1")[0], call.dims("dim2")[0]]
    names = [name for name in dims_but(call.inputs[0].ndim, written) if name is not None]
    return _insertion(call, _meta(call).diagonal(call["offset"], *written), [*names, None], written)


register("diagonal_scatter", rule=Rule(_diagonal_scatter))
