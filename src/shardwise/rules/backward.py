"""Backward ops, for whoever calls them by name. Gradients need none of this: they are computed on the shards."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.layout import Layout
from shardwise.rules.notation import Factor, Factors, dims_of
from shardwise.rules.registry import register
from shardwise.rules.spatial import unless_empty
from shardwise.rules.types import Call, HeldValues, Local, Rule, Strategy

GRADIENT = [frozenset({0})]
"""A gradient is linear in the one that comes in."""


def _softmax(call: Call) -> list[Strategy]:
    """As the softmax itself: row by row."""
    (dim,) = call.dims()
    names = [None if d == dim else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return Factors([names, names], [names], linear=GRADIENT).strategies()


register("_softmax_backward_data", "_log_softmax_backward_data", rule=Rule(_softmax))


def _max_pool(call: Call) -> list[Strategy]:
    """Image by image and channel by channel."""
    num_dims = 2 if "2d" in call.name else 3
    names: list[Factor] = [*dims_of(call.inputs[0].ndim - num_dims), *[None] * num_dims]
    return Factors([names] * 3, [names], linear=GRADIENT).strategies()


def _not_empty(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return unless_empty(call, outs)


register("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", rule=Rule(_max_pool, _not_empty))


def _unfold(call: Call) -> list[Strategy]:
    """All dims are free but the one that was unfolded, and that of the windows, which is the last."""
    ndim = call.outputs[0].ndim
    if not ndim:
        return Factors([[None]], [[]]).strategies()
    names = [None if d == call["dim"] % ndim else name for d, name in enumerate(dims_of(ndim))]
    return Factors([[*names, None]], [names], linear=GRADIENT).strategies()


def _unfold_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(outs[0].splits):
        return None
    args, kwargs = call.replace(input_sizes=HeldValues(outs[0].held_shapes))
    return Local(call.op, args, kwargs)


register("unfold_backward", rule=Rule(_unfold, _unfold_local))
