"""Ops that slide a window over spatial dims: which inputs each piece of the outputs reads, and how they get there.

A sharded spatial dim stays sharded. Every rank makes a piece of the outputs, for which it fetches an interval of the
inputs: its own piece and a halo. The padding at the two ends of the whole dim belongs to the ranks that read there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Interval, Local, Resize


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
    """Along one dim of the input: the pieces that the members have, and the intervals that they need."""

    dim: int
    have: tuple[Interval, ...]
    want: tuple[Interval, ...]


def intervals(layout: Layout, dim: int) -> tuple[Interval, ...]:
    """The pieces of a dim, as intervals."""
    pieces = layout.pieces(dim)
    return tuple((start, start + size) for start, size in zip(offsets(pieces), pieces, strict=True))


def inside(interval: Interval, size: int) -> Interval:
    """The part of an interval that lies in a dim of a size."""
    start = min(max(interval[0], 0), size)
    return start, min(max(interval[1], start), size)


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


def with_halo(function: Callable[..., Any], fetches: Sequence[Fetch], layout: Layout, args: Sequence[Any]) -> Local:
    """Run an ordinary local function on the shards after its first argument has been extended as `fetches` say."""
    needed = [fetch for fetch in fetches if fetch.have != fetch.want]
    if not needed:
        return Local(function, args)
    groups = tuple(layout.splits[fetch.dim] for fetch in needed)
    return Local(_WithHalo(function, needed), args, groups=groups)


class _WithHalo:
    __slots__ = ("fetches", "function")

    def __init__(self, function: Callable[..., Any], fetches: Sequence[Fetch]) -> None:
        self.function, self.fetches = function, fetches

    def __call__(self, *args: Any) -> Any:
        groups: Sequence[Collectives] = args[: len(self.fetches)]
        x, *rest = args[len(self.fetches) :]
        for group, fetch in zip(groups, self.fetches, strict=True):
            x = group.window(x, fetch.dim, fetch.have, fetch.want)
        return groups[0].map(self.function, x, *rest)


# Shards of size zero, which torch's kernels often refuse


def connected_zeros(
    like: Tensor,
    shape: Sequence[int],
    *others: Tensor | None,
    saves: bool = True,
    unsaved: Sequence[Tensor | None] = (),
) -> Tensor:
    """Zeros that depend on tensors without reading them: every rank takes part in a backward pass.

    An op that `saves` something for its gradient does so here as well. A checkpoint begins to recompute when the first
    saved tensor is asked for and stops at the last one: all ranks must do that between the same collectives. What the
    op does not save may be written to before the backward pass, and must be here.
    """
    out = like.new_zeros(shape)
    for at, x in enumerate((like, *others, *unsaved)):
        if x is not None and x.requires_grad:
            nothing = x.narrow(0, 0, 0) if x.dim() else x[None][:0]
            out = out + (saved(nothing) if saves and at <= len(others) else nothing).sum().to(out.dtype)
    return out


def saved(x: Tensor) -> Tensor:
    """Something empty that autograd saves, and refuses to see written to, as it does where there is something."""
    return x * x.detach()


def remembered(x: Tensor) -> Tensor:
    """Something empty, or zero, for which autograd saves another tensor."""
    return x * x.new_zeros(x.shape)


def unless_empty(call: Call, outs: Sequence[Layout], local: Local | None = None, *, saves: bool = True) -> Local | None:
    """A local call, by default the op itself, that is not made where its outputs are empty; `saves` says whether
    autograd saves tensors where it is made."""
    if all(math.prod(shape) for out in outs for shape in out.held_shapes):
        return local
    local = local or Local(call.op, call.args, call.kwargs)
    assert not local.groups, "a program looks after empty shards itself"
    shapes = HeldValues([tuple(out.held_shapes[rank] for out in outs) for rank in range(len(outs[0].mesh.held))])
    dtypes = tuple(value.dtype for value in call.outputs)
    return Local(_unless_empty, [local.function, shapes, dtypes, saves, *local.args], local.kwargs)


def _unless_empty(
    function: Callable, shapes: Sequence[tuple[int, ...]], dtypes: Any, saves: bool, *args: Any, **kwargs: Any
) -> Any:
    if all(map(math.prod, shapes)):
        return function(*args, **kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    results = tuple(
        connected_zeros(tensors[0], shape, *tensors[1:], saves=saves)
        if dtype.is_floating_point or dtype.is_complex
        else _zeros(tensors[0], shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return results if len(results) > 1 else results[0]


def _zeros(like: Tensor, shape: Sequence[int], dtype: Any) -> Tensor:
    return like.new_zeros(shape, dtype=dtype)
