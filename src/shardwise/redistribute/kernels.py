"""What the ranks do for each kind of move, on raw shards: no autograd, no decisions.

All of it comes from boxes. A rank's box is the part of the global tensor that its shard is; what one rank sends another
is the overlap of the box it has and the box the other wants. Uneven and empty shards are nothing special.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.port import Handle
from shardwise.comm.wire import joined
from shardwise.layout import Box, Layout, Mesh
from shardwise.redistribute.transitions import Move

_autocasting = torch._C._is_any_autocast_enabled
_size = torch._C.TensorBase.size

Slices = tuple[slice, ...]
Kernel = Callable[[Move, Sequence[Tensor]], list[Tensor]]


def run_move(move: Move, shards: Sequence[Tensor]) -> list[Tensor]:
    """The held ranks' shards after a move, from those before it."""
    kernel = KERNELS.get(move.kind)
    if kernel is None:
        return start_move(move, shards, awaited=True).wait()
    if _autocasting():  # it has opinions about joining tensors, too
        with _without_autocast(shards[0]):
            return kernel(move, shards)
    return kernel(move, shards)


def start_move(move: Move, shards: Sequence[Tensor], *, awaited: bool = False) -> Handle[list[Tensor]]:
    """The same for a move that communicates, whose result is then waited for: at once, if it is `awaited`."""
    with _without_autocast(shards[0]):
        return STARTS[move.kind](move, shards, awaited)


def _without_autocast(x: Tensor) -> Any:
    return torch.autocast(x.device.type, enabled=False) if _autocasting() and not x.is_meta else nullcontext()


def members(mesh: Mesh, axes: tuple[int, ...], coordinate: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinates of the group over `axes` that a rank belongs to, in the order ports number them."""
    found = []
    for position in product(*(range(mesh.shape[axis]) for axis in axes)):
        member = list(coordinate)
        for axis, at in zip(axes, position, strict=True):
            member[axis] = at
        found.append(tuple(member))
    return found


def _overlap(a: Box, b: Box) -> Box:
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    return starts, tuple(max(end - start, 0) for start, end in zip(starts, ends, strict=True))


def _within(inner: Box, outer: Box) -> Slices:
    """The slices that cut `inner` out of a tensor that fills `outer`."""
    return tuple(slice(x - y, x - y + n) if n else slice(0, 0) for x, n, y in zip(*inner, outer[0], strict=True))


@lru_cache(maxsize=16384)
def _own_slices(inner: Layout, outer: Layout) -> list[Slices]:
    """Per held rank: where its box in `inner` begins inside its box in `outer`."""
    return [_within(inner.box(c), outer.box(c)) for c in inner.mesh.held]


@lru_cache(maxsize=16384)
def sent(source: Layout, target: Layout, axes: tuple[int, ...]) -> list[list[Slices]]:
    """Per held rank and member: the part of our shard that the member wants."""
    plans = []
    for coordinate in source.mesh.held:
        have = source.box(coordinate)
        group = members(source.mesh, axes, coordinate)
        plans.append([_within(_overlap(have, target.box(member)), have) for member in group])
    return plans


@lru_cache(maxsize=16384)
def received(
    source: Layout, target: Layout, axes: tuple[int, ...]
) -> tuple[list[list[Slices]], list[list[tuple]], int | None]:
    """Per held rank and member: where its part goes in our new shard, and its shape; and, where the parts follow one
    another along a single dim on every rank, that dim."""
    places, shapes = [], []
    joints: set[int | None] = set()
    for coordinate in source.mesh.held:
        want = target.box(coordinate)
        parts = [_overlap(source.box(member), want) for member in members(source.mesh, axes, coordinate)]
        places.append([_within(part, want) for part in parts])
        shapes.append([part[1] for part in parts])
        joints.add(_joint(parts, want))
    return places, shapes, joints.pop() if len(joints) == 1 else None


def _joint(parts: list[Box], whole: Box) -> int | None:
    """The dim along which `parts`, in order, concatenate to `whole`, if there is one."""
    for dim in range(len(whole[0])):
        at = whole[0][dim]
        for start, size in parts:
            others = all(d == dim or (start[d], size[d]) == (whole[0][d], whole[1][d]) for d in range(len(whole[0])))
            if not others or start[dim] != at:
                break
            at += size[dim]
        else:
            if at == whole[0][dim] + whole[1][dim]:
                return dim
    return None


def _outgoing(move: Move, shards: Sequence[Tensor]) -> list[list[Tensor]]:
    cuts = sent(move.source.layout, move.target.layout, move.axes)
    return [[x[cut] for cut in row] for x, row in zip(shards, cuts, strict=True)]


def _assemble(move: Move, chunks: list[list[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
    source, target = move.source.layout, move.target.layout
    places, _, joint = received(source, target, move.axes)
    if joint is not None:
        return [joined(row, joint) for row in chunks]
    out = [x.new_empty(shape) for x, shape in zip(like, target.held_shapes, strict=True)]
    for new, row, where in zip(out, chunks, places, strict=True):
        for chunk, place in zip(row, where, strict=True):
            new[place] = chunk
    return out


def _nothing(move: Move, shards: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() for x in shards]


def _slice(move: Move, shards: Sequence[Tensor]) -> list[Tensor]:
    where = _own_slices(move.target.layout, move.source.layout)
    return [x[place].clone(memory_format=torch.contiguous_format) for x, place in zip(shards, where, strict=True)]


def _mask(move: Move, shards: Sequence[Tensor]) -> list[Tensor]:
    """Alike on all ranks: torch sums the gradient of a bias that is not contiguous in another order."""
    held = move.source.layout.mesh.held
    return [
        x.new_zeros(_size(x)) if any(at[axis] for axis in move.axes) else x.detach().contiguous()
        for x, at in zip(shards, held, strict=True)
    ]


def _pad(move: Move, shards: Sequence[Tensor]) -> list[Tensor]:
    where = _own_slices(move.source.layout, move.target.layout)
    out = []
    for x, place, shape in zip(shards, where, move.target.layout.held_shapes, strict=True):
        new = x.new_zeros(shape)
        new[place] = x
        out.append(new)
    return out


def run_exchanges(moves: Sequence[Move], shards: Sequence[Tensor]) -> list[Tensor]:
    """All-to-alls of several values over the same axes, as one. The held ranks' shards of the first value come first,
    then those of the next."""
    mesh, axes = moves[0].source.layout.mesh, moves[0].axes
    values = [shards[i : i + len(mesh.held)] for i in range(0, len(shards), len(mesh.held))]
    shapes = [received(move.source.layout, move.target.layout, axes)[1] for move in moves]
    with _without_autocast(shards[0]):
        by_value = [_outgoing(move, x) for move, x in zip(moves, values, strict=True)]
        chunks = [[torch.cat([x.flatten() for x in to]) for to in zip(*rank)] for rank in zip(*by_value)]
        numels = [[[math.prod(shape) for shape in by] for by in zip(*rank)] for rank in zip(*shapes)]
        rows = mesh.port.all_to_all(chunks, mesh, axes, [[(sum(by),) for by in rank] for rank in numels])
        parts = [[x.split(by) for x, by in zip(*pair, strict=True)] for pair in zip(rows, numels, strict=True)]
        found: list[Tensor] = []
        for i, (move, x, ranks) in enumerate(zip(moves, values, shapes, strict=True)):
            own = [[by[i].view(shape) for by, shape in zip(*pair, strict=True)] for pair in zip(parts, ranks)]
            found += _assemble(move, own, x)
        return found


# Collectives: started, and put together when they are waited for


def _all_reduce(move: Move, shards: Sequence[Tensor], awaited: bool) -> Handle[list[Tensor]]:
    mesh = move.source.layout.mesh
    return mesh.port.start_all_reduce(shards, mesh, move.axes, move.wire_op, awaited=awaited)


def _all_gather(move: Move, shards: Sequence[Tensor], awaited: bool) -> Handle[list[Tensor]]:
    source = move.source.layout
    shapes = received(source, move.target.layout, move.axes)[1]
    rows = source.mesh.port.start_all_gather(shards, source.mesh, move.axes, shapes, awaited=awaited)
    return _assembled(move, rows, shards)


def _reduce_scatter(move: Move, shards: Sequence[Tensor], awaited: bool) -> Handle[list[Tensor]]:
    source, chunks = move.source.layout, _outgoing(move, shards)
    return source.mesh.port.start_reduce_scatter(chunks, source.mesh, move.axes, move.wire_op, awaited=awaited)


def _all_to_all(move: Move, shards: Sequence[Tensor], awaited: bool) -> Handle[list[Tensor]]:
    source, chunks = move.source.layout, _outgoing(move, shards)
    shapes = received(source, move.target.layout, move.axes)[1]
    rows = source.mesh.port.start_all_to_all(chunks, source.mesh, move.axes, shapes, awaited=awaited)
    return _assembled(move, rows, shards)


def _assembled(move: Move, rows: Handle[list[list[Tensor]]], shards: Sequence[Tensor]) -> Handle[list[Tensor]]:
    def finish() -> list[Tensor]:
        with _without_autocast(shards[0]):
            return _assemble(move, rows.wait(), shards)

    return Handle(finish)


STARTS: dict[str, Callable[[Move, Sequence[Tensor], bool], Handle[list[Tensor]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}

KERNELS: dict[str, Kernel] = {"nothing": _nothing, "slice": _slice, "mask": _mask, "pad": _pad}
"""What each rank does by itself."""
