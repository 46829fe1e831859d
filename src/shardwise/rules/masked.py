"""masked_scatter: the places of a mask, filled with the elements of a source in order.

Which elements a rank needs it knows when the ranks have told each other how many places they have. In the order of the
whole a shard is made of runs: for every index of the dims before the innermost dim that is split, one. So a table of
the lengths of all runs, a few bytes, says where each begins in the source. If the source is whole, a rank looks its
elements up. If it is split along its outermost dim, each run is an interval of it, and a rank fetches its intervals.

Where the source ends with the same dims as the target, and the mask does not change along these, places are whole rows
of the source, and all of this is about rows: their columns may then be sharded, of both alike. A mask that was expanded
before the call does not show that it does not change; then the ranks look, and gather the source if it does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.indices import padded
from shardwise.rules.pointwise import broadcast
from shardwise.rules.reductions import PROGRAM_COST
from shardwise.rules.registry import register
from shardwise.rules.runs import fetch, joined
from shardwise.rules.types import (
    PENDING,
    Call,
    Collectives,
    HeldValues,
    Interval,
    Local,
    Rule,
    Strategy,
    replicated,
)

MOST_FETCHES = 16
"""A rank with more runs than these fetches all from its first to its last at once."""

MOST_RUNS = 4096
"""More of them, for each piece of a dim, are not looked at one by one in Python."""

RUN_COST = 64.0
"""What it costs to tell the lengths of a run's parts."""

FETCH_COST = 20_000.0
"""What it costs to fetch, and 500 more for every run: less than to gather, but not so little that a target would be cut
for it that is not."""


# Ways


def _outermost(shape: Sequence[int]) -> int:
    return next((dim for dim, size in enumerate(shape) if size != 1), 0)


def _columns(call: Call) -> tuple[int, bool]:
    """With how many dims of the target the source ends, too, along which the mask does not change; and whether that is
    plain to see. The outermost dim of the source is none of them."""
    x, mask, source = call.inputs
    if not x.numel:
        return 0, True
    most = source.ndim - 1 - _outermost(source.shape)
    same = _count_trailing(a == b for a, b in zip(x.shape[::-1], source.shape[::-1], strict=False))
    still = _count_trailing(size == 1 for size in (*mask.shape[::-1], *[1] * (x.ndim - mask.ndim)))
    same = max(min(same, most), 0)
    return (min(same, still), True) if still else (same, False)


def _count_trailing(holds: Any) -> int:
    return sum(1 for _ in itertools.takewhile(bool, holds))


def _ways(call: Call) -> list[Strategy]:
    x, mask, source = call.inputs
    found = [replicated(call), Strategy((PENDING, None, PENDING), (PENDING,))]
    if x.shape != call.outputs[0].shape:
        return found
    outer = _outermost(source.shape)
    columns, is_plain = _columns(call)
    num_rows = math.prod(x.shape[: x.ndim - columns])
    carried = broadcast(mask.shape, x.shape)
    for dim in range(x.ndim):
        own = carried.index(dim) if dim in carried else None
        runs = math.prod(x.shape[:dim])
        found.append(Strategy((dim, None, None), (dim,)))
        telling = PROGRAM_COST + RUN_COST * runs
        from_end = x.ndim - dim
        if own is not None and not (is_plain and from_end <= columns):
            found.append(Strategy((dim, own, None), (dim,), telling))
        if from_end > columns:
            if source.ndim and runs <= MOST_RUNS:
                moved = min(source.numel, x.numel)
                fetching = telling + FETCH_COST + 500 * min(runs, MOST_FETCHES) + moved
                found += [Strategy((dim, at, outer), (dim,), fetching) for at in dict.fromkeys((own, None))]
        elif is_plain:
            found.append(Strategy((dim, None, source.ndim - from_end), (dim,)))
        else:
            looking = PROGRAM_COST + RUN_COST * num_rows
            found.append(Strategy((dim, own, source.ndim - from_end), (dim,), looking))
            found.append(Strategy((dim, None, source.ndim - from_end), (dim,), PROGRAM_COST))
    return found


# What is known before


@dataclass(frozen=True, slots=True)
class _Units:
    """Places are elements, or rows that go through some `columns`: trailing dims of target and source. All else is
    counted in them."""

    columns: int
    num_rows: int  # of the source
    table: tuple[int, ...]  # the runs of the mask's shards
    fetched: _Fetched | None


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A source that is split along its outermost dim, and the target along some dims: the runs of the target's shards,
    which member of the group has each, and which rows of the source each member has to give."""

    table: tuple[int, ...]
    owners: tuple[int, ...]
    have: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class _Here:
    """The same on one rank: how much of the mask it sees, and its runs' place in the table; where its part of the
    target begins there, and its runs' place in the other table; which of its rows of the source it has to give, where
    others have the same; and its columns, where the source has all of them."""

    seen: tuple[int, ...]
    run: tuple[Any, ...]
    begin: tuple[int, ...]
    own_run: tuple[Any, ...]
    gives: Interval
    columns: tuple[Interval | None, ...]


def _split_dims(layout: Layout, count: int) -> list[int]:
    return [dim for dim in range(count) if layout.splits[dim]]


def _axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for dim in dims for axis in layout.splits[dim])


def _units(call: Call, ins: Sequence[Layout], columns: int) -> tuple[_Units, HeldValues]:
    x, _, source = call.inputs
    target, look, given = ins
    ndim = x.ndim - columns
    lead = len(x.shape) - len(look.shape)
    cut = _split_dims(target, ndim)
    seen = [dim for dim in cut if dim >= lead and look.splits[dim - lead]]
    outer = _outermost(source.shape)
    inner = math.prod(source.shape[outer + 1 : source.ndim - columns])
    fetched = _fetching(target, given, cut, outer, inner) if source.ndim and given.splits[outer] else None
    here = []
    for coordinate in target.mesh.held:
        start, extent = target.box(coordinate)
        gives = (0, 0)
        if fetched:
            first = given.box(coordinate)[0][outer] * inner
            begin, end = fetched.have[_member(target, _axes(target, cut), coordinate)]
            gives = begin - first, end - first
        here.append(
            _Here(
                tuple(extent[dim] if dim in seen else x.shape[dim] for dim in range(ndim)),
                _place_of_runs(target, seen, coordinate),
                tuple(0 if dim in seen else start[dim] for dim in range(ndim)),
                _place_of_runs(target, cut, coordinate),
                gives,
                tuple(
                    None if given.splits[dim - x.ndim] else (start[dim], start[dim] + extent[dim])
                    for dim in range(ndim, x.ndim)
                ),
            )
        )
    rows = math.prod(source.shape[: source.ndim - columns])
    return _Units(columns, rows, _table_of_runs(target, seen), fetched), HeldValues(here)


def _table_of_runs(layout: Layout, cut: Sequence[int]) -> tuple[int, ...]:
    """A run for every index of the dims before the innermost that is split, and every piece of that."""
    return (*layout.shape[: cut[-1]], len(layout.pieces(cut[-1]))) if cut else (1,)


def _place_of_runs(layout: Layout, cut: Sequence[int], coordinate: Sequence[int]) -> tuple[Any, ...]:
    if not cut:
        return (0,)
    start, extent = layout.box(coordinate)
    before = (
        slice(start[dim], start[dim] + extent[dim]) if dim in cut else slice(0, layout.shape[dim])
        for dim in range(cut[-1])
    )
    return (*before, layout.piece_index(cut[-1], coordinate))


def _member(layout: Layout, axes: Sequence[int], coordinate: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * layout.mesh.shape[axis] + coordinate[axis]
    return number


def _fetching(target: Layout, given: Layout, cut: Sequence[int], outer: int, inner: int) -> _Fetched:
    """Members that have the same rows of the source, along axes that do not split it, give a part of them each."""
    axes = _axes(target, cut)
    others = [axis for axis in axes if axis not in given.splits[outer]]
    num_others = math.prod(target.mesh.shape[axis] for axis in others)
    sizes = given.pieces(outer)
    starts = offsets(sizes)
    owners = torch.zeros(_table_of_runs(target, cut), dtype=torch.long)
    have = []
    for member, at in enumerate(itertools.product(*(range(target.mesh.shape[axis]) for axis in axes))):
        coordinate = [0] * target.mesh.ndim
        for axis, index in zip(axes, at, strict=True):
            coordinate[axis] = index
        owners[_place_of_runs(target, cut, coordinate)] = member
        piece = given.piece_index(outer, coordinate)
        start, size, part = starts[piece] * inner, sizes[piece] * inner, _member(target, others, coordinate)
        have.append((start + size * part // num_others, start + size * (part + 1) // num_others))
    return _Fetched(tuple(owners.shape), tuple(owners.flatten().tolist()), tuple(have))


def _local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, mask, source = call.inputs
    target, look, given = ins
    if not any(target.splits) and not any(given.splits):
        return None
    columns, is_plain = _columns(call)
    split = [dim for dim in range(source.ndim) if given.splits[dim]]
    must_look = not is_plain and any(dim >= source.ndim - columns for dim in split)
    if not is_plain and not must_look:
        columns = 0
    rows, here = _units(call, ins, columns)
    args = [x, mask, source, rows, here, bool(call.mutated)]
    lead = max(mask.ndim - columns, 0)
    groups = [_axes(look, range(lead)), _axes(target, range(x.ndim - columns))]
    if not must_look:
        return Local(_fill_rows, args, groups=tuple(groups))
    whole = Layout(given.mesh, given.shape, None, given.pending)
    elements, here_too = _units(call, [target, look, whole], 0)
    gathered = [(dim, given.pieces(dim)) for dim in split]
    groups += [_axes(look, range(lead, mask.ndim)), _axes(look, range(mask.ndim))]
    groups += [given.splits[dim] for dim in split]
    width = math.prod(x.shape[x.ndim - columns :])
    return Local(_fill_rows_or_elements, [*args, elements, here_too, width, gathered], groups=tuple(groups))


# Programs


def _fill_rows_or_elements(
    lead: Collectives, spread: Collectives, across: Collectives, seen: Collectives, *rest: Any
) -> Tensor:
    """The mask shows only now whether it changes along the columns, which are split. If so, the source is gathered."""
    *groups, x, mask, source, rows, here, in_place, elements, here_too, width, gathered = rest
    counts = across.reduce(lead.map(_count_columns, mask, here_too, rows.columns), "sum")
    changes = seen.reduce(((counts != 0) & (counts != width)).any().long(), "max")
    if counts.is_meta or not int(changes):
        return _fill_rows(lead, spread, x, counts != 0, source, rows, here, in_place, seen_rows=True)
    for group, (dim, sizes) in zip(groups, gathered, strict=True):
        source = group.gather(source, dim, sizes)
    return _fill_rows(seen, spread, x, mask, source, elements, here_too, in_place)


def _count_columns(mask: Tensor, here: _Here, columns: int) -> Tensor:
    return mask.expand(here.seen).flatten(len(here.seen) - columns).sum(-1)


def _fill_rows(
    lead: Collectives,
    spread: Collectives,
    x: Tensor,
    mask: Tensor,
    source: Tensor,
    units: _Units,
    here: Any,
    in_place: bool,
    *,
    seen_rows: bool = False,
) -> Tensor:
    """Into x, by the ranks along `spread`, where a mask says so, of which those along `lead` see different rows."""
    source = lead.map(_rows_of, source, here, units.columns)
    mask = lead.map(_places_of, mask, here, 0 if seen_rows else units.columns)
    if units.fetched is not None:
        mask = lead.map(_own_part, mask, here, x)
        return _fetch_rows(spread, x, mask, source, units, here, in_place)
    table = lead.reduce(lead.map(lambda m, h: _count_runs(m, units.table, h.run), mask, here), "sum")
    ends = table.flatten().cumsum(0)
    if ends.device.type == "cpu":
        _refuse(int(ends[-1:].sum()), units)
    elif not ends.is_meta:  # without waiting for it, as torch does there
        torch._assert_async(ends[-1:].sum() <= units.num_rows)
    before = ends.reshape(table.shape) - table
    return lead.map(_look_up, x, mask, source, before, here, units.columns, in_place)


def _refuse(needed: int, units: _Units) -> None:
    if needed > units.num_rows:
        raise RuntimeError("Number of elements of source < number of ones in mask")


def _rows_of(source: Tensor, here: _Here, columns: int) -> Tensor:
    ndim = source.ndim - columns
    for dim, part in enumerate(here.columns, ndim):
        if part is not None:
            source = source.narrow(dim, part[0], part[1] - part[0])
    return source.flatten(0, ndim - 1) if ndim else source.unsqueeze(0)


def _places_of(mask: Tensor, here: _Here, columns: int) -> Tensor:
    """The mask's rows, of which it says the same in all columns."""
    return mask.reshape(mask.shape[: max(mask.ndim - columns, 0)]).expand(here.seen)


def _own_part(mask: Tensor, here: _Here, x: Tensor) -> Tensor:
    for dim, start in enumerate(here.begin):
        mask = mask.narrow(dim, start, x.shape[dim])
    return mask


def _count_runs(mask: Tensor, table: tuple[int, ...], run: tuple[Any, ...]) -> Tensor:
    counts = mask.new_zeros(table, dtype=torch.long)
    counts[run] = mask.flatten(len(table) - 1).sum(-1)
    return counts


def _look_up(
    x: Tensor, mask: Tensor, source: Tensor, before: Tensor, here: _Here, columns: int, in_place: bool
) -> Tensor:
    """The rows of the source that fall into our part of the target. Where the mask is false there may be none."""
    counts = mask.flatten(before.ndim - 1).cumsum(-1) - 1 + before[here.run].unsqueeze(-1)
    places = _own_part(counts.reshape(mask.shape), here, x).clamp(0, len(source))
    mask = _own_part(mask, here, x)
    found = padded(source, [0])[places]
    result = torch.where(mask.reshape(*mask.shape, *[1] * columns), found, x)
    return x.copy_(result) if in_place else result


def _fetch_rows(
    group: Collectives, x: Tensor, mask: Tensor, source: Tensor, units: _Units, here: Any, in_place: bool
) -> Tensor:
    how = units.fetched
    assert how is not None
    have = how.have
    table = group.reduce(group.map(lambda m, h: _count_runs(m, how.table, h.own_run), mask, here), "sum")
    if table.is_meta:  # as if all of it moved
        want = [[have[member - 1]] for member in range(len(have))]
    else:
        ends = table.flatten().cumsum(0).tolist()
        _refuse(ends[-1] if ends else 0, units)
        want = _wanted(ends, how)
    source = group.map(lambda s, h: s[slice(*h.gives)], source, here)
    count = max(map(len, want))
    if count > MOST_FETCHES:
        hull = [(runs[0][0], runs[-1][1]) if runs else (0, 0) for runs in want]
        part = fetch(group, source, 0, have, hull)
        found = group.map(_runs_of, part, want, hull, group.index())
    else:
        each = [[runs[i] if i < len(runs) else (0, 0) for runs in want] for i in range(max(count, 1))]
        found = joined([fetch(group, source, 0, have, runs) for runs in each], 0)
    return group.map(_fill, x, mask, found, units.columns, in_place)


def _wanted(ends: Sequence[int], how: _Fetched) -> list[list[Interval]]:
    """The rows that each member needs, of all the runs one after another: as few intervals as there can be."""
    found: list[list[Interval]] = [[] for _ in how.have]
    start = 0
    for end, owner in zip(ends, how.owners, strict=True):
        mine = found[owner]
        if mine and mine[-1][1] == start:
            mine[-1] = (mine[-1][0], end)
        elif end > start:
            mine.append((start, end))
        start = end
    return found


def _runs_of(part: Tensor, want: Sequence[Sequence[Interval]], hull: Sequence[Interval], me: int) -> Tensor:
    runs = [part.narrow(0, start - hull[me][0], end - start) for start, end in want[me]]
    return joined(runs or [part], 0)


def _fill(x: Tensor, mask: Tensor, found: Tensor, columns: int, in_place: bool) -> Tensor:
    mask = mask.reshape(*mask.shape, *[1] * columns)
    return x.masked_scatter_(mask, found) if in_place else x.masked_scatter(mask, found)


register("masked_scatter", rule=Rule(_ways, _local))
