"""Rolls, flips, rotations, repeats and windows: elements that move along a dim. A sharded dim exchanges its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwise.layout import Layout, intervals
from shardwise.rules.kit.dim_rebuild import Rebuilt, Run, Sizes, mirrored, rebuilding, rolled
from shardwise.rules.kit.notation import Factors, dims_but, factor_rule, moved, moved_along
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PROGRAM_COST, Call, Local, Rule, Strategy, replicated
from shardwise.rules.kit.windows import Fetch, Slide, with_halo
from shardwise.rules.shapes.views import copying

# Rolls and flips: a dim in another order, cut as it was

Orders = dict[int, tuple[Run, ...]]


def _reordered(call: Call, orders: Orders) -> list[Strategy]:
    """All dims may be sharded; those with a new order exchange pieces."""
    moving = [Strategy((d,), (d,), PROGRAM_COST * len(runs)) for d, runs in orders.items()]
    return [*moved_along(call, orders).strategies(), *moving]


def _reordered_local(call: Call, layout: Layout, orders: Orders) -> Local | None:
    if not any(layout.splits[d] for d in orders):
        return None
    steps = [Rebuilt(d, layout.pieces(d), layout.pieces(d), runs) for d, runs in orders.items()]
    return rebuilding(call.inputs[0], layout, steps)


def _flips(call: Call) -> Orders:
    x = call.inputs[0]
    return {d: mirrored(x.shape[d]) for d in (call.dims("dims") if call["dims"] and x.ndim else ())}


register(
    "flip",
    rule=Rule(
        lambda call: _reordered(call, _flips(call)),
        lambda call, ins, outs: _reordered_local(call, ins[0], _flips(call)),
    ),
)


def _rolls(call: Call) -> Orders:
    """The rolled dims; a dim that is named twice rolls twice. Without dims torch rolls the flattened tensor."""
    x, dims = call.inputs[0], call.dims("dims") if call["dims"] or call.inputs[0].ndim == 1 else ()
    shifts = dict.fromkeys(dims, 0)
    for dim, shift in zip(dims, call["shifts"], strict=False):
        shifts[dim] += shift
    return {dim: rolled(x.shape[dim], shift) for dim, shift in shifts.items()}


def _roll(call: Call) -> list[Strategy]:
    orders = _rolls(call)
    return _reordered(call, orders) if orders else moved_along(call, range(call.inputs[0].ndim)).strategies()


register("roll", rule=Rule(_roll, lambda call, ins, outs: _reordered_local(call, ins[0], _rolls(call))))


def _rot90(call: Call) -> Factors:
    """A quarter turn flips one of two dims, which must not be sharded, and swaps them; half a turn flips both."""
    (a, b), turns = call.dims("dims"), call["k"] % 4
    names = dims_but(call.inputs[0].ndim, ((), (b,), (a, b), (a,))[turns])
    out = list(names)
    if turns % 2:
        out[a], out[b] = names[b], names[a]
    return moved([names], [out])


register("rot90", rule=factor_rule(_rot90))


# Repeats: of dims that are not sharded


def _repeat(call: Call) -> Factors:
    lead = len(call["repeats"]) - call.inputs[0].ndim
    names = dims_but(call.inputs[0].ndim, [d for d, count in enumerate(call["repeats"][lead:]) if count != 1])
    return moved([names], [[*[None] * lead, *names]])


register("repeat", rule=factor_rule(_repeat))


# Windows of a dim: a window is on the rank where it starts, and its end is fetched from the ranks after


def _unfold(call: Call) -> list[Strategy]:
    x, size, step = call.inputs[0], call["size"], call["step"]
    if not x.ndim:
        return [replicated(call)]
    dim = call["dimension"] % x.ndim
    names = dims_but(x.ndim, [dim])
    found = moved([names], [[*names, None]]).strategies()
    if size:
        count = call.outputs[0].shape[dim]
        found.append(Strategy((dim,), (dim,), PROGRAM_COST, resize=lambda sizes: [_starting(sizes, step, count)]))
    return found


def _starting(sizes: Sizes, step: int, count: int) -> Sizes:
    """How many of `count` windows start in each piece."""
    return tuple(min(-(-stop // step), count) - min(-(-start // step), count) for start, stop in intervals(sizes))


def _unfold_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    dim, size, step = call["dimension"] % max(call.inputs[0].ndim, 1), call["size"], call["step"]
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    slide = Slide(step, 0, size)
    want = tuple(slide.reads(piece) for piece in outs[0].intervals(dim))
    return with_halo(_unfold_or_empty, [Fetch.of(ins[0], dim, want)], [call.inputs[0], dim, size, step])


def _unfold_or_empty(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """An empty result has strides as on other ranks: not expanded, which torch refuses to write to."""
    if x.shape[dim]:
        return x.unfold(dim, size, step)
    strides = [stride * step if d == dim else stride for d, stride in enumerate(x.stride())]
    return x.as_strided((*x.shape, size), (*strides, x.stride(dim)))


UNFOLD = register("unfold", rule=Rule(_unfold, _unfold_local))
register("unfold_copy", rule=copying(UNFOLD))
