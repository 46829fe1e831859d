"""Reductions. A reduced dim that is sharded leaves a pending reduction where the operator allows it exactly, gradient
included; otherwise a small distributed program reduces it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.empty import unless_empty
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import (
    PROGRAM_COST,
    SUM,
    Call,
    Collectives,
    HeldValues,
    Local,
    Lowering,
    Rule,
    Strategy,
    is_inexact,
)


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that are gone, or of size one, afterwards. No dims mean every dim, but to `all` and `any` none."""
    ndim = call.inputs[0].ndim
    if call.bound.get("dim") == [] and call.name in ("all", "any") and call.outputs[0].ndim == ndim:
        return ()
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


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a call reduces: its name, the dims, whether they stay as dims of size one, and the dtype of its result."""

    name: str
    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype

    def shaped(self, out: Tensor) -> Tensor:
        """A result of which the reduced dims are still there, as the call gives it."""
        return out if self.keepdim else out.squeeze(self.dims)


def reducing(program: Callable[..., Any], *extra: Callable[[Call], Any]) -> Lowering:
    """Run `program(group, x, reduction, ...)` where a reduced dim is sharded, with what `extra` says of the call."""

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        if not is_split(call, ins[0]):
            return None
        axes = tuple(axis for dim in sorted(reduced_dims(call)) for axis in ins[0].splits[dim])
        keepdim = bool(call.bound.get("keepdim"))
        reduction = Reduction(call.name, reduced_dims(call), keepdim, call.outputs[0].dtype)
        return Local(program, [call.inputs[0], reduction, *(say(call) for say in extra)], groups=(axes,))

    return local


def is_linear(call: Call, op: str) -> bool:
    """Whether a pending sum, or average, of the input passes through the op: not if the op first converts to a dtype
    that cuts digits off, nor where the terms themselves do not add up in full."""
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    if is_inexact(source):
        return is_inexact(target)
    return op == "sum" and source != torch.bool


def reduction_ways(call: Call, reduction: Partial | None, *, linear: bool = False) -> list[Strategy]:
    """Dims that stay are free; a dim that is reduced may be sharded if that leaves `reduction` pending."""
    names = dims_of(call.inputs[0].ndim)
    out = kept(call, names)
    reduce: dict[Factor, Partial | None] = {names[d]: reduction for d in reduced_dims(call)}
    found = Factors([names], [out] * len(call.outputs), reduce=reduce).strategies()
    pending = [Partial(op) for op in ("sum", "avg") if linear and is_linear(call, op)]
    return [*found, *(Strategy((p,), (p,) * len(call.outputs)) for p in pending)]


def program_ways(call: Call, cost: float = PROGRAM_COST) -> list[Strategy]:
    """Reduced dims may be sharded too; the program replicates the outputs. Reductions of no elements are torch's."""
    if not _count(call):
        return reduction_ways(call, None)
    outs = (None,) * len(call.outputs)
    return [*reduction_ways(call, None), *(Strategy((dim,), outs, cost) for dim in reduced_dims(call))]


# Sums, means, products


def for_these_values(call: Call, **arguments: Any) -> Local:
    """The op itself, some arguments replaced, in a plan for its dtypes and numbers only. (A plan that runs the op as it
    is holds for all.)"""
    args, kwargs = call.replace(**arguments)
    return Local(_call, [call.op.overloadpacket, *args], kwargs)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def converted(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Whether a pending input passes through a conversion depends on its dtype."""
    return for_these_values(call) if call.bound.get("dtype") is not None and ins[0].has_pending else None


def _mean_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Shards may differ in size: the mean of each counts as much as it has elements."""
    if not is_split(call, ins[0]):
        return converted(call, ins, outs)
    keepdim = bool(call.bound.get("keepdim"))
    return Local(_share_of_mean, [call.inputs[0], reduced_dims(call), keepdim, call["dtype"], _count(call)])


def _share_of_mean(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None, count: int) -> Tensor:
    """A shard's term of the mean, by a mean: its gradient, unlike that of a sum, has memory for each element, and so
    may be written to."""
    x = x if dtype is None else x.to(dtype)
    own = math.prod(x.shape[dim] for dim in dims)
    return (wide(x).mean(dims, keepdim) / (count / own) if own else wide(x).sum(dims, keepdim) / count).to(x.dtype)


register("sum", rule=Rule(lambda call: reduction_ways(call, SUM, linear=True), converted))
register("nansum", "count_nonzero", rule=Rule(lambda call: reduction_ways(call, SUM)))
register("mean", rule=Rule(lambda call: reduction_ways(call, SUM, linear=True), _mean_local))
register("hash_tensor", rule=Rule(lambda call: reduction_ways(call, None)))


def _product(call: Call) -> list[Strategy]:
    """A pending product has no gradient with a layout: what its factors get does not add up to that of the product."""
    return reduction_ways(call, None if call.inputs[0].may_need_grad else Partial("product"))


register("prod", rule=Rule(_product))


# All and any are minimum and maximum of booleans; an empty shard's answer is the neutral one.

register("all", "_is_all_true", rule=Rule(lambda call: reduction_ways(call, Partial("min"))))
register("any", "_is_any_true", rule=Rule(lambda call: reduction_ways(call, Partial("max"))))


# Extrema: values, indices, or both

LAST = torch.iinfo(torch.int64).max


def extremum(group: Collectives, x: Tensor, of: Reduction) -> Any:
    """The global extremum, or both of them, the minimum first."""
    found = []
    for op in ("min", "max"):
        if op in of.name:
            best = group.reduce(group.map(extremum_or_neutral, x.detach(), of.dims, op == "max"), op)
            if x.requires_grad:
                best = shared_gradient(group, x, best, of.dims, of_nan=of.name in ("max", "min"))
            found.append(of.shaped(best))
    return found[0] if len(found) == 1 else tuple(found)


def shared_gradient(
    group: Collectives, x: Tensor, value: Tensor, dims: tuple[int, ...], *, of_nan: bool = True
) -> Tensor:
    """A value without gradient, with one that all elements equal to it share, on whatever rank. To torch a NaN has such
    equals for `max`, but none for `amax`: then every gradient is NaN."""
    same = x.detach() == value
    hit = wide((same | (x.detach().isnan() & value.isnan()) if of_nan else same).to(x.dtype))
    ties = group.reduce(hit.sum(dims, keepdim=True), "sum")
    return group.attach(value, group.psum((x * (hit / ties).to(x.dtype)).sum(dims, keepdim=True)))


def extremum_or_neutral(x: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """The extremum with its dims kept; of an empty shard, the value that never wins."""
    if all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return x.new_full(shape, neutral(x.dtype, largest))


def maximum(group: Collectives, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The global maximum without gradient, dims kept."""
    return group.reduce(group.map(extremum_or_neutral, x.detach(), dims, True), "max")


def neutral(dtype: torch.dtype, largest: bool) -> Any:
    """The value that never is the largest (the smallest), unless all are."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _extremum_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    with_index = len(call.outputs) == 2 and call.name != "aminmax"
    return reducing(_extremum_with_index if with_index else extremum)(call, ins, outs)


def _extremum_with_index(group: Collectives, x: Tensor, of: Reduction) -> tuple[Tensor, Tensor]:
    """Value and global index; the gradient goes to the element at that index."""
    (dim,), largest = of.dims, "max" in of.name
    value, index = group.map(_local_extremum, x, dim, largest, group.offset(0, dim))
    best, chosen = _winner(group, value.detach(), index, largest)
    if x.requires_grad:
        best = group.attach(best, group.psum(value * (chosen == index).to(x.dtype)))
    return of.shaped(best), of.shaped(chosen)


def _local_extremum(x: Tensor, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    if x.shape[dim]:
        value, index = x.max(dim, keepdim=True) if largest else x.min(dim, keepdim=True)
        return value, index + offset
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    never = x.new_full(shape, neutral(x.dtype, largest))
    if x.requires_grad:
        never = never + x.sum(dim, keepdim=True)
    return never, x.new_full(shape, LAST, dtype=torch.int64)


def _winner(group: Collectives, value: Tensor, index: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Among the ranks' candidates: the extremum, and the lowest index that attains it."""
    best = group.reduce(value, "max" if largest else "min")
    hit = (value == best) | (value.isnan() & best.isnan())
    return best, group.reduce(torch.where(hit, index, LAST), "min")


register("max", "min", "amax", "amin", "aminmax", rule=Rule(program_ways, _extremum_local))


def _arg_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if call["dim"] is not None:
        return reducing(_arg_extremum)(call, ins, outs)
    starts = HeldValues(ins[0].held_starts)
    return reducing(_flat_arg_extremum, lambda call: call.inputs[0].shape, lambda call: starts)(call, ins, outs)


def _arg_extremum(group: Collectives, x: Tensor, of: Reduction) -> Tensor:
    return _extremum_with_index(group, x.detach(), of)[1]


def _flat_arg_extremum(group: Collectives, x: Tensor, of: Reduction, shape: tuple[int, ...], start: Any) -> Tensor:
    largest = "max" in of.name
    value, index = group.map(_flat_extremum, x.detach(), largest, shape, start)
    chosen = _winner(group, value, index, largest)[1]
    return chosen.reshape([1] * len(shape)) if of.keepdim else chosen


def _flat_extremum(x: Tensor, largest: bool, shape: tuple[int, ...], start: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The extremum of a shard and its index in the flattened global tensor."""
    if not x.numel():
        return x.new_full((), neutral(x.dtype, largest)), x.new_full((), LAST, dtype=torch.int64)
    flat = x.argmax() if largest else x.argmin()
    index = torch.zeros_like(flat)
    for at, first, size in zip(torch.unravel_index(flat, x.shape), start, shape, strict=True):
        index = index * size + at + first
    return x.reshape(-1)[flat], index


register("argmax", "argmin", rule=Rule(program_ways, _arg_local))


# Variance: two passes, so that it is as exact as on one device


def _freedom(call: Call) -> float:
    """The degrees of freedom."""
    if "correction" in call.bound:
        return _count(call) - (1 if call["correction"] is None else call["correction"])
    return _count(call) - (1 if call.bound.get("unbiased", True) else 0)


def _variance_ways(call: Call) -> list[Strategy]:
    if not is_inexact(call.inputs[0].dtype):
        torch.var(torch.zeros(2, dtype=call.inputs[0].dtype))  # torch refuses
    if _freedom(call) <= 0:  # torch has its own answers, infinite or NaN
        return reduction_ways(call, None)
    return program_ways(call, 2 * PROGRAM_COST)


def _variance_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if _freedom(call) <= 0:
        return None
    program = reducing(_variance, _count, _freedom)(call, ins, outs)
    return program or unless_empty(call, outs)  # torch would warn about empty shards


def _variance(group: Collectives, x: Tensor, of: Reduction, count: int, freedom: float) -> Any:
    dtype, x = x.dtype, wide(x)
    mean = group.psum(group.map(_share_of_mean, x, of.dims, True, None, count))
    centred = x - group.vary(mean)
    squares = (centred * centred.conj()).real if x.is_complex() else centred * centred
    var = group.psum(squares.sum(of.dims, keepdim=True)) / freedom
    spread = of.shaped(_root(var) if of.name.startswith("std") else var).to(dtype.to_real())
    return (spread, of.shaped(mean).to(dtype)) if of.name.endswith("_mean") else spread


def _root(x: Tensor) -> Tensor:
    """The square root with torch's gradient of a standard deviation: none where it is zero."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


register("var", "std", "var_mean", "std_mean", rule=Rule(_variance_ways, _variance_local))


# logsumexp


def _logsumexp(group: Collectives, x: Tensor, of: Reduction) -> Tensor:
    x = wide(x.to(of.dtype))
    top = maximum(group, x.real if x.is_complex() else x, of.dims)
    top = torch.where(top.isinf(), 0, top)
    return of.shaped((group.psum((x - top).exp().sum(of.dims, keepdim=True)).log() + top).to(of.dtype))


register("logsumexp", rule=Rule(lambda call: program_ways(call, 2 * PROGRAM_COST), reducing(_logsumexp)))
