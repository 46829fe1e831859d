"""`_foreach_*` and `_fused_*`: the base op, element by element of their lists."""

from __future__ import annotations

from typing import Any

FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

REDUCING = {"_foreach_norm": "norm", "_foreach_max": "max", "_foreach_powsum": "sum"}
"""List ops that reduce each element, and by what."""

STATE = frozenset({"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums"})
"""Arguments of fused optimizer steps that are written to, besides the parameters."""


def list_name(function: Any) -> str:
    """The name of a torch function, or of an aten op without its overload."""
    return getattr(function, "__name__", "").split(".")[0]


def is_list_op(function: Any) -> bool:
    """Whether a torch function works on lists of tensors, each element on its own."""
    name = list_name(function)
    return name.startswith("_foreach_") or name in FUSED or name == UNSCALE
