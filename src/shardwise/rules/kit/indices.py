"""Index tensors on shards: indices out of range, and which of the others name something that is held here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import IndexRangeError
from shardwise.layout import Layout
from shardwise.rules.kit.agreement import unknown
from shardwise.rules.kit.kernels import is_traced
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Local, Value

IN_RANGE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class Bound:
    """What the indices of one tensor may be. All ranks raise for others, where torch would on some ranks only.

    `split` says that the indices are sharded, so that the ranks must reduce what they found; `own`, that torch's kernel
    gets these very indices, and checks them itself on devices where such checks are asynchronous.
    """

    allowed: range
    split: bool
    own: bool = False
    noun: str = "index"

    def is_needed(self, index: Tensor) -> bool:
        return not self.own or index.device.type in ("cpu", "meta")

    def is_seen_to_hold(self, group: Collectives, index: Tensor) -> bool:
        """Whether a look at the data says so, of which other ranks need not be told."""
        is_shown = index.device.type == "cpu" and type(index) is Tensor and not group.is_captured
        return is_shown and not self.split and is_within(index, self.allowed)

    def check(self, group: Collectives, index: Tensor) -> None:
        if index.device.type == "cpu":
            with looking():
                if self.is_seen_to_hold(group, index):
                    return
                worst = group.map(_least_outside if group.is_captured else _first_outside, index, self.allowed)
                group.verify(group.reduce(worst, "min") if self.split else worst, self._refuse)
        elif index.is_meta:
            if self.split:
                unknown(group, index)
        elif not self.own:  # asynchronously, as torch does there
            torch._assert_async(((index >= self.allowed.start) & (index < self.allowed.stop)).all())

    def check_later(self, group: Collectives, index: Tensor) -> Tensor:
        """The same, where nothing is written meanwhile, so that ranks may tell each other later what they found. The
        index that it gives is within bounds."""
        if not (self.split and index.device.type == "cpu" and group.may_wait):
            self.check(group, index)
            return index
        if is_within(index, self.allowed):
            group.tell(None, self._refuse)
            return index
        group.tell(int(_first_outside(index, self.allowed)), self._refuse)
        return index.clamp(self.allowed.start, self.allowed.stop - 1)

    def _refuse(self, found: Any) -> None:
        if int(found) != IN_RANGE:
            first, last = self.allowed.start, self.allowed.stop - 1
            raise IndexRangeError(f"{self.noun} {int(found)} is out of bounds: it must be from {first} to {last}")


def looking() -> AbstractContextManager[object]:
    """For a look at the data. A tracer is not shown it: a graph is of any data."""
    return _disable_current_modes() if is_traced() else nullcontext()


def is_within(index: Tensor, allowed: range) -> bool:
    """By a look at the data."""
    if not index.numel():
        return True
    least, most = torch.aminmax(index)
    return least.item() >= allowed.start and most.item() < allowed.stop


def _first_outside(index: Tensor, allowed: range) -> Tensor:
    if is_within(index, allowed):
        return torch.tensor(IN_RANGE)
    outside = index[(index < allowed.start) | (index >= allowed.stop)].reshape(-1)
    return outside[0].long()


def _least_outside(index: Tensor, allowed: range) -> Tensor:
    """The same without looking at data."""
    if not index.numel():
        return torch.full((), IN_RANGE, device=index.device)
    outside = (index < allowed.start) | (index >= allowed.stop)
    return torch.where(outside, index.long(), IN_RANGE).min()


def checked_call(bound: Bound, index: Layout, local: Local, argument: int) -> Local:
    """A local call, of positional arguments, after a check of one of them, which has the layout `index`."""
    return Local(_checked, [[bound], argument, local.function, *local.args], local.kwargs, (axes_of([index]),))


def checked_look_up(bound: Bound, index: Layout, local: Local, argument: int) -> Local:
    """The same of a function that writes to nothing."""
    return Local(_checked_later, [bound, argument, local.function, *local.args], local.kwargs, (axes_of([index]),))


def guarded_call(
    call: Call, step: Callable[..., Any], bounds: Sequence[Bound | None], ins: Sequence[Layout], index: Sequence[Layout]
) -> Local:
    """`step` on where the shards start and the call's arguments, after a check of the index, or the list of indices,
    which is the first argument after the tensor that is one or holds some, and has the layouts `index`."""
    at = next(at for at, arg in enumerate(call.args) if at and isinstance(arg, (Value, list, tuple)))
    args = [bounds, at + 1, step, HeldValues(ins[0].held_starts), *call.args]
    return Local(_checked, args, groups=(axes_of(index),))


def _checked(
    group: Collectives, bounds: Sequence[Bound | None], argument: int, function: Any, *args: Any, **kwargs: Any
) -> Any:
    given = args[argument]
    for index, bound in zip([given] if isinstance(given, Tensor) else given, bounds, strict=True):
        if bound is not None and index is not None:
            bound.check(group, index)
    return group.map(partial(function, **kwargs) if kwargs else function, *args)


def _checked_later(group: Collectives, bound: Bound, argument: int, function: Any, *args: Any) -> Any:
    index = bound.check_later(group, args[argument])
    return group.map(function, *args[:argument], index, *args[argument + 1 :])


def axes_of(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The axes along which some of the layouts are sharded."""
    return tuple(sorted({axis for layout in layouts for axes in layout.splits for axis in axes}))


# Shards: which indices are ours, and where


def owned(index: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Which indices fall into the `size` rows from `start`, and all of them counted from there."""
    local = index - start
    return (local >= 0) & (local < size), local


def wrapped(index: Tensor, size: int) -> Tensor:
    """Indices that may count from the end, counted from the start."""
    return torch.where(index < 0, index + size, index)


def not_empty(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Something to look up in: a row of zeros in dims of which the shard has nothing, still part of the graph."""
    return padded(x, [dim for dim in dims if not x.shape[dim]])


def padded(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The shard with one more row of zeros at the end of some dims."""
    pads = [0] * (2 * x.ndim)
    for dim in dims:
        pads[2 * (x.ndim - 1 - dim % x.ndim) + 1] = 1
    return torch.constant_pad_nd(x, pads) if dims else x


def along(index: Tensor, dim: int, ndim: int) -> Tensor:
    """A tensor as one that broadcasts along a dim, unless it has all dims already."""
    return index if index.ndim == ndim else index.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])
