"""What a function takes apart and puts together: for each part of its result, which view of which argument it is.

The function runs once, on meta tensors. A view of an argument says by its strides where its elements are. What `cat`,
`stack` and `reshape` make is no view, so these calls are noted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.layout import Box

MOST_RUNS = 2**12
"""What lies in more runs than these is computed: each is read by itself."""

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


def recipe(result: Tensor, noted: Noted) -> list[Taken] | None:
    """The parts of a result, or None where it is not put together of views."""
    call = noted.calls.get(id(result))
    if call is not None and not result._version:  # it was not written to since
        return _PUT_TOGETHER[call.kind](result, call, noted)
    number, argument = noted.arguments.get(result.untyped_storage()._cdata, (0, None))
    if argument is None or not _shows(result, argument):
        return None
    sizes, offset = tuple(result.shape), int(result.storage_offset())
    each = tuple((size,) for size in sizes)
    return [Taken((0,) * len(sizes), each, number, result.dtype, offset, sizes, result.stride())]


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
    """Calls that put tensors together, by the identity of their result; and the arguments, by their storage's."""

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: dict[int, _Call] = {}
        self.arguments = {x.untyped_storage()._cdata: (number, x) for number, x in enumerate(arguments)}

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
        elif func in _COPIES and args and self._is_another(result, args[0]):
            self.calls[id(result)] = _Call("reshape", (args[0],), 0, result)
        return result

    def _is_another(self, result: Tensor, x: Tensor) -> bool:
        """Not a view of an argument, which says by itself where its elements are."""
        is_new = id(x) in self.calls or not _shows(result, x)
        return is_new and result is not x and result.dtype == x.dtype


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_JOINS = {**dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"), torch.stack: "stack"}
_COPIES = frozenset(
    (
        Tensor.reshape,
        torch.reshape,
        Tensor.view,
        Tensor.flatten,
        torch.flatten,
        Tensor.contiguous,
        Tensor.clone,
        torch.clone,
    )
)


def _cat(result: Tensor, call: _Call, noted: Noted) -> list[Taken] | None:
    found, at = [], 0
    for x in call.inputs:
        parts = recipe(x, noted)
        if parts is None:
            return None
        found += [_moved(part, call.dim, at) for part in parts]
        at += x.shape[call.dim]
    return found


def _stack(result: Tensor, call: _Call, noted: Noted) -> list[Taken] | None:
    found = []
    for at, x in enumerate(call.inputs):
        parts = recipe(x, noted)
        if parts is None:
            return None
        found += [_moved(_with_dim(part, call.dim), call.dim, at) for part in parts]
    return found


def _reshape(result: Tensor, call: _Call, noted: Noted) -> list[Taken] | None:
    """Of dims put together, nothing else: what takes them apart as well is no box."""
    parts = recipe(call.inputs[0], noted)
    if parts is None:
        return None
    if len(parts) > 1:
        return _reshaped(parts, grouped(result.shape, call.inputs[0].shape))
    (part,) = parts
    groups = grouped(result.shape, part.sizes)
    return None if groups is None else [replace(part, starts=(0,) * len(groups), groups=groups)]


def _reshaped(parts: Sequence[Taken], groups: Groups | None) -> list[Taken] | None:
    """Several parts, whose dims are put together by groups: heads of three weights by turns, say."""
    if groups is None:
        return None
    runs = (_put_together(run, groups) for part in parts for run in _runs(part, groups))
    found = list(itertools.islice(runs, MOST_RUNS + 1))
    if len(found) > MOST_RUNS or (len(found) > len(parts) and not all(map(_is_dense, found))):
        return None
    return found


def _is_dense(part: Taken) -> bool:
    """Whether elements lie one beside another: of a part with gaps each would be read by itself."""
    return min((stride for size, stride in zip(part.sizes, part.strides, strict=True) if size > 1), default=1) == 1


def _runs(part: Taken, groups: Groups) -> Iterator[Taken]:
    """A part in parts of which each is one stretch of every dim that a group makes up."""
    extents, at = part.box[1], 0
    for group in groups:
        dims = range(at, at + len(group))
        first = next((dim for dim in dims if extents[dim] > 1), dims[-1])
        if any(extents[dim] < size for dim, size in zip(dims, group, strict=True) if dim > first):
            for index in range(extents[first]):
                yield from _runs(_at(part, first, index), groups)
            return
        at += len(group)
    yield part


def _at(part: Taken, dim: int, index: int) -> Taken:
    """Its one index of a dim."""
    first, group = sum(map(len, part.groups[:dim])), part.groups[dim]
    ahead, left = 0, index
    for number in reversed(range(len(group))):
        left, digit = divmod(left, group[number])
        ahead += digit * part.strides[first + number]
    ones = (1,) * len(group)
    return replace(
        part,
        starts=(*part.starts[:dim], part.starts[dim] + index, *part.starts[dim + 1 :]),
        groups=(*part.groups[:dim], ones, *part.groups[dim + 1 :]),
        offset=part.offset + ahead,
        sizes=(*part.sizes[:first], *ones, *part.sizes[first + len(group) :]),
    )


def _put_together(part: Taken, groups: Groups) -> Taken:
    starts, made, at = [], [], 0
    for group in groups:
        start = 0
        for dim, size in enumerate(group, at):
            start = start * size + part.starts[dim]
        starts.append(start)
        made.append(sum(part.groups[at : at + len(group)], ()))
        at += len(group)
    return replace(part, starts=tuple(starts), groups=tuple(made))


_PUT_TOGETHER: dict[str, Callable[[Tensor, _Call, Noted], list[Taken] | None]] = {
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
