"""Data that torch refuses, where some ranks see the fault and others do not: they agree about it, and all raise.

On the CPU only, where torch looks at the data itself. Elsewhere its checks come later, or there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.rules.kit.types import Collectives


@dataclass(frozen=True, slots=True)
class Refusal:
    """Raises in these words for a number that is not zero. A value, so that a program that is saved has it."""

    words: str

    def __call__(self, found: int) -> None:
        if found:
            raise RuntimeError(self.words)


def refuse(group: Collectives, bad: Callable[[Tensor], Tensor], x: Tensor, words: str) -> None:
    """Raise if any of a tensor is bad, on any rank of the group: one reduction of a number."""
    if x.is_meta:
        unknown(group, x, torch.int32)
    elif x.device.type == "cpu":
        group.verify(group.reduce(group.map(_as_number, bad, x), "max"), Refusal(words))


def agreed(group: Collectives, bad: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether any of a tensor is bad, on any rank of the group: one reduction of a number."""
    if x.is_meta:
        unknown(group, x, torch.int32)
    return x.device.type == "cpu" and bool(group.reduce(group.map(_as_number, bad, x), "max"))


def unknown(group: Collectives, x: Tensor, dtype: torch.dtype = torch.int64) -> None:
    """Without data: the same reduction as on the CPU, so that as much is recorded."""
    group.reduce(x.new_empty((), dtype=dtype), "max")


def _as_number(bad: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return bad(x.detach()).any().to(torch.int32)
