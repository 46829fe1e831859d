"""The one registry: from op to rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.types import Call, Local, Rule, Strategy

_rules: dict[str, Rule] = {}
_found: dict[Any, Rule | None] = {}


def register(*names: str, rule: Rule) -> Rule:
    """Give ops of the aten namespace (or `namespace::name`) a rule; in-place variants follow."""
    for name in names:
        _rules[name if "::" in name else f"aten::{name}"] = rule
    _found.clear()
    return rule


def register_pointwise(rule: Rule) -> None:
    """Give every op that torch tags as element-wise, and that has no rule of its own, this one."""
    _rules["pointwise"] = rule


def rule_for(op: Any) -> Rule | None:
    """The rule of an op, of the op it is the in-place form of, or of its kind (element-wise); None if there is none."""
    try:
        return _found[op]
    except KeyError:
        rule = _found[op] = _look_up(op)
        return rule


def _look_up(op: Any) -> Rule | None:
    name = op._schema.name
    rule = _rules.get(name)
    if rule is None and name.endswith("_") and not name.endswith("__"):
        rule = _rules.get(name[:-1])
    if rule is None and torch.Tag.pointwise in op.tags:
        rule = _rules["pointwise"]
    if rule is not None and any(argument.is_out for argument in op._schema.arguments):
        return _with_out(rule)
    return rule


# `out=`: the base rule, and the results written to tensors that lie as they do


def _with_out(rule: Rule) -> Rule:
    def strategies(call: Call) -> list[Strategy]:
        return [replace(way, ins=(*way.ins, *way.outs)) for way in rule.strategies(_without_out(call))]

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        base = _without_out(call)
        found = rule.local(base, ins[: len(base.inputs)], outs) if rule.local is not None else None
        if found is None:
            return None
        return replace(found, function=_Into(found.function, len(outs)), args=[*found.args, *call.outputs])

    return Rule(strategies, local)


def _without_out(call: Call) -> Call:
    outs = {argument.name for argument in call.op._schema.arguments if argument.is_out}
    kwargs = {name: value for name, value in call.kwargs.items() if name not in outs}
    return Call(call.op, call.args, kwargs, call.inputs[: len(call.inputs) - len(outs)], call.outputs)


class _Into:
    """A function whose results are written to its last arguments."""

    __slots__ = ("function", "num_outs")

    def __init__(self, function: Callable, num_outs: int) -> None:
        self.function, self.num_outs = function, num_outs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.function(*args[: -self.num_outs], **kwargs)
        written = (results,) if isinstance(results, Tensor) else results
        return tuple(out.copy_(new) for out, new in zip(args[-self.num_outs :], written, strict=True))
