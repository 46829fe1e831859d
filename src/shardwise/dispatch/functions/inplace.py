"""Calls in place that a plan does not know all about: changes of shape, initialisation, gradients that are zeroed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import CopiedView
from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.planning.fallback import describe
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.dispatch.refits import refits
from shardwise.errors import InPlaceError
from shardwise.redistribute import drop, unreduced
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


# Changes of shape: the shards change theirs, and the layout with them


@handles(Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.unsqueeze_)
def _reshape_in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    x, name = args[0], func.__name__
    if isinstance(x, CopiedView) and "_view_of" in x.__dict__:  # writes to it find their way there by its shape
        raise InPlaceError(
            f"{name} cannot change the shape of a view of a DTensor that had to be a copy, because its data came from "
            f"other ranks. Nothing was changed; use {name[:-1]}, which gives another view"
        )
    with torch.no_grad():
        layout = getattr(x.detach(), name[:-1])(*args[1:], **kwargs)._layout  # a view: nothing moves
    with _disabled():
        for shard in shards_of(x):
            func(shard, *args[1:], **kwargs)
        if (strides := x.__dict__.get("_strides")) is not None:  # the global ones change as well
            on_meta = torch.empty_strided(x._layout.shape, strides, device="meta")
            x.__dict__["_strides"] = func(on_meta, *args[1:], **kwargs).stride()
    x._layout = layout
    refits.count += 1
    return x


@handles(Tensor.resize_, Tensor.resize_as_, torch.resize_as_)
def _resize_in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """To the size that it has: nothing happens, whatever its strides."""
    x, *sizes = args
    wanted = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    wanted = wanted.shape if isinstance(wanted, Tensor) else wanted
    if kwargs or not isinstance(x, DTensor) or x.requires_grad or tuple(wanted) != x.shape:
        return NotImplemented
    return x


@handles(Tensor.squeeze_)
def _squeeze_in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim", range(x.ndim))
    wanted = {dim % max(x.ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    gone = [dim for dim in sorted(wanted, reverse=True) if x.ndim and x.shape[dim] == 1]
    if any(x._layout.splits[dim] for dim in gone):
        raise InPlaceError(f"{describe('squeeze_', args, kwargs)}: a dim that is sharded cannot be removed in place")
    for dim in gone:
        _reshape_in_place(func, (x, dim), {})
    return x


def _dropout_in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of one sample torch makes a batch in place, and no batch again; a view of it is one as well."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    x = given["input"]
    if not given.get("inplace") or x.ndim != _DIMS_OF_SAMPLES[func]:
        return NotImplemented
    func(**{**given, "input": x.unsqueeze(0)})
    return x


_DIMS_OF_SAMPLES = {F.dropout1d: 2, F.dropout3d: 4}
for _function in _DIMS_OF_SAMPLES:
    handles(_function)(_dropout_in_place)


# The functions of `nn.init` switch gradients off inside, where a plan would not know of it

_INSIDE: dict[Any, Callable[..., Tensor]] = {
    nn.init.uniform_: nn.init._no_grad_uniform_,
    nn.init.normal_: nn.init._no_grad_normal_,
    nn.init.constant_: nn.init._no_grad_fill_,
}
"""What the functions that ask about DTensors do otherwise, with the same arguments."""


@handles(*_INSIDE)
def _initialise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return _INSIDE[func](*_given(func, args, kwargs))


@handles(nn.init.kaiming_uniform_)
def _kaiming_uniform(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    tensor, slope, mode, nonlinearity, generator = _given(func, args, kwargs)
    if 0 in tensor.shape:
        return tensor
    gain = nn.init.calculate_gain(nonlinearity, slope)
    bound = math.sqrt(3.0) * (gain / math.sqrt(nn.init._calculate_correct_fan(tensor, mode)))
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


def _given(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


# What `no_sync` keeps of gradients that are zeroed is forgotten, as it is when they are set to None


@handles(Tensor.zero_, torch.zero_, torch._foreach_zero_)
def _zero(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if unreduced:
        zeroed = [id(x) for x in flat_tensors((args, kwargs))]
        with _disabled():
            for parameter in [parameter for found in unreduced.values() if (parameter := found()) is not None]:
                if id(_grad(parameter)) in zeroed:
                    drop(parameter)
    return NotImplemented
