"""`_foreach_*` and `_fused_*`: the base op, element by element of their lists."""

from __future__ import annotations

from typing import Any


def is_list_op(function: Any) -> bool:
    """Whether a torch function works on lists of tensors, each element on its own."""
    return getattr(function, "__name__", "").startswith(("_foreach_", "_fused_"))


REDUCING = {"_foreach_norm": "norm", "_foreach_max": "max"}
"""List ops that reduce each element, and by what."""
