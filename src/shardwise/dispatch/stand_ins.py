"""Plain tensors of the global shapes, on which torch itself is asked what it says to a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.trace import flat_tensors, map_tensors
from shardwise.errors import ShardwiseError
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass

MANY = 1 << 20
"""Elements that are not worth making only to hear an error in better words."""


def meta(x: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, without data."""
    with _disabled():
        return torch.empty(_shape(x), dtype=x.dtype, device="meta")


def filled(x: Tensor, fill: Callable = torch.zeros) -> Tensor:
    """A tensor of the same shape and dtype, as much part of a graph, of zeros or ones."""
    with _disabled():
        made = fill(_shape(x), dtype=x.dtype, requires_grad=x.requires_grad)
        return made if x.is_leaf else made.clone()


def _shape(x: Tensor) -> tuple[int, ...]:
    return x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)


def torchs_own(
    error: Exception | None, func: Callable, args: tuple, kwargs: dict[str, Any], fill: Callable = torch.zeros
) -> Exception | None:
    """What torch says to such arguments on one device: kernels for meta tensors have words, and types, of their own."""
    tensors = flat_tensors((args, kwargs))
    if isinstance(error, ShardwiseError) or sum(x.numel() for x in tensors) > MANY:
        return error
    args, kwargs = (map_tensors(tree, lambda x: filled(x, fill)) for tree in (args, kwargs))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except Exception as said:
        return said.with_traceback(None)
    return error


def refused(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """What torch says to such arguments whatever the data: to zeros and to ones alike."""
    said = [torchs_own(None, func, args, kwargs, fill) for fill in (torch.zeros, torch.ones)]
    return said[0] if said[0] is not None and str(said[0]) == str(said[1]) else None
