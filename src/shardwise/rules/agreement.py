"""Data that torch refuses, where some ranks see the fault and others do not: they agree about it, and all raise.

On the CPU only, where torch looks at the data itself. Elsewhere its checks come later, or there are none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.rules.types import Collectives


def agreed(group: Collectives, bad: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether any of a tensor is bad, on any rank of the group: one reduction of a number."""
    return x.device.type == "cpu" and bool(group.reduce(group.map(_as_number, bad, x), "max"))


def _as_number(bad: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return bad(x.detach()).any().to(torch.int32)
