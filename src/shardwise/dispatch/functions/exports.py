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

from shardwise.dispatch.functions.handlers import handles, kind_of, of_data
from shardwise.dispatch.planning.fallback import describe
from shardwise.errors import ShardMemoryError
from shardwise.tensor import DTensor


def _methods(*names: str) -> list[Any]:
    """Those that this version of torch has."""
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


def refusal(name: str, x: DTensor) -> ShardMemoryError:
    return ShardMemoryError(
        f"{describe(name, (x,), {})} would give the memory of this rank's shard for the whole tensor's; take it of "
        f"x.full_tensor(), on all ranks together, or of x.to_local() where the shard is what you mean. Files of a "
        f"sharded model are written and read by shardwise.checkpoint: save, load, save_pretrained"
    )


@handles(
    *_methods("data_ptr", "const_data_ptr", "untyped_storage", "storage", "storage_offset"),
    *(Tensor.is_set_to, Tensor.apply_, Tensor.map_, Tensor.map2_),  # the last with a function of Python, by element
)
def _address(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise refusal(func.__name__, next(x for x in args if isinstance(x, DTensor)))


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
