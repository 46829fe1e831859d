"""What a function takes apart and puts together: for each part of its result, which view of which argument it is.

The function runs once, on meta tensors. A view of an argument says by its strides where its elements are. What `cat`,
`stack` and `reshape` make is no view, so these calls are noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.layout import Box

Groups = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the sizes of the dims that it is made of."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A part of a result, from `starts` on. It is a view of an argument: `offset`, `sizes` and `strides` in elements of
    its dtype. The dims of the view make up those of the part."""

    starts: tuple[int, ...]
    groups: Groups
    argument: int
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.starts, tuple(map(math.prod, self.groups))


def grouped(shape: Sequence[int], found: Sequence[int]) -> Groups | None:
    """The dims of another shape that make up each dim of a shape, in row-major order; None where they do not.

    >>> grouped((8, 3), (2, 4, 3))
    ((2, 4), (3,))
    """
    if tuple(shape) == tuple(found):
        return tuple((size,) for size in found)
    if 0 in shape or len(found) < len(shape):
        return None
    groups, left = [], list(found)
    for dim, size in enumerate(shape):
        group = [left.pop(0)]
        spare = len(shape) - dim - 1  # each dim that follows needs one
        while len(left) > spare and (math.prod(group) < size or (left[0] == 1 and not spare)):
            group.append(left.pop(0))
        if math.prod(group) != size:
            return None
        groups.append(tuple(group))
    return None if left else tuple(groups)


def recipe(result: Tensor, arguments: Sequence[Tensor], noted: Noted) -> list[Taken] | None:
    """The parts of a result, or None where it is not put together of views."""
    call = noted.calls.get(id(result))
    if call is not None and not result._version:  # it was not written to since
        return _PUT_TOGETHER[call.kind](result, call, arguments, noted)
    for number, argument in enumerate(arguments):
        if _shows(result, argument):
            sizes, offset = tuple(result.shape), int(result.storage_offset())
            each = tuple((size,) for size in sizes)
            return [Taken((0,) * len(sizes), each, number, result.dtype, offset, sizes, result.stride())]
    return None


def _shows(x: Tensor, of: Tensor) -> bool:
    """Whether a tensor is a view of another, which was not written to."""
    same = x.untyped_storage()._cdata == of.untyped_storage()._cdata
    return same and not of._version and not x.is_conj() and not x.is_neg()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that puts tensors together; the result is kept so that its identity is nobody else's."""

    kind: str
    inputs: Sequence[Tensor]
    dim: int
    result: Tensor


class Noted(TorchFunctionMode):
    """Calls that put tensors together, by the identity of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, _Call] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DATA:  # what is written to that would not be noticed
            return args[0].detach()
        result = func(*args, **kwargs)
        if func in _JOINS and "out" not in kwargs:
            inputs = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            if all(x.dtype == result.dtype and x.dim() == inputs[0].dim() for x in inputs):
                self.calls[id(result)] = _Call(_JOINS[func], tuple(inputs), dim % result.dim(), result)
        elif func in _COPIES and args and isinstance(result, Tensor) and not _shows(result, args[0]):
            self.calls[id(result)] = _Call("reshape", (args[0],), 0, result)
        return result


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_JOINS = {**dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"), torch.stack: "stack"}
_COPIES = frozenset(
    (Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous, Tensor.clone, torch.clone)
)


def _cat(result: Tensor, call: _Call, arguments: Sequence[Tensor], noted: Noted) -> list[Taken] | None:
    found, at = [], 0
    for x in call.inputs:
        parts = recipe(x, arguments, noted)
        if parts is None:
            return None
        found += [_moved(part, call.dim, at) for part in parts]
        at += x.shape[call.dim]
    return found


def _stack(result: Tensor, call: _Call, arguments: Sequence[Tensor], noted: Noted) -> list[Taken] | None:
    found = []
    for at, x in enumerate(call.inputs):
        parts = recipe(x, arguments, noted)
        if parts is None:
            return None
        found += [_moved(_with_dim(part, call.dim), call.dim, at) for part in parts]
    return found


def _reshape(result: Tensor, call: _Call, arguments: Sequence[Tensor], noted: Noted) -> list[Taken] | None:
    """Of dims put together, nothing else: what takes them apart as well is no box."""
    parts = recipe(call.inputs[0], arguments, noted)
    if parts is None or len(parts) > 1:
        return None
    (part,) = parts
    groups = grouped(result.shape, part.sizes)
    return None if groups is None else [replace(part, starts=(0,) * len(groups), groups=groups)]


_PUT_TOGETHER: dict[str, Callable[[Tensor, _Call, Sequence[Tensor], Noted], list[Taken] | None]] = {
    "cat": _cat,
    "stack": _stack,
    "reshape": _reshape,
}


def _moved(part: Taken, dim: int, ahead: int) -> Taken:
    starts = tuple(start + ahead * (at == dim) for at, start in enumerate(part.starts))
    return replace(part, starts=starts)


def _with_dim(part: Taken, dim: int) -> Taken:
    """With a dim of size 1 more."""
    at = sum(map(len, part.groups[:dim]))
    return replace(
        part,
        starts=(*part.starts[:dim], 0, *part.starts[dim:]),
        groups=(*part.groups[:dim], (1,), *part.groups[dim:]),
        sizes=(*part.sizes[:at], 1, *part.sizes[at:]),
        strides=(*part.strides[:at], 0, *part.strides[at:]),
    )
