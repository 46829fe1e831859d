"""What of a tensor, or of another argument, a program depends on: everything but the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.graph.guards.values import VALUES
from shardwise.words import short_dtype

_stride = torch._C.TensorBase.stride
_size = torch._C.TensorBase.size


def kind_of(leaf: Any) -> Any:
    """What of an argument a program depends on: everything but the data of tensors."""
    if isinstance(leaf, Tensor):
        layout = leaf.__dict__.get("_layout")
        shards = shards_of(leaf)
        own = tuple([(_size(x), _stride(x)) for x in shards])
        bits = leaf.is_conj(), leaf.is_neg()
        return leaf.__class__, layout and layout.unreduced, own, leaf.dtype, leaf.device, leaf.requires_grad, bits
    if isinstance(leaf, VALUES):
        return leaf.__class__, "-0.0" if repr(leaf) == "-0.0" else leaf  # which is equal to 0.0
    return id(leaf)


def changed(name: str, before: Any, now: Any) -> str:
    return f"{name}: {before!r} is now {now!r}"


def differs(before: Any, now: Any, leaf: Any) -> str:
    """In what two kinds of an argument differ."""
    are_tensors = [isinstance(kind, tuple) and len(kind) > 2 for kind in (before, now)]
    if not all(are_tensors):
        same = not isinstance(before, tuple) and not isinstance(now, tuple)
        return f"another {type(leaf).__name__}" if same else f"{said(before)} is now {said(now)}"
    if said(before) != said(now):
        return f"{said(before)} is now {said(now)}"
    facts = ("class", "mesh", "strides", "dtype", "device", "requires_grad", "lazy bits")
    which = next(at for at, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    if which in (1, 2):
        return f"{said(now)} on another mesh" if which == 1 else f"{said(now)} with other strides"
    return changed(f"{facts[which]} of {said(now)}", before[which], now[which])


def said(kind: Any) -> str:
    """What is most important of an argument."""
    if not isinstance(kind, tuple):
        return "an object"
    if len(kind) == 2:
        return repr(kind[1])
    _, layout, own, dtype, *_ = kind
    return f"{short_dtype(dtype)}{layout or '[' + ','.join(map(str, own[0][0])) + ']'}"
