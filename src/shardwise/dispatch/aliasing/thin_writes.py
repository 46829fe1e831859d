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


class OnThinShards:
    """A plan that writes to thin shards: not to those of `expand` where some are empty, and what it reads of the same
    memory is a copy."""

    __slots__ = ("plan", "positions")

    def __init__(self, plan: Callable, positions: Sequence[int]) -> None:
        self.plan, self.positions = plan, positions

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        tensors = flat_tensors((args, kwargs or {}))
        written = [tensors[position] for position in self.positions]
        if any(is_expanded(x) for x in written if isinstance(x, DTensor) and x._layout.has_empty):
            torch.zeros(()).expand(2).copy_(torch.zeros(2))  # torch refuses
        storages = {storage_of(x) for x in written}

        def apart(x: Tensor) -> Tensor:
            shared = storage_of(x) in storages and not any(x is y for y in written)
            return copied(x) if shared and isinstance(x, DTensor) else x

        return self.plan(map_tensors(args, apart), map_tensors(kwargs or {}, apart))
