"""Rolls, flips, rotations, repeats and windows: elements that move along a dim. A sharded dim exchanges its pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.dim_rebuild import (
    Rebuilt,
    Run,
    Sizes,
    fetch,
    groups_of,
    intervals,
    joined,
    mirrored,
    rebuild,
    rebuilding,
    rolled,
)
from shardwise.rules.kit.notation import Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import ANY_PENDING, Call, Collectives, Interval, Local, Rule, Strategy, replicated
from shardwise.rules.math.reductions import PROGRAM_COST
from shardwise.rules.shapes.views import copying

# Rolls and flips: a dim in another order, cut as it was


def _reordered(call: Call, orders: dict[int, tuple[Run, ...]]) -> list[Strategy]:
    """All dims may be sharded; those with a new order exchange pieces."""
    names = dims_of(call.inputs[0].ndim)
    free = [None if d in orders else name for d, name in enumerate(names)]
    moving = [Strategy((d,), (d,), PROGRAM_COST * len(runs)) for d, runs in orders.items()]
    return [*Factors([free], [free]).strategies(), ANY_PENDING, *moving]


def _steps(layout: Layout, orders: dict[int, tuple[Run, ...]]) -> list[Rebuilt]:
    return [Rebuilt(d, layout.pieces(d), layout.pieces(d), runs) for d, runs in orders.items()]


def _reordered_local(call: Call, layout: Layout, orders: dict[int, tuple[Run, ...]]) -> Local | None:
    if not any(layout.splits[d] for d in orders):
        return None
    return rebuilding(call.inputs[0], layout, _steps(layout, orders))


def _flips(call: Call) -> dict[int, tuple[Run, ...]]:
    x = call.inputs[0]
    return {d: mirrored(x.shape[d]) for d in (call.dims("dims") if call["dims"] and x.ndim else ())}


register(
    "flip",
    rule=Rule(
        lambda call: _reordered(call, _flips(call)),
        lambda call, ins, outs: _reordered_local(call, ins[0], _flips(call)),
    ),
)


def _rolls(call: Call) -> dict[int, tuple[Run, ...]]:
    """The rolled dims; a dim that is named twice rolls twice."""
    x, shifts = call.inputs[0], dict.fromkeys(call.dims("dims"), 0) if call["dims"] else {}
    for dim, shift in zip(call.dims("dims"), call["shifts"], strict=False):
        if dim in shifts:
            shifts[dim] += shift
    return {dim: rolled(x.shape[dim], shift) for dim, shift in shifts.items()}


def _outermost(call: Call) -> int | None:
    """The dim whose pieces are contiguous parts of the flattened tensor."""
    return next((d for d, size in enumerate(call.inputs[0].shape) if size > 1), None)


def _roll(call: Call) -> list[Strategy]:
    if call["dims"]:
        return _reordered(call, _rolls(call))
    dim = _outermost(call)
    flat = [] if dim is None else [Strategy((dim,), (dim,), 2 * PROGRAM_COST)]
    return [replicated(call), ANY_PENDING, *flat]


def _roll_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if call["dims"]:
        return _reordered_local(call, ins[0], _rolls(call))
    x, dim = call.inputs[0], _outermost(call)
    if dim is None or not ins[0].splits[dim]:
        return None
    inner = math.prod(x.shape[dim + 1 :])
    flat = tuple(size * inner for size in ins[0].pieces(dim))
    step = Rebuilt(0, flat, flat, rolled(x.numel, call["shifts"][0]))
    return Local(_roll_flat, [x, step], groups=(ins[0].splits[dim],))


def _roll_flat(group: Collectives, x: Tensor, step: Rebuilt) -> Tensor:
    if not step.is_split:
        return x.roll(step.runs[0].length)
    return rebuild(group, x.flatten(), (step,)).view_as(x)


register("roll", rule=Rule(_roll, _roll_local))


# A quarter turn is a flip and a transposition; half a turn is two flips


def _turn(call: Call) -> tuple[dict[int, tuple[Run, ...]], bool]:
    """The dims that a rotation flips, and whether it swaps them afterwards."""
    x, (a, b), turns = call.inputs[0], call.dims("dims"), call["k"] % 4
    flipped = {0: (), 1: (b,), 2: (a, b), 3: (a,)}[turns]
    return {d: mirrored(x.shape[d]) for d in flipped}, turns % 2 == 1


def _rot90(call: Call) -> list[Strategy]:
    orders, swaps = _turn(call)
    a, b = call.dims("dims")
    landing = {a: b, b: a} if swaps else {}
    moving = [
        Strategy((d,), (landing.get(d, d),), PROGRAM_COST if d in orders else 0.0) for d in range(call.inputs[0].ndim)
    ]
    return [replicated(call), ANY_PENDING, *moving]


def _rot90_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    orders, swaps = _turn(call)
    if not any(ins[0].splits[d] for d in orders):
        return None
    steps = tuple(_steps(ins[0], orders))
    swap = call.dims("dims") if swaps else None
    return Local(_rotate, [call.inputs[0], steps, swap], groups=groups_of(ins[0], steps))


def _rotate(*arguments: Any) -> Tensor:
    *groups, x, steps, swap = arguments
    x = rebuild(*groups, x, steps)
    return x if swap is None else x.transpose(*swap)


register("rot90", rule=Rule(_rot90, _rot90_local))


# Repeats: an even cut of the repeated dim, each piece fetched from one or two places


def _repeated(call: Call) -> tuple[int, list[int]]:
    """The number of new leading dims, and how often each old one is repeated."""
    repeats = list(call["repeats"])
    lead = len(repeats) - call.inputs[0].ndim
    return lead, repeats[lead:]


def _repeat(call: Call) -> list[Strategy]:
    lead, repeats = _repeated(call)
    found = [replicated(call), ANY_PENDING]
    for dim, count in enumerate(repeats):
        if count == 1:
            found.append(Strategy((dim,), (lead + dim,)))
        elif count > 1 and call.inputs[0].shape[dim]:
            found.append(Strategy((dim,), (lead + dim,), 2 * PROGRAM_COST, resize=lambda sizes: [None]))
    return found


def _repeat_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    lead, repeats = _repeated(call)
    split = [d for d, count in enumerate(repeats) if count > 1 and len(ins[0].pieces(d)) > 1]
    if not split:
        return None
    steps = tuple((d, call.inputs[0].shape[d], ins[0].pieces(d), outs[0].pieces(lead + d)) for d in split)
    rest = [*call["repeats"][:lead], *(1 if d in split else count for d, count in enumerate(repeats))]
    return Local(_repeat_split, [call.inputs[0], steps, rest], groups=tuple(ins[0].splits[d] for d in split))


def _repeat_split(*arguments: Any) -> Tensor:
    *groups, x, steps, rest = arguments
    for group, (dim, size, have, give) in zip(groups, steps, strict=True):
        x = _repeat_dim(group, x, dim, size, have, give)
    return x.repeat(rest)


def _repeat_dim(group: Collectives, x: Tensor, dim: int, size: int, have: Sizes, give: Sizes) -> Tensor:
    """A new piece shorter than the old dim is an interval of it, perhaps around its end; a longer one is all of it."""
    first: list[Interval] = []
    around: list[Interval] = []
    for start, stop in intervals(give):
        end = start % size + stop - start
        whole = stop - start >= size
        first.append((0, size) if whole else (start % size, min(end, size)))
        around.append((0, 0) if whole else (0, max(end - size, 0)))
    spans = intervals(have)
    parts = [fetch(group, x, dim, spans, first)]
    if any(stop for _, stop in around):
        parts.append(fetch(group, x, dim, spans, around))
    return group.map(_repeat_piece, joined(parts, dim), dim, size, tuple(intervals(give)), group.index())


def _repeat_piece(x: Tensor, dim: int, size: int, give: Sequence[Interval], me: int) -> Tensor:
    start, stop = give[me]
    if stop - start < size:
        return x
    return x.index_select(dim, torch.arange(start, stop, device=x.device) % size)


register("repeat", rule=Rule(_repeat, _repeat_local))


# Windows of a dim: a window lies where it starts, and its end is fetched from the ranks after


def _unfold(call: Call) -> list[Strategy]:
    x, size, step = call.inputs[0], call["size"], call["step"]
    if not x.ndim:
        return [replicated(call)]
    dim = call["dimension"] % x.ndim
    names = [None if d == dim else name for d, name in enumerate(dims_of(x.ndim))]
    found = [*Factors([names], [[*names, None]]).strategies(), ANY_PENDING]
    if size:
        last = call.outputs[0].shape[dim]
        found.append(
            Strategy((dim,), (dim,), PROGRAM_COST, resize=lambda sizes: [_windows(sizes, step, last)]),
        )
    return found


def _windows(sizes: Sizes, step: int, count: int) -> Sizes:
    """How many of `count` windows start in each piece."""
    return tuple(min(-(-stop // step), count) - min(-(-start // step), count) for start, stop in intervals(sizes))


def _unfold_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    dim = call["dimension"] % max(call.inputs[0].ndim, 1)
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    size, step = call["size"], call["step"]
    want = [
        (first * step, (last - 1) * step + size) if first < last else (0, 0)
        for first, last in intervals(outs[0].pieces(dim))
    ]
    args = [call.inputs[0], dim, size, step, tuple(intervals(ins[0].pieces(dim))), tuple(want)]
    return Local(_unfold_split, args, groups=(ins[0].splits[dim],))


def _unfold_split(
    group: Collectives, x: Tensor, dim: int, size: int, step: int, have: Sequence[Interval], want: Sequence[Interval]
) -> Tensor:
    return group.map(_unfold_or_empty, fetch(group, x, dim, have, want), dim, size, step)


def _unfold_or_empty(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """On nothing, what lies as it does on ranks that have something: not expanded, which torch refuses to write to."""
    if x.shape[dim]:
        return x.unfold(dim, size, step)
    strides = [stride * step if d == dim else stride for d, stride in enumerate(x.stride())]
    return x.as_strided((*x.shape, size), (*strides, x.stride(dim)))


UNFOLD = register("unfold", rule=Rule(_unfold, _unfold_local))
register("unfold_copy", rule=copying(UNFOLD))
