"""The one registry: from op to rule."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.types import Rule

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
    if name in _rules:
        return _rules[name]
    if name.endswith("_") and not name.endswith("__") and name[:-1] in _rules:
        return _rules[name[:-1]]
    if torch.Tag.pointwise in op.tags:
        return _rules["pointwise"]
    return None
