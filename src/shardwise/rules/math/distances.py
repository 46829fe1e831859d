"""Norms and distances. A norm over a sharded dim is a pending norm: no rank needs to see the others' elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.notation import Factor, Factors, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import SUM, Call, Collectives, Local, Rule, Strategy
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import (
    PROGRAM_COST,
    extremum,
    is_split,
    program_ways,
    reduced_dims,
    reduction_ways,
    split_axes,
    wide,
)

# Norms


def _order(call: Call) -> float:
    order = call.bound.get("ord", call.bound.get("p"))
    return 2.0 if order is None else float(order)


def _norm(call: Call) -> list[Strategy]:
    """A single norm stays pending: with others it may become part of a larger one, which is pending too. Norms of rows
    are made whole, and so are largest elements, of which all that are equal share the gradient, on whatever rank; and
    norms that may be differentiated, since one of a shard that is zero has no second derivative where the whole has."""
    if _is_whole(call):
        return program_ways(call)
    order = _order(call)
    same = Partial("norm", order)
    passing = [Strategy((same,), (same,))] if order > 0 and call.bound.get("dtype") is None else []
    return [*reduction_ways(call, same), *passing]


def _is_whole(call: Call) -> bool:
    order = _order(call)
    return order < 0 or order == math.inf or call.outputs[0].numel > 1 or call.inputs[0].may_need_grad


def _norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not is_split(call, ins[0]) or not _is_whole(call):
        return None
    order = _order(call)
    keepdim = bool(call.bound.get("keepdim"))
    args = [call.inputs[0], order, reduced_dims(call), keepdim, call.bound.get("dtype"), call.outputs[0].dtype]
    return Local(_whole_norm, args, groups=split_axes(call, ins[0]))


def _whole_norm(
    group: Collectives,
    x: Tensor,
    order: float,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    result: torch.dtype,
) -> Tensor:
    if order == 0:
        return group.psum(torch.linalg.vector_norm(x, 0, dims, keepdim, dtype=dtype)).to(result)
    x = wide(x if dtype is None else x.to(dtype))
    if math.isinf(order):
        return extremum(group, x.abs(), dims, keepdim, "max" if order > 0 else "min").to(result)
    total = group.psum(_powers(x, order).sum(dims, keepdim))
    nothing = total == 0
    return torch.where(nothing, 0, torch.where(nothing, 1, total) ** (1 / order)).to(result)


def _powers(x: Tensor, order: float) -> Tensor:
    if order == 2:  # has a second derivative at zero
        return (x * x.conj()).real if x.is_complex() else x * x
    size = x.abs()
    zero = size == 0  # there the norm's gradient is none, whatever the slope of the power is
    return torch.where(zero, 0 if order > 0 else math.inf, torch.where(zero, 1, size) ** order)


def _needs_elements(order: float) -> bool:
    """Whether torch refuses this norm of nothing."""
    return order < 0 or math.isinf(order)


def _norm_or_neutral(x: Tensor, order: float, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Tensor:
    """Torch refuses an infinite or negative norm of nothing; an empty shard's is the neutral one of the reduction."""
    if all(x.shape[d] for d in dims):
        return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype)
    return torch.sum(x.abs(), dims, keepdim, dtype=dtype) + (0 if order > 0 else math.inf)


register("linalg_vector_norm", "norm", rule=Rule(_norm, _norm_local))


def _renorm(call: Call) -> list[Strategy]:
    """Each slice along the dim is scaled by its own norm, which ranks that have parts of it know together."""
    (dim,), ndim = call.dims(), call.inputs[0].ndim
    slices: list[Factor] = ["slice" if d == dim else None for d in range(ndim)]
    parts = [d for d in range(ndim) if d != dim] if 1 <= call["p"] < math.inf else []
    return [*Factors([slices], [slices]).strategies(), *(Strategy((d,), (d,), PROGRAM_COST) for d in parts)]


def _renorm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    axes = tuple(axis for d, split in enumerate(ins[0].splits) for axis in split if d != dim)
    args = [call.inputs[0], call["p"], dim, call["maxnorm"]]
    return Local(_renorm_parts, args, groups=(axes,)) if axes else None


def _renorm_parts(group: Collectives, x: Tensor, order: float, dim: int, largest: float) -> Tensor:
    rest = [d for d in range(x.dim()) if d != dim]
    total = group.psum(torch.linalg.vector_norm(wide(x), order, rest, keepdim=True).pow(order))
    too_long = total.pow(1 / order) > largest
    norm = torch.where(too_long, total, 1).pow(1 / order)  # of others, no gradient: that of a norm of zero is none
    return x * group.vary(torch.where(too_long, largest / (norm + 1e-7), 1).to(x.dtype))


register("renorm", rule=Rule(_renorm, _renorm_local))


# Distances between two tensors, and between all rows of two matrices


def _dist(call: Call) -> Factors:
    shape = torch.broadcast_shapes(*(value.shape for value in call.inputs))
    ins = [broadcast(value.shape, shape) for value in call.inputs]
    return Factors(ins, [()], reduce=dict.fromkeys(range(len(shape)), Partial("norm", _order(call))))


def _dist_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not _needs_elements(_order(call)) or not any(any(layout.splits) for layout in ins):
        return None
    return Local(_dist_or_neutral, [*call.inputs, _order(call)])


def _dist_or_neutral(x: Tensor, y: Tensor, order: float) -> Tensor:
    away = x - y
    return _norm_or_neutral(away, order, tuple(range(away.ndim)), False, None)


register("dist", rule=factor_rule(_dist, _dist_local))


def _over_features(order: float) -> Partial | None:
    """A distance over part of the features is a term of the norm; of order zero, a term of the number of features that
    differ. Not where torch's gradient is not that of the norm: below one, and for the maximum, of which equal features
    do not share the gradient."""
    if order == 0:
        return SUM
    return Partial("norm", order) if 1 <= order < math.inf else None


def _cdist(call: Call) -> Factors:
    x, y = call.inputs
    batch = broadcast(x.shape[:-2], call.outputs[0].shape[:-2]), broadcast(y.shape[:-2], call.outputs[0].shape[:-2])
    lead = tuple(range(call.outputs[0].ndim - 2))
    over = _over_features(_order(call))
    return Factors(
        [[*batch[0], "row", "feature"], [*batch[1], "column", "feature"]],
        [[*lead, "row", "column"]],
        reduce={"feature": over},
    )


register("_cdist_forward", "_euclidean_dist", rule=factor_rule(_cdist))
register(
    "_pdist_forward",
    rule=factor_rule(
        lambda call: Factors([[None, "feature"]], [[None]], reduce={"feature": _over_features(call["p"])})
    ),
)
