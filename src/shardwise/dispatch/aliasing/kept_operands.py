"""Operands that torch reshapes before it multiplies them, and keeps reshaped for the backward pass: `einsum`.

Whether it keeps a view or a copy depends on strides, and so does whether a write to the operand is refused later. Of
shards so thin that they hold one index, or none, it may keep views where other ranks have copies, and a rank that
raised alone in the backward pass would hang the rest. So where ranks differ in that, all keep copies. Where all are
thin alike (one head on each rank), nothing is copied, and all raise, even if one device would have a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.dispatch.aliasing.global_strides import copied
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.rules.kit.treatments import treat
from shardwise.tensor import DTensor

treat(
    *(torch.einsum, torch.tensordot, torch.inner, Tensor.inner, torch.matmul, Tensor.matmul, Tensor.__matmul__),
    *(Tensor.__rmatmul__, F.bilinear, torch.bilinear, F.instance_norm, torch.instance_norm),
    reshapes_operands=True,
)


class KeepsCopies:
    """A plan that is given copies of operands which are thin on some ranks only, if autograd may keep them."""

    __slots__ = ("plan",)

    def __init__(self, plan: Callable) -> None:
        self.plan = plan

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in flat_tensors((args, kwargs or {})))):
            return self.plan(args, kwargs)
        return self.plan(map_tensors(args, _apart), map_tensors(kwargs or {}, _apart))


def _apart(x: Tensor) -> Tensor:
    if isinstance(x, DTensor) and x._layout.is_thin_in_places:
        return copied(x, torch.preserve_format)
    return x
