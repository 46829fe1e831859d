"""Index tensors on shards: indices out of range, and which of the others name something that is held here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.agreement import unknown
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Local
from shardwise.rules.math.reductions import LAST

# Out-of-range indices: refused by all ranks alike, in torch's words


@dataclass(frozen=True, slots=True)
class Bound:
    """The range of one index tensor. `refuse` makes a small call that torch refuses for the same reason as ours.

    `split` says that ranks hold different parts of the indices, and must ask each other; `own`, that a kernel of torch
    will look these very indices up among all there is: where nobody waits for the check, it makes it itself.
    """

    low: int
    size: int
    split: bool
    refuse: Callable[[int], Any]
    own: bool = False

    def is_needed(self, index: Tensor) -> bool:
        return not self.own or index.device.type in ("cpu", "meta")

    def check(self, group: Collectives, index: Tensor) -> None:
        if index.device.type == "cpu":
            worst = group.map(_first_outside, index, self.low, self.size)
            found = int(group.reduce(worst, "min") if self.split else worst)
            if found != LAST:
                self.refuse(found)
                raise IndexError(f"index {found} is out of bounds for dimension with size {self.size}")
        elif index.is_meta:
            if self.split:
                unknown(group, index)
        elif not self.own:  # without waiting for it, as torch does there
            torch._assert_async(((index >= self.low) & (index < self.size)).all())


def _first_outside(index: Tensor, low: int, size: int) -> Tensor:
    outside = index[(index < low) | (index >= size)].reshape(-1)
    return outside[0].long() if outside.numel() else torch.tensor(LAST)


def guarded(group: Collectives, step: Callable[..., Any], bounds: Sequence[Bound | None], *args: Any) -> Any:
    """Run an ordinary local function if all indices are in range. `args` are: where the shard starts, the shard, and
    the op's other arguments, of which the index, or the list of them, is the first that is or holds a tensor."""
    for index, bound in zip(_indices(args[2:]), bounds, strict=True):
        if bound is not None and index is not None:
            bound.check(group, index)
    return group.map(step, *args)


def _indices(args: Sequence[Any]) -> Sequence[Any]:
    held = next(arg for arg in args if isinstance(arg, (Tensor, list)))
    return [held] if isinstance(held, Tensor) else held


def guarded_call(
    call: Call, step: Callable[..., Any], bounds: Sequence[Bound | None], ins: Sequence[Layout], axes: set[int]
) -> Local:
    """`step` on the shards, behind a check in which the ranks along `axes`, those that split the indices, confer."""
    starts = HeldValues(ins[0].held_starts)
    return Local(guarded, [step, bounds, starts, *call.args], groups=(tuple(sorted(axes)),))


def axes_of(layouts: Sequence[Layout]) -> set[int]:
    return {axis for layout in layouts for axes in layout.splits for axis in axes}


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
    for dim in dims:
        if not x.shape[dim]:
            x = padded(x, [dim])
    return x


def padded(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The shard with one more row of zeros at the end of some dims."""
    pads = [0] * (2 * x.ndim)
    for dim in dims:
        pads[2 * (x.ndim - 1 - dim) + 1] = 1
    return torch.constant_pad_nd(x, pads)


def along(index: Tensor, dim: int, ndim: int) -> Tensor:
    """A 1-d (or 0-d) tensor as one that broadcasts along a dim."""
    return index.reshape([-1 if d == dim else 1 for d in range(ndim)])
