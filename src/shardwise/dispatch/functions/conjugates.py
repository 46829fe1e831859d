"""Conjugates and negatives that torch leaves for later: a bit of the tensor, which a trace on meta tensors lacks.

Every shard has it, and ops on the shards heed it. Only where a program wants it settled must every shard be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.copied_views import CopiedView
from shardwise.dispatch.functions.handlers import handles
from shardwise.tensor import DTensor, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass


@handles(Tensor.resolve_conj, torch.resolve_conj, Tensor.resolve_neg, torch.resolve_neg)
def _resolve(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    x = args[0] if args else kwargs["input"]
    if isinstance(x, CopiedView):
        return NotImplemented  # asked again by `OfCopies`, with a usual tensor
    with _disabled():
        settled = not (x.is_neg() if "neg" in func.__name__ else x.is_conj())
    return x if settled else wrap(func(localise(x)), x._layout)


@handles(torch.real, torch.imag, Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]
def _part(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of a conjugate, torch makes these of other ops than a trace shows."""
    x = args[0]
    with _disabled():
        left_for_later = x.is_conj()
    return wrap(func(localise(x)), x._layout) if left_for_later and x.__class__ is DTensor else NotImplemented
