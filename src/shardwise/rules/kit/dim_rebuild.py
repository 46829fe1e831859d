"""A dim rebuilt from runs of an old one: what rolls, flips and pads do to a dim, and how its pieces are exchanged.

Everything here is known when a call is planned: which piece of the old dim every rank has, and which piece of the new
one it gets. So a rank fetches exactly the intervals that its new piece is made of, one exchange per run, and none for
a run that every rank finds in its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.kit.types import Collectives, Interval, Local, Value

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A part of the new dim: `length` elements of the old one from `start` on, forwards (`step` 1), backwards (-1), or
    the same one over and over (0). Without a start it is filled with a constant."""

    length: int
    start: int | None
    step: int = 1

    def source(self, begin: int, end: int) -> Interval:
        """The interval of the old dim behind the part from `begin` to `end` of this run."""
        if begin >= end or self.start is None:
            return 0, 0
        if self.step == 0:
            return self.start, self.start + 1
        if self.step < 0:
            return self.start - end + 1, self.start - begin + 1
        return self.start + begin, self.start + end


def mirrored(size: int) -> tuple[Run, ...]:
    return (Run(size, size - 1, -1),)


def rolled(size: int, shift: int) -> tuple[Run, ...]:
    shift = shift % size if size else 0
    return Run(shift, size - shift), Run(size - shift, 0)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A dim to rebuild: the sizes of its pieces before and after, and the runs that the new one is made of."""

    dim: int
    have: Sizes
    give: Sizes
    runs: tuple[Run, ...]
    fill: Any = 0

    @property
    def is_split(self) -> bool:
        return len(self.have) > 1


def rebuilding(x: Value, layout: Layout, steps: Sequence[Rebuilt]) -> Local:
    """The program that rebuilds some dims of a call's input, which lies as `layout`."""
    return Local(rebuild, [x, tuple(steps)], groups=groups_of(layout, steps))


def groups_of(layout: Layout, steps: Sequence[Rebuilt]) -> tuple[tuple[int, ...], ...]:
    """The axes along which each step communicates: those that split its dim."""
    return tuple(layout.splits[step.dim] for step in steps if step.is_split)


def rebuild(*arguments: Any) -> Tensor:
    """`(a group for each split dim, x: S(dims), steps) -> S(dims)`: dim by dim."""
    *groups, x, steps = arguments
    left, alone = iter(groups), _Alone(groups)
    for step in steps:
        x = _rebuild_dim(next(left) if step.is_split else alone, x, step)
    return x if steps else x.clone()


def _rebuild_dim(group: Collectives | _Alone, x: Tensor, new: Rebuilt) -> Tensor:
    have, give = intervals(new.have), intervals(new.give)
    parts: list[Tensor] = []
    at = 0
    connected = False
    for run in new.runs:
        spans = [(max(begin - at, 0), min(end - at, run.length)) for begin, end in give]
        counts = tuple(max(end - begin, 0) for begin, end in spans)
        at += run.length
        if not any(counts):
            continue
        if run.start is None:
            parts.append(group.map(_filled, x, new.dim, counts, new.fill, group.index()))
            continue
        connected = True
        part = fetch(group, x, new.dim, have, [run.source(*span) for span in spans])
        if run.step < 0:
            part = part.flip(new.dim)
        elif run.step == 0:
            part = group.map(_spread, part, new.dim, counts, group.index())
        parts.append(part)
    if not connected:  # nothing of `x` is left, but it still has a gradient, and every rank takes part in backward
        parts.append(x.narrow(new.dim, 0, 0))
    return joined(parts, new.dim)  # a single part too: it may be a view of our own shard


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`cat` that keeps empty parts in the graph. Of tensors with one dim torch leaves them out, so that they have no
    second derivative, and the ranks that hold them would not take part in it."""
    if any(part.ndim != 1 for part in parts):
        return torch.cat(list(parts), dim)
    return torch.cat([part.unsqueeze(0) for part in parts], 1).squeeze(0)


def fetch(
    group: Collectives | _Alone, x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval]
) -> Tensor:
    """`S(dim) -> S(dim)`: from the intervals the ranks have to those they want; alone, if all have what they want."""
    if all(w[0] >= w[1] or (h[0] <= w[0] and w[1] <= h[1]) for h, w in zip(have, want, strict=True)):
        return group.map(_own, x, dim, tuple(have), tuple(want), group.index())
    return group.window(x, dim, have, want)


def intervals(sizes: Sequence[int]) -> list[Interval]:
    return [(start, start + size) for start, size in zip(offsets(sizes), sizes, strict=True)]


def _own(x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval], me: int) -> Tensor:
    (begin, end), start = want[me], have[me][0]
    return x.narrow(dim, begin - start, end - begin) if begin < end else x.narrow(dim, 0, 0)


def _filled(x: Tensor, dim: int, counts: Sizes, fill: Any, me: int) -> Tensor:
    return x.new_full((*x.shape[:dim], counts[me], *x.shape[dim + 1 :]), fill)


def _spread(x: Tensor, dim: int, counts: Sizes, me: int) -> Tensor:
    """One element as often as wanted; or none, where none was fetched."""
    return x.expand(*x.shape[:dim], counts[me], *x.shape[dim + 1 :])


class _Alone:
    """The group of a dim that is whole on every rank: nobody to talk to. Shapes may still differ between the ranks, by
    dims that are split, so functions run as the groups of those dims run them."""

    def __init__(self, others: Sequence[Collectives]) -> None:
        self.map: Callable[..., Any] = others[0].map if others else lambda function, *args: function(*args)

    def index(self) -> int:
        return 0

    def window(self, x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval]) -> Tensor:
        raise AssertionError(f"{want} is not within {have}, which is all there is")


# The sizes of the new pieces


def balanced(sizes: Sizes) -> Sizes | None:
    """The sizes, as long as no rank has more than twice its share; else None: cut evenly."""
    share = -(-sum(sizes) // len(sizes))
    return sizes if max(sizes) <= 2 * share else None


def grown(sizes: Sizes, before: int, after: int) -> Sizes | None:
    """Pieces of a dim that grows at its ends, or shrinks where negative: all else stays where it lies."""
    first, last = max(-before, 0), sum(sizes) - max(-after, 0)
    new = [max(min(end, last) - max(start, first), 0) for start, end in intervals(sizes)]
    new[0] += max(before, 0)
    new[-1] += max(after, 0)
    return balanced(tuple(new))
