"""Rules: how each op may run on shards. Data, one file per family."""

from shardwise.rules import losses, matmul, norms, pointwise, reductions, views
from shardwise.rules.registry import register, rule_for
from shardwise.rules.types import (
    PENDING,
    AxisPlacement,
    Call,
    HeldValues,
    Local,
    Rule,
    Strategy,
    Value,
    flat_values,
    replicated,
)

__all__ = [
    "PENDING",
    "AxisPlacement",
    "Call",
    "HeldValues",
    "Local",
    "Rule",
    "Strategy",
    "Value",
    "flat_values",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "reductions",
    "register",
    "replicated",
    "rule_for",
    "views",
]
