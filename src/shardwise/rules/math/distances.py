"""Norms and distances. A norm over a sharded dim is a pending norm: no rank needs to see the others' elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.notation import Factor, Factors, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.treatments import treat
from shardwise.rules.kit.types import SUM, Call, Collectives, Local, Rule, Strategy
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import Reduction, extremum, program_ways, reducing, reduction_ways, wide

# Norms


def _order(call: Call) -> float:
    order = call.bound.get("ord", call.bound.get("p"))
    return 2.0 if order is None else float(order)


def _norm(call: Call) -> list[Strategy]:
    """A single norm stays pending: with others it may become part of a larger one, which is pending too. Norms of rows
    are reduced, and so are largest elements, of which all that are equal share the gradient, on whatever rank; and
    norms that may be differentiated: that of a shard of zeros has no second derivative where the global one has."""
    if _is_reduced(call):
        return program_ways(call)
    order = _order(call)
    same = Partial("norm", order)
    passing = [Strategy((same,), (same,))] if order > 0 and call.bound.get("dtype") is None else []
    return [*reduction_ways(call, same), *passing]


def _is_reduced(call: Call) -> bool:
    order = _order(call)
    return order < 0 or order == math.inf or call.outputs[0].numel > 1 or call.inputs[0].may_need_grad


def _norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not _is_reduced(call):
        return None
    return reducing(_sharded_norm, _order, lambda call: call.bound.get("dtype"))(call, ins, outs)


def _sharded_norm(group: Collectives, x: Tensor, of: Reduction, order: float, dtype: torch.dtype | None) -> Tensor:
    if order == 0:
        return group.psum(torch.linalg.vector_norm(x, 0, of.dims, of.keepdim, dtype=dtype)).to(of.dtype)
    x = wide(x if dtype is None else x.to(dtype))
    if math.isinf(order):
        return extremum(group, x.abs(), replace(of, name="max" if order > 0 else "min")).to(of.dtype)
    total = group.psum(_powers(x, order).sum(of.dims, of.keepdim))
    zero = total == 0
    return torch.where(zero, 0, torch.where(zero, 1, total) ** (1 / order)).to(of.dtype)


def _powers(x: Tensor, order: float) -> Tensor:
    if order == 2:  # has a second derivative at zero
        return (x * x.conj()).real if x.is_complex() else x * x
    size = x.abs()
    zero = size == 0  # there the norm's gradient is zero, whatever the slope of the power is
    return torch.where(zero, 0 if order > 0 else math.inf, torch.where(zero, 1, size) ** order)


register("linalg_vector_norm", "norm", rule=Rule(_norm, _norm_local))


def _renorm(call: Call) -> Factors:
    """Each slice along the dim is scaled by its own norm."""
    names: list[Factor] = ["slice" if d in call.dims() else None for d in range(call.inputs[0].ndim)]
    return Factors([names], [names])


register("renorm", rule=factor_rule(_renorm))


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


treat(torch.dist, Tensor.dist, traced_as=_dist)


# Distances between all rows of two matrices


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
