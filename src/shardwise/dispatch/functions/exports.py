"""Calls that hand out a tensor's memory: right for the whole tensor, or refused in words.

A DTensor has the memory of one shard. Whoever asks for an address goes on to read as many elements as the tensor has,
and beyond the shard; so addresses are not given at all, whatever the layout: what works on a replicated tensor would
break on a sharded one. A copy of the whole is given where nothing is expected to come back through it: numpy's arrays
are made read-only, so that a write cannot be lost unnoticed.

What asks nobody (`torch._C._to_dlpack`, extensions in C++) still gets the shard; README's Limits say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.functions.handlers import handles, kind_of, of_data, shards_of
from shardwise.dispatch.interop.mixing import mixed
from shardwise.dispatch.planning.fallback import describe
from shardwise.errors import ShardMemoryError
from shardwise.tensor import DTensor, as_layout

_disabled = torch._C.DisableTorchFunctionSubclass


def _methods(*names: str) -> list[Any]:
    """Those that this version of torch has."""
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


def refusal(name: str, x: DTensor) -> ShardMemoryError:
    return ShardMemoryError(
        f"{describe(name, (x,), {})} would give the memory of this rank's shard for the whole tensor's; take it of "
        f"x.full_tensor(), on all ranks together, or of x.to_local() where the shard is what you mean"
    )


@handles(*_methods("data_ptr", "const_data_ptr", "untyped_storage", "storage", "storage_offset"))
def _address(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise refusal(func.__name__, args[0])


@handles(Tensor.numpy, Tensor.__array__)
def _to_array(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if x.requires_grad and not kwargs.get("force"):  # torch refuses, in its own words
        return func(torch.zeros((), dtype=x.dtype, requires_grad=True), *rest, **kwargs)
    array = of_data(func, args, kwargs)
    array.flags.writeable = False
    return array


def _array(x: DTensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """What numpy asks for. torch's own knows no `copy`, by which `np.array(x)` asks for an array to write to."""
    if copy is False and torch._C._is_torch_function_enabled():
        raise refusal("__array__", x)
    array = Tensor.__array__(x, dtype)
    return array.copy() if copy else array


DTensor.__array__ = _array  # type: ignore[method-assign, assignment]


@handles(Tensor.__dlpack__)
def _to_dlpack(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A capsule says nothing of who may write, so only a copy that was asked for is given."""
    x = args[0]
    if x.requires_grad:  # torch refuses, in its own words
        return func(torch.zeros((), dtype=x.dtype, requires_grad=True), **kwargs)
    if not kwargs.get("copy"):
        raise refusal("__dlpack__", x)
    return of_data(func, args, kwargs)


@handles(Tensor.__dlpack_device__)
def _dlpack_device(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(kind_of(args[0]))


@handles(Tensor.__cuda_array_interface__.__get__)
def _cuda_array_interface(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if args[0].is_cuda:
        raise refusal("__cuda_array_interface__", args[0])
    return func(kind_of(args[0]))  # torch has none for it, in its own words


@handles(Tensor.is_set_to)
def _is_set_to(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are the same memory seen alike: on every rank, if on any."""
    x, other = args
    if not (isinstance(x, DTensor) and isinstance(other, DTensor)) or x._layout is not other._layout:
        return False
    with _disabled():
        return all(func(a, b) for a, b in zip(shards_of(x), shards_of(other), strict=True))


@handles(Tensor.apply_, Tensor.map_, Tensor.map2_)
def _by_element(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    """A function of Python, given the elements one by one: values, and so never the terms of pending ones."""
    x, *others, function = args
    if not all(isinstance(tensor, DTensor) for tensor in (x, *others)):
        raise mixed(func, args, kwargs)
    if x.requires_grad:  # torch refuses, in its own words
        return func(*(kind_of(tensor).requires_grad_() for tensor in (x, *others)), function)
    layout = x._layout.with_(pending=[None] * x._layout.mesh.ndim)
    with torch.no_grad():
        made = as_layout(x.detach().clone(), layout, "self")
        given = [as_layout(other.expand_as(x), layout, "other") for other in others]
        with _disabled():
            for shard, *parts in zip(shards_of(made), *map(shards_of, given), strict=True):
                func(shard, *parts, function)
        return x.copy_(made)
