"""Keys: what of a call its plan depends on, and nothing else."""

from __future__ import annotations

from cmath import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwise.dispatch.aliasing.copied_views import CopiedView, StaleView, renew
from shardwise.dispatch.modes import replicates_implicitly
from shardwise.local import is_parameter
from shardwise.tensor import DTensor

FINEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Between them a number is neither zero nor infinite, in whatever dtype torch computes with it."""


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by vmap or torch.func.grad


class Uncacheable(Exception):
    """An argument that cannot be part of a key: the call is planned each time."""


class PlainTensor(Exception):
    """A plain tensor, whose layout is unknown. Who knows the call says so (`interop.mixing`)."""


def key_of(value: Any) -> Any:
    """The part of a key that one argument makes: layouts of DTensors, floats by type, everything else by value."""
    cls = value.__class__
    if cls is DTensor:
        return value._layout
    if cls is float:
        return float if not value or FINEST < abs(value) < LARGEST else str(value)  # rules look for the others
    if cls is int or value is None or cls is str:
        return value
    if cls is bool:
        return (bool, value)
    if cls is list or cls is tuple or cls is torch.Size:
        for item in value:
            if item.__class__ is not int:
                break
        else:  # sizes: by far the most common
            return value if cls is tuple else tuple(value)
        if value[0].__class__ is DTensor:
            return tuple([item._layout if item.__class__ is DTensor else key_of(item) for item in value])
        return tuple([key_of(item) for item in value])
    if cls is torch.SymFloat:  # of a program that is captured
        return key_of(value.node.value if FINEST < abs(value.node.value) < LARGEST else float(value))
    if cls is slice:
        return (slice, key_of(value.start), key_of(value.stop), key_of(value.step))
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if cls is dict:
        return tuple((name, key_of(item)) for name, item in value.items())
    if isinstance(value, float):
        return key_of(float(value))  # numpy's are Python's as well
    if isinstance(value, complex):
        return cls if isfinite(value) else (cls, str(value))  # torch takes numpy's, but not as it takes Python's
    try:
        hash(value)
    except TypeError:
        raise Uncacheable from None
    return (cls, value)


def long_key(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    """The key of a call with many arguments, or with some by name."""
    parts = [func]
    for arg in args:
        kind = arg.__class__
        parts.append(arg._layout if kind is DTensor else arg if kind is int else key_of(arg))
    if kwargs:
        parts.append(tuple(kwargs))
        for arg in kwargs.values():
            kind = arg.__class__
            parts.append(arg._layout if kind is DTensor else arg if kind is int else key_of(arg))
    return tuple(parts)


def _plain_tensor(value: Tensor) -> Any:
    if isinstance(value, StaleView):
        renew(value)
    if isinstance(value, CopiedView):
        return (value.__class__, value._layout)
    shape = tuple(value.shape)
    if (shape and not replicates_implicitly()) or _is_wrapped(value):
        raise PlainTensor
    return (Tensor, shape)


def as_planned(tree: Any) -> Any:
    """Arguments as plans are made for them: numbers that vary between runs of a program have some value."""
    return tree_map_only(torch.SymFloat, lambda x: x.node.value, tree)


def variant_key(args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    """What some plans depend on beyond the key: dtypes, the values of floats, who needs a gradient, who is a
    parameter."""
    found: list[Any] = [torch.is_grad_enabled()]
    _collect(args, found)
    if kwargs:
        _collect(tuple(kwargs.values()), found)
    return tuple(found)


def _collect(values: Any, found: list[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.dtype)
            found.append(value.requires_grad)
            found.append(is_parameter(value))
        elif isinstance(value, (float, complex)):
            found.append(value if value and value == value else str(value))  # zeros by sign; NaN is NaN
        elif isinstance(value, torch.SymFloat):
            found.append(float(value))  # which it is from now on
        elif value.__class__ is list or value.__class__ is tuple:
            _collect(value, found)
