"""Counting: histograms of a given range, and membership in a set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.notation import Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, Local, Rule, Strategy, Value
from shardwise.rules.math.reductions import PROGRAM_COST, extremum_or_neutral

# Histograms of shards add up, if all count over one range


def _histc(call: Call) -> list[Strategy]:
    found = Factors([dims_of(call.inputs[0].ndim)], [[None]]).strategies()
    if not _is_open(call):
        return found
    return [found[0], *(Strategy(way.ins, (None,), 3 * PROGRAM_COST) for way in found[1:])]


def _is_open(call: Call) -> bool:
    """Whether the range is that of the data."""
    return call["min"] == call["max"] and call.inputs[0].numel > 0


def _histc_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    if not _is_open(call):  # a function of ours, not the op: another range may be an open one, and is planned anew
        return Local(_histc_between, [call.inputs[0], call["bins"], call["min"], call["max"]])
    axes = tuple(axis for cut in ins[0].splits for axis in cut)
    return Local(_sharded_histc, [call.inputs[0], call["bins"]], groups=(axes,))


def _sharded_histc(group: Collectives, x: Tensor, bins: int) -> Tensor:
    """The range first, then the counts."""
    dims = tuple(range(x.ndim))
    low = group.reduce(group.map(extremum_or_neutral, x.detach(), dims, False), "min")
    high = group.reduce(group.map(extremum_or_neutral, x.detach(), dims, True), "max")
    return group.psum(group.map(_histc_between, x, bins, low, high))


def _histc_between(x: Tensor, bins: int, low: Tensor | float, high: Tensor | float) -> Tensor:
    start, stop = float(low), float(high)
    if start == stop:  # as torch widens the range of data that are all equal
        start, stop = start - 1, stop + 1
    return torch.histc(x, bins, start, stop)


register("histc", rule=Rule(_histc, _histc_local))


# Membership: of each element on its own; in a set of which each rank knows a part, if any rank finds it


def _isin(call: Call) -> Factors:
    ins: list[tuple[str, ...]] = []
    out: tuple[str, ...] = ()
    if isinstance(call.bound.get("elements"), Value):
        out = dims_of(call["elements"].ndim, "element")
        ins.append(out)
    tests = dims_of(call.inputs[-1].ndim, "test") if "test_elements" in call.bound else ()
    if "test_elements" in call.bound:
        ins.append(tests)
    found = Partial("min" if call["invert"] else "max")
    return Factors(ins, [out], reduce=dict.fromkeys(tests, found))


register("isin", rule=factor_rule(_isin))
