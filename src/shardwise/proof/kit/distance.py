"""When two tensors are the same, and how far they may be apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-5, torch.complex64: 1e-5}
"""How far results may be apart, of their own size; other floats: 1e-2, the rest: 0."""

OF_LARGEST = {torch.float64: 1e-11, torch.complex128: 1e-11}
"""The same, of the largest among them; others: as of their own size."""

NOISE = 1e-4
"""Of the tolerance: how large a number may be whose true value is zero."""


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are the same, number by number: NaN is NaN, and zero has no sign."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return equal(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = _plain(a), _plain(b)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _plain(x: Tensor) -> Tensor:
    """Without history and lazy bits, in a dtype that can be compared."""
    x = x.detach().resolve_conj().resolve_neg()
    return x.to(torch.complex64) if x.dtype == torch.complex32 else x


def equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)
    except (RuntimeError, ValueError):
        return False


def distance(a: Tensor, b: Tensor) -> float | None:
    """How far two tensors of one shape and dtype are apart; None if no farther than rounding usually brings them."""
    far = apart(a, b)
    return None if bool((far <= allowed(b)).all()) else float(far.max())


def apart(a: Tensor, b: Tensor) -> Tensor:
    """How far two tensors of one shape are apart, element by element."""
    a, b = _wide(a), _wide(b)
    far = (a - b).abs()
    far[(a == b) | ((a != a) & (b != b))] = 0.0
    return far.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def allowed(x: Tensor) -> Tensor:
    """How far an answer may be from `x`, element by element."""
    inexact = x.is_floating_point() or x.is_complex()
    tolerance = TOLERANCE.get(x.dtype, 1e-2) if inexact else 0.0
    anywhere = OF_LARGEST.get(x.dtype, tolerance) * largest(x) + tolerance * NOISE
    return tolerance * torch.nan_to_num(_wide(x).abs(), posinf=0.0) + anywhere


def _wide(x: Tensor) -> Tensor:
    return _plain(x).to(torch.complex128 if x.is_complex() else torch.float64)


def largest(x: Tensor) -> float:
    x = _plain(x)
    size = x.abs() if x.is_floating_point() or x.is_complex() else x.to(torch.float64).abs()
    size = size[torch.isfinite(size)]
    return float(size.max()) if size.numel() else 0.0
