"""Ops that slide a window over spatial dims: which inputs each piece of the outputs reads, and how they get there.

A sharded spatial dim stays sharded. Every rank makes a piece of the outputs, for which it fetches an interval of the
inputs: its own piece and a halo. The padding at the two ends of the global dim is added by the ranks that read there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.layout import Layout
from shardwise.rules.kit.types import Collectives, HeldValues, Interval, Local, Resize


def per_dim(given: Any, num_dims: int) -> list[int]:
    """An argument that torch takes per spatial dim, or once for all of them."""
    values = [given] if isinstance(given, int) else list(given)
    return values * num_dims if len(values) == 1 else values


def even_pieces(num_outputs: int, size_in: int, size_out: int) -> Resize:
    """A dim that keeps its length keeps its pieces; one that does not is cut evenly, so that results of different ops
    fit together."""

    def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...] | None]:
        return [sizes if size_in == size_out else None] * num_outputs

    return resize


@dataclass(frozen=True, slots=True)
class Slide:
    """How outputs along one dim read inputs: output i reads `span` places from `i * stride - padding` on."""

    stride: int
    padding: int
    span: int

    def reads(self, out: Interval) -> Interval:
        """What a piece of the outputs reads; it may begin before the dim and end after it."""
        start, stop = out
        if stop <= start:
            return 0, 0
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.span


@dataclass(frozen=True, slots=True)
class Fetch:
    """Along one dim of an argument: the pieces that ranks along some axes have, and the intervals that they need."""

    axes: tuple[int, ...]
    dim: int
    have: tuple[Interval, ...]
    want: tuple[Interval, ...]
    argument: int = 0

    @staticmethod
    def of(layout: Layout, dim: int, want: Sequence[Interval], argument: int = 0) -> Fetch:
        return Fetch(layout.splits[dim], dim, layout.intervals(dim), tuple(want), argument)


def inside(interval: Interval, size: int, first: int = 0) -> Interval:
    """The part of an interval that is in the `size` places from `first` on, counted from there."""
    start = min(max(interval[0] - first, 0), size)
    return start, min(max(interval[1] - first, start), size)


def indices_inside(wanted: range, piece: Interval) -> range:
    """Those of some indices that are in an interval, counted from its start."""
    before, until = (len(range(wanted.start, min(end, wanted.stop), wanted.step)) for end in piece)
    here = wanted[before:until]
    return range(here.start - piece[0], here.stop - piece[0], here.step) if here else range(0, 0, wanted.step)


def around(interval: Interval, size: int) -> tuple[int, int]:
    """How far an interval goes beyond a dim of a size, below and above."""
    start, stop = inside(interval, size)
    below = start - interval[0] if stop > start else min(max(-interval[0], 0), interval[1] - interval[0])
    return below, interval[1] - interval[0] - (stop - start) - below


def held(layout: Layout, dim: int, per_piece: Sequence[Any]) -> list[Any]:
    """Of values for each piece of a dim, those of the held ranks."""
    return [per_piece[layout.piece_index(dim, coordinate)] for coordinate in layout.mesh.held]


def by_rank(columns: Sequence[Sequence[Any]]) -> HeldValues:
    """From values per dim and held rank to one argument: for each rank, its values by dim."""
    return HeldValues([tuple(row) for row in zip(*columns, strict=True)])


def with_halo(function: Callable[..., Any], fetches: Sequence[Fetch], args: Sequence[Any]) -> Local:
    """Run an ordinary local function on the shards after its arguments have been extended as `fetches` say."""
    needed = [fetch for fetch in fetches if fetch.have != fetch.want]
    if not needed:
        return Local(function, args)
    return Local(_WithHalo(function, needed), args, groups=tuple(fetch.axes for fetch in needed))


class _WithHalo:
    __slots__ = ("fetches", "function")

    def __init__(self, function: Callable[..., Any], fetches: Sequence[Fetch]) -> None:
        self.function, self.fetches = function, fetches

    def __call__(self, *given: Any) -> Any:
        groups: Sequence[Collectives] = given[: len(self.fetches)]
        args = list(given[len(self.fetches) :])
        for group, fetch in zip(groups, self.fetches, strict=True):
            args[fetch.argument] = group.window(args[fetch.argument], fetch.dim, fetch.have, fetch.want)
        return groups[0].map(self.function, *args)
