"""Rules: how each op may run on shards. Data: one file per family, in the folder of its kind."""

from shardwise.rules import lookup, losses, math, nn, rows, shapes
from shardwise.rules.kit import guards
from shardwise.rules.kit.registry import register, rule_for
from shardwise.rules.kit.types import (
    PENDING,
    SUM,
    AxisPlacement,
    Call,
    HeldValues,
    Local,
    Rule,
    Strategy,
    Value,
    flat_values,
    is_inexact,
    replicated,
)

__all__ = [
    "PENDING",
    "SUM",
    "AxisPlacement",
    "Call",
    "HeldValues",
    "Local",
    "Rule",
    "Strategy",
    "Value",
    "flat_values",
    "guards",
    "is_inexact",
    "lookup",
    "losses",
    "math",
    "nn",
    "register",
    "replicated",
    "rows",
    "rule_for",
    "shapes",
]
