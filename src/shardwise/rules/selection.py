"""The k-th smallest element: medians, `kthvalue`; and the mode. Over a sharded dim elements are counted, not moved:
digit by digit of a key that sorts as they do, a histogram over all ranks tells the digit of the one looked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.ordering import take
from shardwise.rules.reductions import (
    LAST,
    PROGRAM_COST,
    extremum_or_neutral,
    neutral,
    reduced_dims,
    reduction_ways,
    shared_gradient,
    split_axes,
)
from shardwise.rules.registry import register
from shardwise.rules.types import Call, Collectives, Local, Rule, Strategy, replicated

DIGIT = 8
DIGITS = 1 << DIGIT
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _counting_cost(call: Call) -> float:
    """One histogram per digit, of 64 bit each: for small shards of many rows that is more than the elements."""
    value = call.inputs[0]
    return value.dtype.itemsize * (PROGRAM_COST + 8 * DIGITS * call.outputs[0].numel)


def _kth(call: Call) -> list[Strategy]:
    value, (dim,) = call.inputs[0], call.dims()
    counted = [Strategy((dim,), (None, None), _counting_cost(call))] if value.ndim and value.numel else []
    return [*reduction_ways(call, None), *counted]


def _kth_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    size = call.inputs[0].shape[dim]
    args = [call.inputs[0], dim, size, call.name, call.bound.get("k"), call["keepdim"]]
    return Local(_kth_element, args, groups=(ins[0].splits[dim],))


def _kth_element(
    group: Collectives, x: Tensor, dim: int, size: int, name: str, k: int | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Value and global index, the lowest where several elements are equal; the gradient goes to that element."""
    found = _select(group, x.detach(), dim, _rank(group, x.detach(), dim, size, name, k))
    index = group.reduce(group.map(_first, found, dim, group.offset(0, dim)), "min")
    value = take(group, x, dim, index)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _first(found: Tensor, dim: int, offset: int) -> Tensor:
    shape = [-1 if d == dim else 1 for d in range(found.ndim)]
    places = torch.arange(offset, offset + found.shape[dim], device=found.device).reshape(shape)
    return extremum_or_neutral(torch.where(found, places, LAST), (dim,), largest=False)


def _rank(group: Collectives, x: Tensor, dim: int, size: int, name: str, k: int | None) -> Tensor:
    """How many elements come before the one that is looked for, per row. NaNs come last; one of them is the median, or
    with `nanmedian` they do not count."""
    if name == "kthvalue":
        assert k is not None
        return torch.full_like(x.sum(dim, keepdim=True), k - 1, dtype=torch.int64)
    nans = group.reduce(x.isnan().sum(dim, keepdim=True), "sum")
    if name == "median":
        return torch.where(nans > 0, size - 1, (size - 1) // 2)
    return ((size - nans - 1) // 2).clamp(min=0)


def _select(group: Collectives, x: Tensor, dim: int, rank: Tensor) -> Tensor:
    """Which elements equal the one that has `rank` elements of its row before it."""
    key = _sort_key(x)
    found = torch.ones_like(key, dtype=torch.bool)
    bits = DIGIT * x.dtype.itemsize
    for shift in range(bits - DIGIT, -1, -DIGIT):
        digit = (key >> shift) & (DIGITS - 1)
        if shift == bits - DIGIT:
            digit = digit ^ (DIGITS // 2)  # the sign: negative keys come first
        counts = group.reduce(group.map(_histogram, digit, found, dim), "sum")
        up_to = counts.cumsum(dim)
        chosen = (up_to <= rank).sum(dim, keepdim=True)
        rank = rank - (up_to - counts).gather(dim, chosen)
        found = found & (digit == chosen)
    return found


def _histogram(digit: Tensor, found: Tensor, dim: int) -> Tensor:
    shape = [DIGITS if d == dim else size for d, size in enumerate(digit.shape)]
    return torch.zeros(shape, dtype=torch.int64, device=digit.device).scatter_add(dim, digit, found.long())


def _sort_key(x: Tensor) -> Tensor:
    """Signed integers, of as many bits as the elements have, that sort as these do: equal where they are, NaNs last."""
    if not x.dtype.is_floating_point:
        return x.long() - 128 if x.dtype == torch.uint8 else x.long()
    signed = _SIGNED[x.dtype.itemsize]
    bits = (x + 0.0).view(signed)  # minus zero is zero
    ordered = torch.where(bits < 0, bits ^ torch.iinfo(signed).max, bits)
    return torch.where(x.isnan(), torch.iinfo(signed).max, ordered).long()


# Medians of a whole tensor: there is no index, and all elements equal to it share its gradient


def _median(call: Call) -> list[Strategy]:
    if len(call.outputs) == 2:
        return _kth(call)
    ways = [replicated(call)]
    if call.inputs[0].numel:
        ways += [Strategy((dim,), (None,), _counting_cost(call)) for dim in range(call.inputs[0].ndim)]
    return ways


def _median_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if len(call.outputs) == 2:
        return _kth_local(call, ins, outs)
    if not any(ins[0].splits):
        return None
    args = [call.inputs[0], call.inputs[0].numel, call.name, reduced_dims(call)]
    return Local(_whole_median, args, groups=split_axes(call, ins[0]))


def _whole_median(group: Collectives, x: Tensor, size: int, name: str, dims: tuple[int, ...]) -> Tensor:
    flat = x.detach().reshape(-1)
    found = _select(group, flat, 0, _rank(group, flat, 0, size, name, None))
    local = group.map(_value_of, flat, found)
    median = group.reduce(local, "max").reshape([1] * len(dims))
    return shared_gradient(group, x, median, dims).squeeze(dims) if x.requires_grad else median.squeeze(dims)


def _value_of(x: Tensor, found: Tensor) -> Tensor:
    return extremum_or_neutral(torch.where(found, x, neutral(x.dtype, largest=True)), (0,), largest=True)


register("kthvalue", rule=Rule(_kth, _kth_local))
register("median", "nanmedian", rule=Rule(_median, _median_local))


register("mode", rule=Rule(lambda call: reduction_ways(call, None)))
