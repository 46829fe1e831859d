"""Reductions. A reduced dim that is sharded leaves a pending reduction where the operator allows it exactly, gradient
included; elsewhere a small distributed program finishes the job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.notation import Factor, Factors, dims_of
from shardwise.rules.registry import register
from shardwise.rules.types import SUM, Call, Collectives, HeldValues, Local, Rule, Strategy

PROGRAM_COST = 10_000.0
"""What one small reduction inside a program counts for: so little that a few of them, as in a cross entropy, are less
than any move of the input. What can be computed where it lies is not gathered, whatever its size."""


def reduced_dims(call: Call) -> tuple[int, ...]:
    ndim = call.inputs[0].ndim
    return call.dims() if "dim" in call.bound and ndim else tuple(range(ndim))


def _count(call: Call) -> int:
    """How many elements each result is made of."""
    return math.prod(call.inputs[0].shape[d] for d in reduced_dims(call))


def wide(x: Tensor) -> Tensor:
    """Half precision as torch's own kernels accumulate it."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def kept(call: Call, names: Sequence[Factor]) -> list[Factor]:
    """The factors of the output: reduced dims vanish, or stay as dims of size one that carry none."""
    gone = reduced_dims(call)
    if call.bound.get("keepdim"):
        return [None if d in gone else name for d, name in enumerate(names)]
    return [name for d, name in enumerate(names) if d not in gone]


def is_split(call: Call, layout: Layout) -> bool:
    """Whether a reduced dim is sharded."""
    return any(layout.splits[dim] for dim in reduced_dims(call))


def split_axes(call: Call, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The one group of axes that split the reduced dims."""
    return (tuple(axis for dim in sorted(reduced_dims(call)) for axis in layout.splits[dim]),)


def _reduction(call: Call, reduction: Partial | None, *, linear: bool = False) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    out = kept(call, names)
    reduce: dict[Factor, Partial | None] = {names[d]: reduction for d in reduced_dims(call)}
    return Factors(
        [names], [out] * len(call.outputs), reduce=reduce, linear=[frozenset({0})] if linear else []
    ).strategies()


def _program_strategies(call: Call, cost: float = PROGRAM_COST) -> list[Strategy]:
    """Reduced dims may be sharded too; the program makes the outputs whole."""
    outs = (None,) * len(call.outputs)
    return [*_reduction(call, None), *(Strategy((dim,), outs, cost) for dim in reduced_dims(call))]


# Sums, means, products


def _mean_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Shards may differ in size: each sums its elements, and the sum is divided by the global count."""
    if not is_split(call, ins[0]):
        return None
    keepdim = bool(call.bound.get("keepdim"))
    return Local(_scaled_sum, [call.inputs[0], reduced_dims(call), keepdim, call["dtype"], _count(call)])


def _scaled_sum(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None, count: int) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return (wide(x).sum(dims, keepdim) / count).to(x.dtype)


register("sum", "nansum", rule=Rule(lambda call: _reduction(call, SUM, linear=call.name == "sum")))
register("mean", rule=Rule(lambda call: _reduction(call, SUM, linear=True), _mean_local))
register("prod", rule=Rule(lambda call: _reduction(call, Partial("product"))))
register("count_nonzero", rule=Rule(lambda call: _reduction(call, SUM)))


# All and any are minimum and maximum of booleans; an empty shard's answer is the neutral one.

register("all", rule=Rule(lambda call: _reduction(call, Partial("min"))))
register("any", rule=Rule(lambda call: _reduction(call, Partial("max"))))


# Norms


def _norm(call: Call) -> list[Strategy]:
    return _reduction(call, Partial("norm", float(call["ord"])))


def _norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not is_split(call, ins[0]) or (call["ord"] >= 0 and not math.isinf(call["ord"])):
        return None
    return Local(_norm_or_neutral, [call.inputs[0], call["ord"], reduced_dims(call), call["keepdim"], call["dtype"]])


def _norm_or_neutral(x: Tensor, order: float, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Tensor:
    """Torch refuses an infinite or negative norm of nothing; an empty shard's is the neutral one of the reduction."""
    if all(x.shape[d] for d in dims):
        return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype)
    return torch.sum(x.abs(), dims, keepdim, dtype=dtype) + (0 if order > 0 else math.inf)


register("linalg_vector_norm", rule=Rule(_norm, _norm_local))


# Extrema: values, indices, or both


def _extremum_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not is_split(call, ins[0]):
        return None
    largest = "max" in call.name
    return Local(
        _extremum,
        [call.inputs[0], reduced_dims(call), bool(call.bound.get("keepdim")), largest],
        groups=split_axes(call, ins[0]),
    )


def _extremum(group: Collectives, x: Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Tensor:
    """The global extremum; its gradient is shared equally by all elements that attain it, on whatever rank."""
    best = group.reduce(group.map(_extremum_or_neutral, x.detach(), dims, largest), "max" if largest else "min")
    if x.requires_grad:
        hit = wide(((x.detach() == best) | (x.detach().isnan() & best.isnan())).to(x.dtype))
        ties = group.reduce(hit.sum(dims, keepdim=True), "sum")
        best = group.attach(best, group.psum((x * (hit / ties).to(x.dtype)).sum(dims, keepdim=True)))
    return best if keepdim else best.squeeze(dims)


def _extremum_or_neutral(x: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """The extremum with its dims kept; of an empty shard, the value that never wins."""
    if all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return x.new_full(shape, neutral(x.dtype, largest))


def neutral(dtype: torch.dtype, largest: bool) -> Any:
    """The value that never is the largest (the smallest), unless all are."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _extremum_dim_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if len(call.outputs) == 1:
        return _extremum_local(call, ins, outs)
    if not is_split(call, ins[0]):
        return None
    (dim,) = call.dims()
    return Local(
        _extremum_with_index,
        [call.inputs[0], dim, call["keepdim"], "max" in call.name],
        groups=split_axes(call, ins[0]),
    )


def _extremum_with_index(
    group: Collectives, x: Tensor, dim: int, keepdim: bool, largest: bool
) -> tuple[Tensor, Tensor]:
    """Value and global index; the gradient goes to the element at that index."""
    value, index = group.map(_local_extremum, x, dim, largest, group.offset(0, dim))
    best, chosen = _winner(group, value.detach(), index, largest)
    if x.requires_grad:
        mine = (chosen == index).to(x.dtype)
        best = group.attach(best, group.psum(value * mine))
    return (best, chosen) if keepdim else (best.squeeze(dim), chosen.squeeze(dim))


def _local_extremum(x: Tensor, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    if x.shape[dim]:
        value, index = x.max(dim, keepdim=True) if largest else x.min(dim, keepdim=True)
        return value, index + offset
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    never = (
        x.sum(dim, keepdim=True).to(x.dtype) + neutral(x.dtype, largest)
        if x.dtype != torch.bool
        else x.new_full(shape, not largest)
    )
    return never, x.new_full(shape, LAST, dtype=torch.int64)


LAST = torch.iinfo(torch.int64).max


def _winner(group: Collectives, value: Tensor, index: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Among the ranks' candidates: the extremum, and the lowest index that attains it."""
    best = group.reduce(value, "max" if largest else "min")
    hit = (value == best) | (value.isnan() & best.isnan())
    return best, group.reduce(torch.where(hit, index, LAST), "min")


for _name in ("max", "min", "amax", "amin"):
    register(_name, rule=Rule(_program_strategies, _extremum_dim_local))


def _arg_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not is_split(call, ins[0]):
        return None
    boxes = HeldValues([ins[0].box(coordinate) for coordinate in ins[0].mesh.held])
    args = [call.inputs[0], call["dim"], call["keepdim"], "max" in call.name, call.inputs[0].shape, boxes]
    return Local(_arg_extremum, args, groups=split_axes(call, ins[0]))


def _arg_extremum(
    group: Collectives, x: Tensor, dim: int | None, keepdim: bool, largest: bool, shape: tuple[int, ...], box: Any
) -> Tensor:
    if dim is not None:
        value, index = group.map(
            _local_extremum, x.detach(), dim % len(shape), largest, group.offset(0, dim % len(shape))
        )
        chosen = _winner(group, value, index, largest)[1]
        return chosen if keepdim else chosen.squeeze(dim % len(shape))
    value, index = group.map(_flat_extremum, x.detach(), largest, shape, box)
    chosen = _winner(group, value, index, largest)[1]
    return chosen.reshape([1] * len(shape)) if keepdim else chosen


def _flat_extremum(x: Tensor, largest: bool, shape: tuple[int, ...], box: Any) -> tuple[Tensor, Tensor]:
    """The extremum of a whole shard and its index in the flattened global tensor."""
    if not x.numel():
        return x.new_full((), neutral(x.dtype, largest)), x.new_full((), LAST, dtype=torch.int64)
    flat = x.argmax() if largest else x.argmin()
    value = x.reshape(-1)[flat]
    where = torch.unravel_index(flat, x.shape)
    index = torch.zeros_like(flat)
    for at, start, size in zip(where, box[0], shape, strict=True):
        index = index * size + at + start
    return value, index


register("argmax", "argmin", rule=Rule(_program_strategies, _arg_local))


# Variance: two passes, so that it is as exact as on one device


def _correction(call: Call) -> float:
    if "correction" in call.bound:
        return 1 if call["correction"] is None else call["correction"]
    return 1 if call.bound.get("unbiased", True) else 0


def _variance_strategies(call: Call) -> list[Strategy]:
    if _count(call) <= _correction(call):  # no degrees of freedom: torch has its own answers, infinite or NaN
        return _reduction(call, None)
    return _program_strategies(call, 2 * PROGRAM_COST)


def _variance_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    freedom = _count(call) - _correction(call)
    whole = not is_split(call, ins[0]) and all(map(math.prod, ins[0].held_shapes))
    if whole or freedom <= 0:
        return None  # torch itself, unless it would warn about empty shards
    keepdim = bool(call.bound.get("keepdim"))
    args = [call.inputs[0], reduced_dims(call), keepdim, _count(call), freedom, call.name]
    return Local(_variance, args, groups=split_axes(call, ins[0]))


def _variance(
    group: Collectives, x: Tensor, dims: tuple[int, ...], keepdim: bool, count: int, freedom: float, name: str
) -> Any:
    dtype, x = x.dtype, wide(x)
    mean = group.psum(x.sum(dims, keepdim=True)) / count
    away = x - group.vary(mean)
    squares = (away * away.conj()).real if x.is_complex() else away * away
    var = group.psum(squares.sum(dims, keepdim=True)) / freedom
    spread = _root(var) if name.startswith("std") else var
    if not keepdim:
        mean, spread = mean.squeeze(dims), spread.squeeze(dims)
    spread = spread.to(dtype.to_real())
    return (spread, mean.to(dtype)) if name.endswith("_mean") else spread


def _root(x: Tensor) -> Tensor:
    """The square root with torch's gradient of a standard deviation: none where it is zero."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


register(
    "var",
    "std",
    "var_mean",
    "std_mean",
    rule=Rule(_variance_strategies, _variance_local),
)


# logsumexp


def _logsumexp_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not is_split(call, ins[0]):
        return None
    return Local(_logsumexp, [call.inputs[0], reduced_dims(call), call["keepdim"]], groups=split_axes(call, ins[0]))


def _logsumexp(group: Collectives, x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    dtype, x = x.dtype, wide(x)
    top = maximum(group, x, dims)
    top = torch.where(top.isinf(), 0, top)
    out = group.psum((x - top).exp().sum(dims, keepdim=True)).log() + top
    out = out.to(dtype) if dtype.is_floating_point else out
    return out if keepdim else out.squeeze(dims)


def maximum(group: Collectives, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The global maximum without gradient, dims kept."""
    return group.reduce(group.map(_extremum_or_neutral, x.detach(), dims, True), "max")


register("logsumexp", rule=Rule(lambda call: _program_strategies(call, 2 * PROGRAM_COST), _logsumexp_local))
