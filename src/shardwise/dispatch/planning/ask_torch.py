"""Plain tensors of the global shapes, on which torch itself is asked what it says to a call."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.global_strides import whole_strides
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.errors import ShardwiseError
from shardwise.local import is_leaf
from shardwise.rules import Call
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass

MANY = 1 << 20
"""Elements that are not worth making only to hear an error in better words."""

FEW = 4
"""Indices of each dim that show whether torch has a kernel for a dtype, at next to no price."""

EVERYWHERE = frozenset({torch.float32, torch.float64})
"""Dtypes that all kernels take whose counterparts for meta tensors do."""

BESIDE = EVERYWHERE | {torch.int64, torch.bool}
"""What may stand behind such data, indices and masks included."""

Fill = Callable[..., Tensor]

SAME: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})
"""No dtype in place of another."""


def meta(x: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, without data."""
    with _disabled():
        return torch.empty(_shape(x), dtype=x.dtype, device="meta")


def _shape(x: Tensor) -> tuple[int, ...]:
    return x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)


# Asking


def can_be_tried(call: Call) -> bool:
    """Whether an op can be run on zeros: not those of users, which may do more than compute, and not those that swap
    the rows that pivots name without looking at them."""
    return call.op.namespace in ("aten", "shardwise") and not any(a.name in PIVOTS for a in call.op._schema.arguments)


PIVOTS = frozenset({"pivots", "LU_pivots"})


def torchs_own(error: Exception | None, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """What torch says to such arguments on one device: kernels for meta tensors have words, and types, of their own."""
    if isinstance(error, ShardwiseError) or _numel((args, kwargs)) > MANY:
        return error
    return _said(func, args, kwargs) or error


def refused(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """What torch says to such arguments whatever the data."""
    return _refused(func, args, kwargs) if _numel((args, kwargs)) <= MANY else None


def refused_dtypes(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """What torch says to the dtypes of a call, at which many kernels for meta tensors do not look. It is asked once,
    whatever the sizes. Other devices have other kernels, and a bad index ends some of them: they are not asked."""
    tensors = flat_tensors((args, kwargs))
    with _disabled():
        first, *others = [x.dtype for x in tensors]
        if (first in EVERYWHERE and BESIDE.issuperset(others)) or _elsewhere(tensors):
            return None
        kinds = repr(_stand_ins((args, kwargs), lambda x: (x.dtype, _sizes(x, FEW)), FEW))
    call = func, torch.is_autocast_enabled("cpu"), kinds
    if call in _taken:
        return None
    said = _said_of_dtypes(func, args, kwargs)
    if said is None:
        while len(_taken) >= MOST_TAKEN:
            del _taken[next(iter(_taken))]
        _taken[call] = None
    return said


_taken: dict[tuple[Callable, bool, str], None] = {}
MOST_TAKEN = 4096
"""Calls whose dtypes torch has nothing against, and how many of them are remembered."""


def _said_of_dtypes(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """A few indices of each dim are asked first, which is nearly free: what torch takes of them, it takes. What it does
    not take may only not fit together any more, so then all of it is asked. Of what is too much, as much is asked as
    can be afforded, if it still fits together."""
    if _numel((args, kwargs), FEW) > MANY or _said(func, args, kwargs, most=FEW) is None:
        return None
    most = _affordable((args, kwargs))
    if most is not None and _said(func, args, kwargs, torch.empty, most, device="meta") is not None:
        return None
    said = _refused(func, args, kwargs, most)
    return said if said is not None and _is_of_dtypes(said, func, args, kwargs, most) else None


def _is_of_dtypes(said: Exception, func: Callable, args: tuple, kwargs: dict[str, Any], most: int | None) -> bool:
    """Whether torch lacks a kernel, or would take other dtypes: there are calls that take no data that we can make."""
    if isinstance(said, NotImplementedError):
        return True
    given = {x.dtype for x in flat_tensors((args, kwargs))}
    instead = torch.float64 if torch.float64 in given else torch.float32
    floats = [dtype for dtype in given if dtype.is_floating_point or dtype.is_complex]
    good = (instead, torch.int64, instead.to_complex())
    others = [{dtype: other} for dtype in given - EVERYWHERE for other in good]
    others.append(dict.fromkeys(floats, instead))
    return any(_said(func, args, kwargs, fill, most, other) is None for other in others for fill in FILLS)


def _refused(func: Callable, args: tuple, kwargs: dict[str, Any], most: int | None = None) -> Exception | None:
    first: Exception | None = None
    for fill in FILLS:
        said = _said(func, args, kwargs, fill, most)
        if said is None or (first is not None and str(said) != str(first)):
            return None
        first = first or said
    only_here = isinstance(first, NotImplementedError) and _elsewhere(flat_tensors((args, kwargs)))
    return None if only_here else first


def _said(
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    fill: Fill = torch.zeros,
    most: int | None = None,
    dtypes: Mapping[torch.dtype, torch.dtype] = SAME,
    device: str = "cpu",
) -> Exception | None:
    """What torch says to tensors filled so, of no more than `most` indices of a dim, and of other dtypes."""

    def stand_in(x: Tensor) -> Tensor:
        return filled(x, fill, most, dtypes, device)

    args, kwargs = (_stand_ins(tree, stand_in, most) for tree in (args, kwargs))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except Exception as said:
        return said.with_traceback(None)
    return None


def _elsewhere(tensors: Sequence[Tensor]) -> bool:
    """Whether the call is not one of the CPU's."""
    with _disabled():
        return any(x.device.type != "cpu" for x in tensors)


def _numel(tree: Any, most: int | None = None) -> int:
    """How many elements stand-ins have, of no more than `most` indices of a dim."""
    return sum(math.prod(_sizes(x, most)) for x in flat_tensors(tree))


def _sizes(x: Tensor, most: int | None) -> list[int]:
    return [size if most is None else min(size, most) for size in _shape(x)]


def _affordable(tree: Any) -> int | None:
    """How many indices of each dim can be asked; None if all can."""
    if _numel(tree) <= MANY:
        return None
    most = max(size for x in flat_tensors(tree) for size in _shape(x))
    while _numel(tree, most) > MANY:
        most //= 2
    return most


# Making stand-ins


def _stand_ins(tree: Any, stand_in: Callable[[Tensor], Any], most: int | None) -> Any:
    """Arguments with stand-ins for tensors and generators, and no size among them larger than `most`."""
    if isinstance(tree, Tensor):
        return stand_in(tree)
    if isinstance(tree, (list, tuple)):
        items: Any = [_stand_ins(item, stand_in, most) for item in tree]
        if type(tree) in (list, tuple):
            return items if isinstance(tree, list) else tuple(items)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {name: _stand_ins(item, stand_in, most) for name, item in tree.items()}
    if isinstance(tree, torch.Generator):
        return tree.clone_state()
    return min(tree, most) if most is not None and type(tree) is int else tree


def filled(
    x: Tensor,
    fill: Fill = torch.zeros,
    most: int | None = None,
    dtypes: Mapping[torch.dtype, torch.dtype] = SAME,
    device: str = "cpu",
) -> Tensor:
    """A tensor of the same shape and dtype, as much part of a graph, its dims in the same order in memory; of dims with
    more indices than `most`, so many, and of other dtypes where `dtypes` says so."""
    with _disabled():
        shape = _sizes(x, most)
        order = list(range(len(shape)))
        if isinstance(x, DTensor):
            strides = whole_strides(x)
            order.sort(key=lambda dim: -strides[dim])
        made = fill(shape, dtype=dtypes.get(x.dtype, x.dtype), device=device)
        if most is None and device != "meta" and _may_be_size(x):
            made.fill_(x.item())
        if order != sorted(order):
            made = torch.empty_permuted(shape, order, dtype=made.dtype, device=device).copy_(made)
        made.requires_grad_(x.requires_grad and (made.is_floating_point() or made.is_complex()))
        return made if is_leaf(x) else made.clone()


def _may_be_size(x: Tensor) -> bool:
    """Whether a tensor is a whole number that all ranks know, which torch may read out and take for a size or a dim:
    of such a number, any other would be a lie."""
    if x.shape or x.is_meta or (isinstance(x, DTensor) and not x._layout.replicated):
        return False
    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def _unlike(shape: Sequence[int], *, dtype: torch.dtype, device: str) -> Tensor:
    """Numbers that are all unlike, of which matrices are regular; but zeros, of which indices are good, of integers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    numbers = torch.linspace(0.1, 0.9, math.prod(shape), dtype=torch.float64, device=device)
    return numbers.cos().pow(9).reshape(shape).to(dtype)


FILLS: tuple[Fill, ...] = (torch.zeros, torch.ones, _unlike)
"""What torch says to all of these it does not say of the data."""
