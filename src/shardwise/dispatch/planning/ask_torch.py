"""What torch itself says to a call: on meta tensors of the global shapes, or on one device, on made-up numbers.

Errors in shapes, dtypes and numbers come from the trace, on meta tensors: as torch's own, on all ranks alike, before
anything is communicated or written. Kernels for meta tensors let some of them pass. Where nothing moves, the kernels on
the shards then raise, on all ranks alike. Elsewhere the call is tried out first: what moves would have moved in vain, a
distributed program may do what torch refuses, and a rank that holds nothing may not notice.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.global_strides import global_strides
from shardwise.dispatch.planning.lower import Lowered, LoweredCall
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.local import is_leaf
from shardwise.rules import Call, is_inexact
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass

SMALL = 1 << 16
"""Elements that are worth computing with to hear of an error before anything moves."""

LARGE = 1 << 20
"""Elements that are worth it if ranks might not raise alike."""

FEW = 4
"""Indices of each dim that tell whether there is a kernel for some dtypes."""


def shape_of(x: Tensor) -> tuple[int, ...]:
    return x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)


def meta(x: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, without data."""
    with _disabled():
        return torch.empty(shape_of(x), dtype=x.dtype, device="meta")


def only_meta_refuses(error: Exception, tensors: Sequence[Tensor]) -> bool:
    """Whether an error may come from the kernels for meta tensors, and not from the call: an op has none (in torch's
    words for its own ops and for custom ones), or a tensor is empty, and those kernels refuse more of these."""
    words = str(error) if isinstance(error, RuntimeError) else ""
    no_kernel = isinstance(error, NotImplementedError) or "meta" in words or "no fake impl registered" in words
    return no_kernel or not all(math.prod(shape_of(x)) for x in tensors)


def refuse_early(lowered: Lowered, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Try out a planned call that would communicate, or that runs otherwise on the shards."""
    if not all(map(_can_be_tried, lowered.trace.calls)):
        return
    has_empty = [layout.has_empty for call in lowered.calls for layout in call.layouts.ins]
    computed = sum(value.numel for value in lowered.trace.values)
    if any(has_empty) or (computed <= SMALL and any(map(_is_changed, lowered.calls))):
        if (refusal := refused(func, args, kwargs, most=LARGE)) is not None:
            raise refusal


def _is_changed(call: LoweredCall) -> bool:
    """Whether something is communicated for an op, or the shards run something else."""
    paths = (*call.moves, *call.out_moves)
    return any(move.communicates for path in paths for move in path) or bool(call.local and not call.local.resized)


def _can_be_tried(call: Call) -> bool:
    """Whether an op can be run on made-up numbers: not those of users, which may do more than compute."""
    known = call.op.namespace in ("aten", "shardwise")
    return known and not any(argument.name in NOT_MADE_UP for argument in call.op._schema.arguments)


NOT_MADE_UP = frozenset({"pivots", "LU_pivots", "lengths", "repeats"})
"""Arguments that must be right: rows that are swapped unlooked at, and numbers that must add up to a size."""


def refused(func: Callable, args: tuple, kwargs: dict[str, Any], *, most: int = SMALL) -> Exception | None:
    """What torch raises for such arguments whatever the data, if it does: for zeros, for ones, and for numbers that are
    all unlike. Of calls with more than `most` elements, only whether there is a kernel for their dtypes is asked; of
    those on other devices, which have other kernels, nothing."""
    tensors = flat_tensors((args, kwargs))
    if not affordable(tensors, most):
        error = _raised(func, args, kwargs, _few_zeros) if affordable(tensors, sys.maxsize) else None
        return error if isinstance(error, NotImplementedError) else None
    first: Exception | None = None
    for fill in (torch.zeros, torch.ones, _unlike):
        error = _raised(func, args, kwargs, fill)
        if error is None or (first is not None and str(error) != str(first)):
            return None
        first = first or error
    return first


def is_number(x: Tensor) -> bool:
    """Whether a tensor may be a size or the number of a dim, for which made-up numbers are wrong."""
    with _disabled():
        return not shape_of(x) and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def affordable(tensors: Sequence[Tensor], most: int = SMALL) -> bool:
    """Whether a call of these tensors, on the CPU, can be tried out for next to nothing."""
    with _disabled():
        return sum(math.prod(shape_of(x)) for x in tensors) <= most and all(x.device.type == "cpu" for x in tensors)


def _raised(func: Callable, args: tuple, kwargs: dict[str, Any], fill: Callable[..., Tensor]) -> Exception | None:
    def filled(x: Tensor) -> Tensor:
        with _disabled():  # functions, and the kernels that they choose, may depend on what needs a gradient
            made = fill(shape_of(x), dtype=x.dtype)
            strides = global_strides(x) if isinstance(x, DTensor) else x.stride()
            if made.shape == shape_of(x) and made.stride() != strides and 0 not in strides:
                made = torch.empty_strided(made.shape, strides, dtype=x.dtype).copy_(made)
            made.requires_grad_(x.requires_grad)
            return made.clone() if x.requires_grad and not is_leaf(x) else made

    generator = kwargs.get("generator")
    if generator is not None:
        kwargs = {**kwargs, "generator": generator.clone_state()}
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            func(*map_tensors(args, filled), **map_tensors(kwargs, filled))
    except Exception as error:
        return error.with_traceback(None)
    return None


def _few_zeros(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    return torch.zeros([min(size, FEW) for size in shape], dtype=dtype)


def _unlike(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Numbers that are all unlike, of which matrices are regular; but zeros, of which indices are good, of integers."""
    if not is_inexact(dtype):
        return torch.zeros(shape, dtype=dtype)
    return torch.linspace(0.1, 0.9, math.prod(shape), dtype=torch.float64).cos().pow(9).reshape(shape).to(dtype)
