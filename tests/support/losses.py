"""Losses over classes written out in plain torch, with every option that ours have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def written_out(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """A loss over the second dim, with the square of each row's logarithm of the sum of exponentials."""
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    rows = F.cross_entropy(x, target, weight, reduction="none", **options)
    counted = target != ignore_index
    rows = rows + z_loss * torch.where(counted, x.logsumexp(1).square(), 0)
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    weights = counted if weight is None else torch.where(counted, weight[target.clamp(0)], 0)
    return rows.sum() / weights.sum()


def with_logits(x: Tensor, layer: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The same, of what a layer gives."""
    logits = F.linear(x, layer, bias).flatten(0, -2)
    loss = written_out(logits, target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def with_slopes(loss: Callable[..., Tensor], num_inputs: int = 1) -> Callable[..., tuple[Tensor, ...]]:
    """A loss, and numbers that depend on the gradients of its first arguments."""

    def both(*given: Tensor) -> tuple[Tensor, ...]:
        found = loss(*given)
        slopes = torch.autograd.grad(found.square().sum(), given[:num_inputs], create_graph=True)
        return found, *(slope.square().sum() for slope in slopes)

    return both
