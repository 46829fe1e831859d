"""Taking a tensor apart along one axis, and putting it together again: by `torch.split`, `torch.cat` and `sum`, so that
nothing of what is to be judged is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Partial
from shardwise.layout.sizes import chunk_sizes
from shardwise.rules import AxisPlacement


def noise(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


# Taking a tensor apart


def terms(x: Tensor, pending: Partial, num_ranks: int, seed: int = 0) -> list[Tensor] | None:
    """Terms, of varying sign, that a reduction makes `x` of; None where there are none of its dtype."""
    generator = torch.Generator().manual_seed(seed + x.numel())
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    match pending.reduce_op:
        case "sum" | "avg" if x.dtype != torch.bool and (exact or pending.reduce_op == "sum"):
            parts = [noise(x.shape, x.dtype, generator) for _ in range(num_ranks - 1)]
            total = x * num_ranks if pending.reduce_op == "avg" else x
            # What is not finite, or would lose digits, is one rank's; so the sum is exact where it matters.
            parts = [torch.where(torch.isfinite(x), part, 0).to(x.dtype) for part in parts]
            return [*parts, total - sum(parts)] if parts else [total.clone()]
        case "max" | "min" if not x.dtype.is_complex:
            owner = torch.randint(0, num_ranks, x.shape, generator=generator)
            return [
                torch.where(owner == rank, x, _beyond(x, pending.reduce_op, generator)) for rank in range(num_ranks)
            ]
        case "product" if x.dtype.is_floating_point:
            parts = [1 + torch.rand(x.shape, dtype=x.dtype, generator=generator) for _ in range(num_ranks - 1)]
            return [*parts, x / math.prod(parts)] if parts else [x.clone()]
    return None


def _beyond(x: Tensor, op: str, generator: torch.Generator) -> Tensor:
    """Values that lose against `x`."""
    if x.dtype == torch.bool:
        return torch.zeros_like(x) if op == "max" else torch.ones_like(x)
    step = torch.randint(1, 4, x.shape, generator=generator).to(x.dtype)
    if not x.is_floating_point():  # what lies at the end of the range has no room beyond it
        limits = torch.iinfo(x.dtype)
        step = torch.where((x < limits.min + 8) | (x > limits.max - 8), 0, step).to(x.dtype)
    return x - step if op == "max" else x + step


def pieces(x: Tensor, placement: AxisPlacement, num_ranks: int) -> list[Tensor] | None:
    """Every rank's part of a tensor."""
    if placement is None:
        return [x] * num_ranks
    if isinstance(placement, int):
        return list(x.split(list(chunk_sizes(x.shape[placement], (num_ranks,))), placement))
    assert isinstance(placement, Partial)  # PENDING is spelled out in trials
    return terms(x, placement, num_ranks)


# Putting it together again

DIGITS = {
    **dict.fromkeys((torch.float64, torch.complex128), 1e-7),
    **dict.fromkeys((torch.float32, torch.complex64), 1e-4),
    **dict.fromkeys((torch.float16, torch.complex32), 3e-2),
}
"""How near a result must be, by dtype: sums are taken in another order."""


def close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(actual, expected)
    digits = DIGITS.get(expected.dtype, 0.1)
    if expected.dtype in (torch.float16, torch.bfloat16, torch.complex32):  # not all of torch computes with these
        wide = torch.complex64 if expected.dtype.is_complex else torch.float32
        actual, expected = actual.to(wide), expected.to(wide)
    return torch.allclose(actual, expected, rtol=digits, atol=digits, equal_nan=True)


def recombined(parts: Sequence[Tensor], placement: AxisPlacement) -> Tensor | None:
    """The whole of which the ranks have these parts; None if they do not fit together."""
    try:
        match placement:
            case None:
                return parts[0] if all(close(part, parts[0]) for part in parts[1:]) else None
            case int():
                return torch.cat(list(parts), placement)
            case Partial(reduce_op="sum" | "avg") if parts[0].dtype == torch.bool:
                return None
            case Partial(reduce_op="sum"):
                return sum(parts[1:], parts[0])
            case Partial(reduce_op="avg"):
                return sum(parts[1:], parts[0]) / len(parts)
            case Partial(reduce_op="max"):
                return torch.stack(list(parts)).amax(0)
            case Partial(reduce_op="min"):
                return torch.stack(list(parts)).amin(0)
    except RuntimeError:
        return None
    return None


def is_whole(parts: Sequence[Tensor], placement: AxisPlacement, expected: Tensor) -> bool:
    whole = recombined(parts, placement)
    return whole is not None and close(whole, expected)
