"""From layout to layout by the cheapest path of moves, within a bound on memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count

from shardwise.comm.ring import ring_bytes
from shardwise.errors import PlacementError
from shardwise.layout import SUM, Layout, Partial, chunk_sizes
from shardwise.redistribute.cost import LATENCY, LOCAL, group_size, transition_cost
from shardwise.redistribute.transitions import TABLE, Move, Typed

Edge = tuple[tuple[int, ...], Layout]

SMALL = 16384
"""A value of this many elements may be whole on every rank: starting one more collective costs more than its memory."""


def plan_moves(source: Layout, target: Layout, varying: frozenset[int] = frozenset()) -> tuple[Move, ...]:
    """The moves from `source` to `target`, whose replicated axes in `varying` will be used as varying.

    >>> import shardwise as sw
    >>> mesh = sw.simulate((2, 2), ("dp", "tp"))
    >>> both = Layout.of(mesh, (8, 4), [sw.Shard(0), sw.Shard(0)])
    >>> [move.kind for move in plan_moves(both, Layout(mesh, (8, 4)))]
    ['all_gather']
    """
    return _planned(source.unreduced, target.unreduced, varying)


@lru_cache(maxsize=16384)
def parameter_moves(source: Layout, target: Layout, varying: frozenset[int] = frozenset()) -> tuple[Move, ...]:
    """The same for a parameter, which is gathered and then sliced where others would be exchanged. Only in order to be
    gathered along the outer of two axes that shard one dim may its pieces change places."""
    moves = plan_moves(source, target, varying)
    kinds = {move.kind for move in moves}
    if "all_to_all" not in kinds or "all_gather" in kinds:
        return moves
    cuts = zip(source.splits, target.splits, source.sizes, target.sizes, strict=True)
    leaving = tuple(axis for a, b, old, new in cuts if (a, old) != (b, new) for axis in a)
    settled = [p if p == q else None for p, q in zip(source.pending, target.pending, strict=True)]
    whole = _drop(source, leaving).with_(pending=settled)
    return (*plan_moves(source, whole), *plan_moves(whole, target, varying))


@lru_cache(maxsize=16384)
def _planned(source: Layout, target: Layout, varying: frozenset[int]) -> tuple[Move, ...]:
    _check_reachable(source, target)
    path = [] if source is target else _in_one_move(source, target) or _shortest(source, target)
    return _with_varying(source, path, varying)


def path_cost(moves: tuple[Move, ...]) -> float:
    """The summed price of some moves."""
    return sum(_price(move.source.layout, move.axes, move.target.layout, move.kind) for move in moves)


def path_bytes(moves: tuple[Move, ...], itemsize: int) -> float:
    """The bytes that every rank sends for some moves, by the ring model."""
    sent = 0.0
    for move in moves:
        if move.communicates:
            whole, ranks = _whole_elements(move.source.layout, move.axes, move.target.layout, move.kind)
            sent += ring_bytes(move.kind, whole * itemsize, ranks)
    return sent


def _check_reachable(source: Layout, target: Layout) -> None:
    if source.mesh is not target.mesh or source.shape != target.shape:
        raise PlacementError(f"cannot redistribute {source} as {target}: mesh and global shape must be the same")
    for axis, wanted in enumerate(target.pending):
        if wanted and wanted.reduce_op in ("product", "norm") and source.pending[axis] != wanted:
            raise PlacementError(f"cannot make a {wanted!r} out of {source}: only sum, avg, max and min can be made")


def _in_one_move(source: Layout, target: Layout) -> list[Edge] | None:
    """The path where all axes that differ make the same transition, and of cuts only the innermost change: one move.
    None where it takes more thought. To do it in parts would send as much, and start more collectives."""
    removed: list[int] = []
    added: list[int] = []
    nested = False
    for before, after, old, new in zip(source.splits, target.splits, source.sizes, target.sizes, strict=True):
        if before != after:
            kept = _common(before, after)
            removed += before[kept:]
            added += after[kept:]
            nested = nested or bool(kept or old or new)
        if old != new and before and after:
            return None
    pending = [axis for axis, (p, q) in enumerate(zip(source.pending, target.pending, strict=True)) if p != q]
    if not pending:
        if removed and added and (len(removed) > 1 or removed != added or nested):
            return None
        return [(tuple(removed or added), target)]
    begun = {target.pending[axis] for axis in pending}
    if begun == {None}:
        one_reduction = len({source.pending[axis] for axis in pending}) == 1
        if removed or not one_reduction or (added and sorted(added) != pending):
            return None
        return [(tuple(added or pending), target)]
    if len(pending) > 1 or source.pending[pending[0]] is not None or added or removed not in ([], pending):
        return None
    if removed and begun != {SUM}:
        return None
    return [(tuple(pending), target)]


def _shortest(source: Layout, target: Layout) -> list[Edge]:
    """Dijkstra over layouts; the bound on memory is lifted only where nothing fits under it."""
    bound = max(2 * _local_elements(source), 2 * _local_elements(target), SMALL)
    return _search(source, target, bound) or _search(source, target, math.inf) or _fail(source, target)


def _search(source: Layout, target: Layout, bound: float) -> list[Edge] | None:
    order = count()
    best = {source: 0.0, target: math.inf}
    frontier: list[tuple[float, int, Layout, tuple]] = [(0.0, next(order), source, ())]
    while frontier:
        cost, _, layout, path = heapq.heappop(frontier)
        if layout is target:
            edges: list[Edge] = []
            while path:
                path, edge = path
                edges.append(edge)
            return edges[::-1]
        if cost > best[layout] or cost + _at_least(layout, target) >= best[target]:
            continue
        for axes, after in _edges(layout, target):
            if after is not target and _local_elements(after) > bound:
                continue
            total = cost + _price(layout, axes, after)
            if total < best.get(after, math.inf) and total < best[target]:
                best[after] = total
                heapq.heappush(frontier, (total, next(order), after, (path, (axes, after))))
    return None


def _at_least(layout: Layout, goal: Layout) -> float:
    """What it costs at the least to get from a layout to another that is the goal."""
    for axis, pending in enumerate(layout.pending):
        if layout.mesh.shape[axis] == 1:
            continue
        if pending is not None:
            if goal.pending[axis] != pending:
                return LATENCY
        elif goal.pending[axis] is None:
            dim = layout.axis_dims[axis]
            if dim is not None and axis not in goal.splits[dim]:
                return LATENCY
    return LOCAL


def _fail(source: Layout, target: Layout) -> list[Edge]:
    raise AssertionError(f"no path from {source} to {target}")


def _edges(layout: Layout, goal: Layout) -> Iterator[Edge]:
    """The moves worth trying from here: those that bring some axis nearer to the goal, alone or merged."""
    yield from _reductions(layout, goal)
    yield from _gathers(layout, goal)
    yield from _exchanges(layout, goal)
    yield from _cuts(layout, goal, [a for a in range(layout.mesh.ndim) if layout.along(a) is None])
    for axis, wanted in enumerate(goal.pending):
        at = layout.along(axis)
        if wanted is None or at == wanted or _must_wait(layout, goal, wanted):
            continue
        if at is None:
            yield (axis,), _pend(layout, axis, wanted)
        elif isinstance(at, int) and wanted.reduce_op == "sum" and _minor(layout, axis):
            yield (axis,), _pend(_drop(layout, (axis,)), axis, wanted)


def _must_wait(layout: Layout, goal: Layout, wanted: Partial) -> bool:
    """Whether a reduction that does not commute with a wanted one is still to be done: the maximum of terms of a sum is
    no term of the sum of maxima."""
    to_do = [pending for axis, pending in enumerate(layout.pending) if pending and goal.pending[axis] != pending]
    return any(_addition(pending) != _addition(wanted) for pending in to_do)


def _addition(pending: Partial) -> Partial:
    """Averages are sums but for a factor."""
    return SUM if pending.reduce_op == "avg" else pending


def _reductions(layout: Layout, goal: Layout) -> Iterator[Edge]:
    waiting: dict[Partial, list[int]] = {}
    for axis, pending in enumerate(layout.pending):
        if pending is not None and goal.pending[axis] != pending:
            waiting.setdefault(pending, []).append(axis)
    for axes in waiting.values():
        to_whole = [axis for axis in axes if goal.axis_dims[axis] is None]
        for group in (*_merged_or_alone(axes), *_merged_or_alone(to_whole)[:1]):
            yield group, _settle(layout, group)
        for group, after in _cuts(layout, goal, axes):
            yield group, _settle(after, group)


def _cuts(layout: Layout, goal: Layout, axes: Sequence[int]) -> Iterator[Edge]:
    """Cut as the goal does by some axes that cut nothing yet: all at once, dim by dim, or one at a time."""
    after, merged = layout, []
    for dim, order in enumerate(goal.splits):
        groups = _merged_or_alone([axis for axis in order if axis in axes])
        for group in groups:
            yield group, _append(layout, group, dim, goal)
        if groups:
            after = _append(after, groups[0], dim, goal)
            merged.append(groups[0])
    if len(merged) > 1:
        yield tuple(axis for group in merged for axis in group), after


def _merged_or_alone(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All axes as one group, then each as its own."""
    return ([tuple(axes)] if len(axes) > 1 else []) + [(axis,) for axis in axes]


def _gathers(layout: Layout, goal: Layout) -> Iterator[Edge]:
    leaving: list[tuple[int, ...]] = []  # per dim, the innermost cuts that the goal does not make
    for dim, axes in enumerate(layout.splits):
        if axes and (axes != goal.splits[dim] or layout.sizes[dim] != goal.sizes[dim]):
            leaving.append(axes[_common(axes, goal.splits[dim]) if layout.sizes[dim] is None else 0 :])
            for keep in range(len(axes)):
                if layout.sizes[dim] is None or keep == 0:
                    yield axes[keep:], _drop(layout, axes[keep:])
    group = tuple(axis for axes in leaving for axis in axes)
    if len(leaving) > 1 and group:
        yield group, _drop(layout, group)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many outer cuts two cuts of a dim share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _exchanges(layout: Layout, goal: Layout) -> Iterator[Edge]:
    """All-to-alls: bring every sharded axis that the goal shards elsewhere to its place at once, or one at a time.

    Axes that the goal does not shard make the innermost cuts then, from where they can be gathered alone.
    """
    shared = [a for a in range(layout.mesh.ndim) if layout.axis_dims[a] is not None and goal.axis_dims[a] is not None]
    splits, sizes = [], []
    for before, order, size in zip(layout.splits, goal.splits, goal.sizes, strict=True):
        leaving = tuple(axis for axis in before if axis not in shared)
        splits.append((*(axis for axis in order if axis in shared), *leaving))
        sizes.append(size if splits[-1] == order else None)
    after = layout.with_(splits=splits, sizes=sizes)
    if after is not layout:
        yield tuple(a for a in range(layout.mesh.ndim) if _cut(layout, a) != _cut(after, a)), after
    for axis in shared:
        dim, wanted = layout.axis_dims[axis], goal.axis_dims[axis]
        if dim != wanted and _minor(layout, axis) and wanted is not None:
            yield (axis,), _append(_drop(layout, (axis,)), (axis,), wanted, goal)


def _cut(layout: Layout, axis: int) -> tuple:
    dim = layout.axis_dims[axis]
    return () if dim is None else (dim, layout.splits[dim], layout.sizes[dim])


def _minor(layout: Layout, axis: int) -> bool:
    """Whether the axis makes the innermost cut of its dim."""
    dim = layout.axis_dims[axis]
    return (
        dim is not None
        and layout.splits[dim][-1] == axis
        and (layout.sizes[dim] is None or len(layout.splits[dim]) == 1)
    )


def _settle(layout: Layout, axes: tuple[int, ...]) -> Layout:
    return layout.with_(pending=[None if axis in axes else p for axis, p in enumerate(layout.pending)])


def _pend(layout: Layout, axis: int, pending: Partial) -> Layout:
    return layout.with_(pending=[pending if a == axis else p for a, p in enumerate(layout.pending)])


def _drop(layout: Layout, axes: tuple[int, ...]) -> Layout:
    splits = [tuple(a for a in cut if a not in axes) for cut in layout.splits]
    sizes = [
        size if cut == layout.splits[d] else None
        for d, (cut, size) in enumerate(zip(splits, layout.sizes, strict=True))
    ]
    return layout.with_(splits=splits, sizes=sizes)


def _append(layout: Layout, axes: tuple[int, ...], dim: int, goal: Layout) -> Layout:
    """Cut `dim` further by `axes`, with the goal's sizes where that completes the goal's cut."""
    cut = (*layout.splits[dim], *axes)
    size = goal.sizes[dim] if cut == goal.splits[dim] and len(cut) == len(axes) else None
    if layout.sizes[dim] is not None:  # an explicit cut is refined piece by piece
        counts = tuple(layout.mesh.shape[axis] for axis in axes)
        size = tuple(part for piece in layout.pieces(dim) for part in chunk_sizes(piece, counts))
    return layout.with_(
        splits=[cut if d == dim else old for d, old in enumerate(layout.splits)],
        sizes=[size if d == dim else old for d, old in enumerate(layout.sizes)],
    )


def _local_elements(layout: Layout) -> float:
    ranks = math.prod(layout.mesh.shape[axis] for cut in layout.splits for axis in cut)
    return layout.numel / ranks


def _price(before: Layout, axes: tuple[int, ...], after: Layout, kind: str | None = None) -> float:
    kind = kind or TABLE[_type_at(before, axes[0]), _type_at(after, axes[0])]
    return transition_cost(kind, *_whole_elements(before, axes, after, kind))


def _whole_elements(before: Layout, axes: tuple[int, ...], after: Layout, kind: str) -> tuple[float, int]:
    """The elements that a rank would have were the value whole along the axes, and the ranks along them."""
    whole, ranks = max(_local_elements(before), _local_elements(after)), group_size(before.mesh, axes)
    return (whole * ranks if kind == "all_to_all" else whole), ranks


def _type_at(layout: Layout, axis: int) -> str:
    return "P" if layout.pending[axis] is not None else "R" if layout.axis_dims[axis] is None else "S"


def _with_varying(source: Layout, path: list[Edge], varying: frozenset[int]) -> tuple[Move, ...]:
    """Spread the varying axes over a path: an axis that a move makes whole is varying from there on (a gather's
    backward becomes a reduce-scatter), one that was whole all along is varying from the start."""
    made_whole = {}
    for index, (axes, after) in enumerate(path):
        for axis in varying.intersection(axes):
            if after.axis_dims[axis] is None and after.pending[axis] is None:
                made_whole[axis] = index
    current = Typed(source)
    moves = []
    from_start = varying.difference(made_whole)
    if from_start:
        start = Typed(source, from_start)
        moves.append(Move(current, start, tuple(sorted(from_start))))
        current = start
    for index, (axes, after) in enumerate(path):
        wanted = current.varying.union(a for a, i in made_whole.items() if i == index)
        mixed = wanted.intersection(axes) and not wanted.issuperset(axes)
        target = Typed(after, wanted.union(axes) if mixed else wanted)
        moves.append(Move(current, target, axes))
        current = target
        if mixed:  # one collective made several axes whole, but not all of them are used as varying
            current = Typed(after, wanted)
            moves.append(Move(target, current, tuple(axis for axis in axes if axis not in wanted)))
    return tuple(moves)
