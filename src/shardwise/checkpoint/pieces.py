"""Which parts of a tensor the ranks hold, who writes which of them, and which saved parts fill a part that is wanted.

Values only: nothing here communicates, and every rank comes to the same answer. All parts are boxes, so uneven, empty,
nested and reordered shards are nothing special, and neither is a tensor without dims (its one element is a box) or
without elements (its one box is empty). What is pending counts as replicated: it is reduced before it is written.

Ranks are numbered within a tensor's mesh, in row-major order of its axes. Of the ranks outside it nothing is known, so
tensors on a submesh may be held, and written, once more by each of its siblings: whoever puts together what all ranks
have written keeps one of the boxes that are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import Literal, NamedTuple

from shardwise.layout import Box, Layout, Mesh, chunk_sizes, intervals

SMALLEST_PART = 1 << 20
"""Bytes. What several ranks hold is not cut among them into smaller parts: each part is a write of its own."""

FINENESS = 16
"""Nor into smaller parts than what each rank has to write, over this. So no rank writes much more than another."""


class Piece(NamedTuple):
    """A box of a tensor, and all ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class Stored(NamedTuple):
    """What of a tensor decides who writes it."""

    layout: Layout
    itemsize: int


class Written(NamedTuple):
    """A box that one rank writes."""

    box: Box
    rank: int


class Fill(NamedTuple):
    """The part of a wanted box that a saved one has: its number among the saved, and what both have in common."""

    saved: int
    box: Box


class Flaw(NamedTuple):
    """Where boxes that should be a whole tensor, each element once, are not."""

    what: Literal["missing", "twice", "outside"]
    box: Box


# What is held


@lru_cache(maxsize=4096)
def pieces(layout: Layout) -> tuple[Piece, ...]:
    """The boxes that a tensor is cut into, each once, in the order of the first ranks that hold them.

    >>> from shardwise import Layout, Shard, Replicate, simulate
    >>> mesh = simulate((2, 2), ("dp", "tp"))
    >>> for piece in pieces(Layout.of(mesh, (3, 4), [Replicate(), Shard(0)])):
    ...     print(piece.box, piece.ranks)
    ((0, 0), (2, 4)) (0, 2)
    ((2, 0), (1, 4)) (1, 3)
    """
    if not layout.numel:
        return (Piece(whole(layout.shape), tuple(range(layout.mesh.size()))),)
    held: dict[Box, list[int]] = {}
    for rank, coordinate in enumerate(product(*map(range, layout.mesh.shape))):
        box = layout.box(coordinate)
        if volume(box):
            held.setdefault(box, []).append(rank)
    return tuple(Piece(box, tuple(ranks)) for box, ranks in held.items())


def held_ranks(mesh: Mesh) -> tuple[int, ...]:
    """The numbers of the ranks whose shards this process has, in the order in which it has them."""
    return tuple(map(mesh.number, mesh.held))


# Who writes what


def share_out(tensors: Mapping[str, Stored]) -> dict[str, tuple[Written, ...]]:
    """The boxes that each tensor is written in, and by whom: each element once, by a rank that holds it.

    What only one rank holds, it writes. What several hold is shared out so that all have about as many bytes to write,
    the largest first; what is large beside a rank's share is cut. The order of the tensors does not matter.

    >>> from shardwise import Layout, simulate
    >>> mesh = simulate((2,), ("dp",))
    >>> norms = {name: Stored(Layout(mesh, (8,)), 4) for name in ("a", "b")}
    >>> {name: [written.rank for written in boxes] for name, boxes in share_out(norms).items()}
    {'a': [0], 'b': [1]}
    """
    return dict(_share_out(tuple(sorted(tensors.items(), key=lambda item: item[0]))))


@lru_cache(maxsize=16)
def _share_out(tensors: tuple[tuple[str, Stored], ...]) -> tuple[tuple[str, tuple[Written, ...]], ...]:
    """Saved again and again, a program's tensors are the same ones."""
    written: dict[str, list[Written]] = {key: [] for key, _ in tensors}
    for mesh in dict.fromkeys(stored.layout.mesh for _, stored in tensors):
        _share_out_on(mesh, [(key, stored) for key, stored in tensors if stored.layout.mesh is mesh], written)
    return tuple((key, tuple(sorted(boxes))) for key, boxes in written.items())


def _share_out_on(mesh: Mesh, tensors: Sequence[tuple[str, Stored]], written: dict[str, list[Written]]) -> None:
    load = [0] * mesh.size()
    shared: list[tuple[int, str, Piece]] = []
    for key, (layout, itemsize) in tensors:
        for piece in pieces(layout):
            num_bytes = volume(piece.box) * itemsize
            if len(piece.ranks) == 1:
                load[piece.ranks[0]] += num_bytes
                written[key].append(Written(piece.box, piece.ranks[0]))
            else:
                shared.append((num_bytes, key, piece))
    fair = (sum(load) + sum(num_bytes for num_bytes, _, _ in shared)) // mesh.size()
    parts = [
        (-num_bytes * volume(part) // max(volume(box), 1), key, part, ranks)
        for num_bytes, key, (box, ranks) in shared
        for part in cut(box, num_parts(num_bytes, len(ranks), fair=fair))
    ]
    for less, key, part, ranks in sorted(parts):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank] -= less
        written[key].append(Written(part, rank))


def num_parts(num_bytes: int, num_ranks: int, *, fair: int = 0) -> int:
    """Into how many parts a box is cut that several ranks hold; `fair` is what each rank has to write altogether."""
    return max(min(num_ranks, ceil(num_bytes / max(fair / FINENESS, SMALLEST_PART))), 1)


def cut(box: Box, num_parts: int) -> list[Box]:
    """A box in at most so many parts, none of them empty, along the first dim that is long enough, or the longest: what
    is cut along the first dim lies in one run of memory.

    >>> cut(((0, 2), (1, 6)), 2)
    [((0, 2), (1, 3)), ((0, 5), (1, 3))]
    """
    starts, sizes = box
    if num_parts < 2 or not volume(box) or not sizes:
        return [box]
    longest = max(range(len(sizes)), key=lambda dim: (sizes[dim], -dim))
    dim = next((dim for dim, size in enumerate(sizes) if size >= num_parts), longest)
    runs = intervals(chunk_sizes(sizes[dim], (num_parts,)))
    return [
        (_replaced(starts, dim, starts[dim] + begin), _replaced(sizes, dim, end - begin))
        for begin, end in runs
        if end > begin
    ]


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


# Boxes


def whole(shape: Sequence[int]) -> Box:
    return (0,) * len(shape), tuple(shape)


def volume(box: Box) -> int:
    return prod(box[1])


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is no element.

    >>> overlap(((0, 0), (2, 4)), ((1, 2), (5, 5)))
    ((1, 2), (1, 2))
    """
    starts, sizes = [], []
    for start, size, other, its_size in zip(*a, *b, strict=True):
        begin, end = max(start, other), min(start + size, other + its_size)
        if begin >= end:
            return None
        starts.append(begin)
        sizes.append(end - begin)
    return tuple(starts), tuple(sizes)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that holds `outer`, to index it by.

    >>> within(((3,), (2,)), outer=((2,), (8,)))
    (slice(1, 3, None),)
    """
    return tuple(
        slice(start - origin, start - origin + size) for start, size, origin in zip(*box, outer[0], strict=True)
    )


def fills(wanted: Box, saved: Sequence[Box]) -> list[Fill]:
    """Which parts of the saved boxes fill a wanted one."""
    common = ((i, overlap(wanted, box)) for i, box in enumerate(saved))
    return [Fill(i, box) for i, box in common if box is not None]


def flaw(shape: Sequence[int], boxes: Sequence[Box]) -> Flaw | None:
    """The first thing that is wrong with boxes that should be a whole tensor, each element once; None if they are.

    >>> flaw((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2))])
    Flaw(what='missing', box=((2, 0), (1, 2)))
    """
    everything = whole(shape)
    missing = [everything] if volume(everything) else []
    for box in sorted(boxes):
        if not volume(box):
            continue
        if any(start < 0 or start + size > extent for start, size, extent in zip(*box, shape, strict=True)):
            return Flaw("outside", box)
        found = [common for gap in missing if (common := overlap(gap, box)) is not None]
        if sum(map(volume, found)) < volume(box):
            return Flaw("twice", min(_rest(box, found)))
        missing = [rest for gap in missing for rest in _without(gap, box)]
    return Flaw("missing", min(missing)) if missing else None


def _rest(box: Box, taken: Sequence[Box]) -> list[Box]:
    rest = [box]
    for part in taken:
        rest = [smaller for one in rest for smaller in _without(one, part)]
    return rest


def _without(box: Box, taken: Box) -> list[Box]:
    """What is left of a box, in boxes."""
    common = overlap(box, taken)
    if common is None:
        return [box]
    left = []
    for dim, (start, size, begin, length) in enumerate(zip(*box, *common, strict=True)):
        starts, sizes = box
        for first, last in ((start, begin), (begin + length, start + size)):
            if first < last:
                left.append((_replaced(starts, dim, first), _replaced(sizes, dim, last - first)))
        box = _replaced(starts, dim, begin), _replaced(sizes, dim, length)
    return left
