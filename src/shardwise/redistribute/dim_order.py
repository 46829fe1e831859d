"""Moves keep the order in which a tensor's dims lie in memory. On the wire all is contiguous, for ranks must agree, and
which strides a user gave a shard only its rank knows. But on one device there is no move: what is computed from its
result is strided as the tensor is, and whether `y.contiguous()` is `y` itself or a copy depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.redistribute.transitions import Move

_size = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride


def in_order(move: Move, before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
    """The shards after a move, with their dims in the order of those before it."""
    if before[0].is_contiguous() or move.source.layout.thinness:  # thin shards lie in any order
        return after
    return [y if x is y else _relaid(y, _order(x)) for x, y in zip(before, after, strict=True)]


def copy_format(x: Tensor, thin: bool = False) -> torch.memory_format:
    """For a dense copy with its dims in the order of those of a shard."""
    return torch.contiguous_format if thin or x.is_contiguous() else torch.preserve_format


def _order(x: Tensor) -> list[int]:
    """Dims from the outermost to the innermost. Those of what is repeated, with no stride, are as they are named."""
    steps, sizes = _stride(x), _size(x)
    dims = range(len(steps))
    if any(step == 0 and size > 1 for step, size in zip(steps, sizes, strict=True)):
        return [*dims]
    return sorted(dims, key=lambda dim: -steps[dim])


def _relaid(x: Tensor, order: Sequence[int]) -> Tensor:
    if list(order) == sorted(order):
        return x
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(*order).contiguous().permute(*back)
