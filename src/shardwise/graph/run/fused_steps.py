"""Fused optimizer kernels in terms of what Inductor fuses itself: it has none of its own for them, and torch none for
tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Number = float | Tensor


def _wide(x: Tensor) -> Tensor:
    """In the precision in which kernels compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Step:
    """What all fused steps do with gradients: they are unscaled in place, and if any is not finite, nothing else is
    written."""

    def __init__(self, maximize: bool, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.maximize, self.scale, self.overflow = maximize, grad_scale, found_inf

    def gradient(self, grad: Tensor) -> Tensor:
        wide = _wide(grad)
        if self.scale is not None:
            wide = wide / self.scale
            self.write(grad, wide)
        return -wide if self.maximize else wide

    def write(self, kept: Tensor, found: Tensor) -> None:
        found = found.to(kept.dtype)
        kept.copy_(found if self.overflow is None else torch.where(self.overflow == 1, kept, found))


def _adam(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    maxima: Tensors,
    steps: Tensors,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    is_decoupled: bool = False,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    for i, param in enumerate(params):
        grad, wide, count = step.gradient(grads[i]), _wide(param), steps[i].double()
        if weight_decay and is_decoupled:
            wide = wide * (1 - lr * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * wide
        mean = torch.lerp(_wide(means[i]), grad, 1 - beta1)
        square = beta2 * _wide(squares[i]) + (1 - beta2) * grad * grad
        below = square
        if amsgrad:
            below = torch.maximum(_wide(maxima[i]), square)
            step.write(maxima[i], below)
        root = below.sqrt() / (1 - beta2**count).sqrt().to(wide.dtype) + eps
        step.write(means[i], mean)
        step.write(squares[i], square)
        step.write(param, wide - (lr / (1 - beta1**count)).to(wide.dtype) * mean / root)


def _adamw(*args: Any, **kwargs: Any) -> None:
    _adam(*args, **kwargs, is_decoupled=True)


def _sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    for i, param in enumerate(params):
        grad, wide = step.gradient(grads[i]), _wide(param)
        grad = grad + weight_decay * wide if weight_decay else grad
        if momentum:
            kept = grad if is_first_step else momentum * _wide(buffers[i]) + (1 - dampening) * grad
            step.write(buffers[i], kept)
            grad = grad + momentum * kept if nesterov else kept
        step.write(param, wide - _times(lr, grad))


def _adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: Number,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    for i, param in enumerate(params):
        grad, wide, count = step.gradient(grads[i]), _wide(param), steps[i].double()
        grad = grad + weight_decay * wide if weight_decay else grad
        total = _wide(sums[i]) + grad * grad
        step.write(sums[i], total)
        rate = (lr / (1 + (count - 1) * lr_decay)).to(wide.dtype)
        step.write(param, wide - rate * grad / (total.sqrt() + eps))


def _times(number: Number, x: Tensor) -> Tensor:
    return (number.to(x.dtype) if isinstance(number, Tensor) else number) * x


_aten = torch.ops.aten
FUSED_STEPS: dict[Any, Callable[..., None]] = {
    _aten._fused_adam_: _adam,
    _aten._fused_adamw_: _adamw,
    _aten._fused_sgd_: _sgd,
    _aten._fused_adagrad_: _adagrad,
}
