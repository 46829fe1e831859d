"""Operands that torch reshapes before it multiplies them, and keeps reshaped for the backward pass: `einsum`.

Whether it keeps a view or a copy depends on strides, and so does whether a write to the operand is refused later. Of
shards so thin that they hold one index, or none, it may keep views where other ranks have copies, and a rank that
raised alone in the backward pass would hang the rest. So where ranks differ in that, all keep copies. Where all are
thin alike (one head on each rank), nothing is copied, and all raise, even if one device would have a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A plan that is given copies of operands which are thin on some ranks only, if autograd may keep them; not of what
    it writes to."""

    __slots__ = ("plan", "written")

    def __init__(self, plan: Callable, written: Sequence[int]) -> None:
        self.plan, self.written = plan, written

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        tensors = flat_tensors((args, kwargs or {}))
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self.plan(args, kwargs)
        written = {id(tensors[at]) for at in self.written}

        def apart(x: Tensor) -> Tensor:
            if id(x) not in written and isinstance(x, DTensor) and x._layout.is_thin_in_places:
                return copied(x, torch.preserve_format)
            return x

        return self.plan(map_tensors(args, apart), map_tensors(kwargs or {}, apart))
