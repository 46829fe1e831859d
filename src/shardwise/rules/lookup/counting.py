"""Counting: histograms of a given range, and membership in a set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.notation import Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Local, Rule, Strategy, Value, replicated

# Histograms of shards add up, if all count over one range: given, not that of the data


def _histc(call: Call) -> list[Strategy]:
    if call["min"] == call["max"] and call.inputs[0].numel:
        return [replicated(call)]
    return Factors([dims_of(call.inputs[0].ndim)], [[None]]).strategies()


def _histc_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Not the op itself: its plan would be taken for other ranges, too, which may be that of the data."""
    args = [call.inputs[0], call["bins"], call["min"], call["max"]]
    return Local(torch.histc, args) if any(ins[0].splits) else None


register("histc", rule=Rule(_histc, _histc_local))


# Membership: of each element on its own; in a set of which each rank knows a part, if any rank finds it


def _isin(call: Call) -> Factors:
    elements, tests = (call.bound.get(name) for name in ("elements", "test_elements"))
    out = dims_of(elements.ndim, "element") if isinstance(elements, Value) else ()
    known = dims_of(tests.ndim, "test") if isinstance(tests, Value) else ()
    ins = [names for value, names in ((elements, out), (tests, known)) if isinstance(value, Value)]
    return Factors(ins, [out], reduce=dict.fromkeys(known, Partial("min" if call["invert"] else "max")))


register("isin", rule=factor_rule(_isin))
