"""Good calls with one thing spoilt: a number, a size, a dtype, an index. Most of them torch refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.proof.kit.samples import Sample, replaced

Spoiler = Callable[[Tensor], Tensor | None]


def spoilt(sample: Sample) -> Iterator[Sample]:
    """Calls that differ from a sample in one thing. They are numbered below zero."""
    tensors = {id(x): x for x in sample.tensors}
    for x in sample.tensors:
        for spoil in SPOILERS:
            if (image := spoil(x.detach())) is not None:
                images = {**tensors, id(x): image}
                yield Sample(-1, replaced(sample.args, images), replaced(sample.kwargs, images))
    for position, arg in enumerate(sample.args):
        for other in _other_numbers(arg):
            args = (*sample.args[:position], other, *sample.args[position + 1 :])
            yield Sample(-1, args, sample.kwargs)
    for name, arg in sample.kwargs.items():
        for other in _other_numbers(arg):
            yield Sample(-1, sample.args, {**sample.kwargs, name: other})


def _other_numbers(value: Any) -> list[Any]:
    """Integers out of any range, and words that mean nothing."""
    match value:
        case bool():
            return []
        case int():
            return [value + 100, -value - 100]
        case str():
            return ["nonsense"]
        case [int(), *_] if not isinstance(value[0], bool):
            return [type(value)([value[0] + 100, *value[1:]])] if type(value) in (list, tuple) else []
    return []


def _longer(x: Tensor) -> Tensor | None:
    """One more row."""
    return torch.cat([x, x[-1:]]) if x.dim() and x.numel() else None


def _wider(x: Tensor) -> Tensor | None:
    """One more column."""
    return torch.cat([x, x[..., -1:]], -1) if x.dim() > 1 and x.numel() else None


def _deeper(x: Tensor) -> Tensor | None:
    """More dims than anyone expects."""
    return x.expand(3, 3, 3, 3, *x.shape).contiguous() if x.numel() < 1000 else None


def _flatter(x: Tensor) -> Tensor | None:
    """No dims."""
    return x.reshape(-1)[0].clone() if x.dim() and x.numel() else None


def _of_other_numbers(x: Tensor) -> Tensor | None:
    """Where floats are expected, complex numbers; where integers, floats."""
    if x.is_complex():
        return x.real.long()
    return x.to(torch.complex128) if x.is_floating_point() else x.to(torch.float64)


def _last_too_large(x: Tensor) -> Tensor | None:
    """The last element beyond what an index may be."""
    return _with_last(x, 1000) if not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool) else None


def _last_negative(x: Tensor) -> Tensor | None:
    return _with_last(x, -100) if x.dtype.is_signed and not (x.is_floating_point() or x.is_complex()) else None


def _last_nan(x: Tensor) -> Tensor | None:
    return _with_last(x, float("nan")) if x.is_floating_point() else None


def _last_below(x: Tensor) -> Tensor | None:
    return _with_last(x, -3.0) if x.is_floating_point() else None


def _last_row_zero(x: Tensor) -> Tensor | None:
    """A last entry of a batch that is singular, or a last row without any chance."""
    return torch.cat([x[:-1], torch.zeros_like(x[-1:])]) if x.dim() and x.numel() and x.is_floating_point() else None


def _with_last(x: Tensor, value: float) -> Tensor | None:
    if not x.numel() or (x.dtype is torch.uint8 and not 0 <= value < 256) or x.dtype is torch.int8:
        return None
    flat = x.reshape(-1).clone()
    flat[-1] = value
    return flat.reshape(x.shape)


SPOILERS: tuple[Spoiler, ...] = (
    _longer,
    _wider,
    _deeper,
    _flatter,
    _of_other_numbers,
    _last_too_large,
    _last_negative,
    _last_nan,
    _last_below,
    _last_row_zero,
)
