"""Lengths of sequences in tensors. Torch reads them before anything else, which a trace cannot; all ranks must know all
of them anyway, so they are read once, and the call is planned with numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.dispatch.planning.fallback import keeps_shards
from shardwise.tensor import DTensor


def _with_numbers(function: Callable) -> Callable[..., Any]:
    def run(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [_numbers(input_lengths), _numbers(target_lengths)]
        return NotImplemented if None in numbers else function(log_probs, targets, *numbers, *args, **kwargs)

    return run


def _numbers(lengths: Any) -> list[int] | None:
    """What a tensor of integers holds; None where torch has something to complain about."""
    if not isinstance(lengths, Tensor) or lengths.dtype not in INTEGERS:
        return None
    whole = lengths.full_tensor() if isinstance(lengths, DTensor) else lengths
    return whole.flatten().tolist()


INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

for _function in (F.ctc_loss, torch.ctc_loss):
    keeps_shards(_function)(_with_numbers(_function))
