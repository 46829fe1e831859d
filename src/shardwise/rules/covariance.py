"""Covariance and correlation. Torch's own read numbers off their data, which cannot be traced, unless there are no
weights: without them they are sums and a product of matrices, for which there are rules."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from shardwise.rules.registry import FUNCTIONS


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`, in ops that know nothing of each other."""
    if fweights is not None or aweights is not None or input.ndim > 2 or input.dtype == torch.bool:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    count = rows.shape[1]
    freedom = count - correction
    if freedom <= 0:
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.",
            stacklevel=2,
        )
        freedom = 0
    away = rows - rows.sum(1, keepdim=True) / count
    return (away @ away.mH / freedom).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """`torch.corrcoef`, likewise."""
    if input.ndim > 2:
        return torch.corrcoef(input)  # which says what is wrong
    c = cov(input)
    if c.ndim == 0:
        return c / c
    deviation = c.diagonal().real.sqrt()
    c = c / deviation[:, None] / deviation[None, :]
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


FUNCTIONS.update({torch.cov: cov, Tensor.cov: cov, torch.corrcoef: corrcoef, Tensor.corrcoef: corrcoef})
