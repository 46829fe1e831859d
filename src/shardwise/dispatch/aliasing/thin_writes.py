"""Writes to shards so thin that some ranks hold one index of a dim, or none.

Torch refuses to write to elements that share memory, with each other or with some that are read. Of the memory of thin
shards it may say other than of the whole's, and other than on ranks that hold more: so all ranks say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.copied_views import storage_of
from shardwise.dispatch.aliasing.global_strides import copied
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.rules.kit.registry import is_expanded
from shardwise.tensor import DTensor

FILLS = frozenset({"zero_", "fill_", "masked_fill_", "index_fill_", "index_put_", "fill_diagonal_", "triu_", "tril_"})
"""What torch lets fill elements that share memory, but not differentiates."""


class OnThinShards:
    """A plan that writes to thin shards: not to those of `expand` where some are empty, and what it reads of the same
    memory is a copy."""

    __slots__ = ("fills", "plan", "positions")

    def __init__(self, plan: Callable, name: str, positions: Sequence[int]) -> None:
        self.plan, self.positions, self.fills = plan, positions, name in FILLS

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        tensors = flat_tensors((args, kwargs or {}))
        written = [tensors[position] for position in self.positions]
        if any(map(self._is_refused, written)):
            torch.zeros(()).expand(2).copy_(torch.zeros(2))  # torch refuses
        storages = {storage_of(x) for x in written}

        def apart(x: Tensor) -> Tensor:
            shared = storage_of(x) in storages and not any(x is y for y in written)
            return copied(x) if shared and isinstance(x, DTensor) else x

        return self.plan(map_tensors(args, apart), map_tensors(kwargs or {}, apart))

    def _is_refused(self, x: Tensor) -> bool:
        if not isinstance(x, DTensor) or not x._layout.has_empty or not is_expanded(x):
            return False
        return not self.fills or (torch.is_grad_enabled() and x.requires_grad)
