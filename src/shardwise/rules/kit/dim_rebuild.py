"""A dim rebuilt from runs of an old one: what rolls, flips and pads do to a dim, and how its pieces move.

Everything here is known when a call is planned: which piece of the old dim every rank has, and which piece of the new
one it gets. So a rank fetches exactly the intervals that its new piece is made of, one exchange per run, and none for
a run that every rank finds in its own shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, intervals
from shardwise.rules.kit.types import Collectives, Interval, Local, Value
from shardwise.rules.kit.windows import inside

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


def rebuilding(x: Value, layout: Layout, steps: Sequence[Rebuilt]) -> Local:
    """The program that rebuilds some dims of a call's input, which has `layout`."""
    return Local(rebuild, [x, tuple(steps)], groups=tuple(layout.splits[step.dim] for step in steps))


def rebuild(*arguments: Any) -> Tensor:
    """`(a group for each step, x: S(dims), steps) -> S(dims)`: dim by dim."""
    *groups, x, steps = arguments
    for group, step in zip(groups, steps, strict=True):
        x = _rebuild_dim(group, x, step)
    return x if steps else x.clone()


def _rebuild_dim(group: Collectives, x: Tensor, new: Rebuilt) -> Tensor:
    have, parts, at, connected = intervals(new.have), [], 0, False
    for run in new.runs:
        spans = [inside(piece, run.length, at) for piece in intervals(new.give)]
        counts = tuple(end - begin for begin, end in spans)
        at += run.length
        if not any(counts):
            continue
        if run.start is None:
            parts.append(group.map(_filled, x, new.dim, counts, new.fill, group.index()))
            continue
        connected = True
        part = group.window(x, new.dim, have, [run.source(*span) for span in spans])
        if run.step < 0:
            part = part.flip(new.dim)
        elif run.step == 0:
            part = group.map(_repeated, part, new.dim, counts, group.index())
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


def _filled(x: Tensor, dim: int, counts: Sizes, fill: Any, me: int) -> Tensor:
    return x.new_full((*x.shape[:dim], counts[me], *x.shape[dim + 1 :]), fill)


def _repeated(x: Tensor, dim: int, counts: Sizes, me: int) -> Tensor:
    """One element as often as wanted; or none, where none was fetched."""
    return x.expand(*x.shape[:dim], counts[me], *x.shape[dim + 1 :])


def grown(sizes: Sizes, before: int, after: int) -> Sizes | None:
    """The pieces of a dim that grows at its ends, or shrinks where negative: all else stays on its rank. None, for an
    even cut, where that would leave a rank with more than twice its share."""
    first, last = max(-before, 0), sum(sizes) - max(-after, 0)
    kept = [inside(piece, max(last - first, 0), first) for piece in intervals(sizes)]
    new = [stop - start for start, stop in kept]
    new[0] += max(before, 0)
    new[-1] += max(after, 0)
    share = -(-sum(new) // len(new))
    return tuple(new) if max(new) <= 2 * share else None
