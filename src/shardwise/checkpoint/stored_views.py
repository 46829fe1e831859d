"""What stored tensors become for a parameter: views of them, of which any box can be read, or what is computed of them.

A function that makes a view is tried out on a meta tensor, whose strides then say where in the file its elements are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.files import Reader
from shardwise.checkpoint.memory import part
from shardwise.checkpoint.reading import Region, contiguous_region, read
from shardwise.checkpoint.safetensors_files import Stored
from shardwise.checkpoint.sources import From
from shardwise.errors import CheckpointError
from shardwise.layout.layout import Box

Readers = Mapping[Path, Reader]
Groups = tuple[tuple[int, ...], ...]
"""For each dim of a parameter, the sizes of the dims that it is made of."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of one stored tensor."""

    stored: Stored
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.sizes

    @property
    def dtype(self) -> torch.dtype:
        return self.region.dtype


@dataclass(frozen=True, slots=True)
class Computed:
    """What a function makes of whole stored tensors."""

    whole: tuple[View, ...]
    function: Callable[..., Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a parameter, from `starts` on, and what it is read from."""

    starts: tuple[int, ...]
    groups: Groups
    made: View | Computed

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.groups))

    @property
    def stored(self) -> list[Stored]:
        return [self.made.stored] if isinstance(self.made, View) else [view.stored for view in self.made.whole]


def sources_of(source: From, found: Sequence[Stored], shape: Sequence[int], dtype: torch.dtype) -> list[Source]:
    """What a parameter is read from, or a CheckpointError that says why it does not fit."""
    if source.join is None:
        made = _made(source, found)
        groups = _grouped(shape, made.shape)
        if groups is None:
            raise CheckpointError(f"has shape {list(shape)}, what {source} gives has {list(made.shape)}")
        parts = [Source((0,) * len(shape), groups, made)]
    else:
        parts = _joined(source, [_made(source, [one]) for one in found], shape)
    for one in parts:
        if not _is_converted(one.made.dtype, dtype):
            raise CheckpointError(f"is {_name(dtype)}, and {_name(one.made.dtype)} is not converted to that")
    return parts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_converted(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers are taken as another dtype without being asked: of one kind, and integers only as wider ones."""
    if stored == wanted or (stored.is_complex and wanted.is_complex):
        return True
    if stored.is_floating_point or wanted.is_floating_point:
        return stored.is_floating_point and wanted.is_floating_point
    return torch.bool not in (stored, wanted) and torch.promote_types(stored, wanted) == wanted


def _joined(source: From, made: Sequence[View | Computed], shape: Sequence[int]) -> list[Source]:
    assert source.join is not None
    dim, at, parts = source.join % max(len(shape), 1), 0, []
    for one in made:
        fits = len(one.shape) == len(shape) and all(
            a == b for i, (a, b) in enumerate(zip(one.shape, shape, strict=True)) if i != dim
        )
        if not fits:
            break
        starts = tuple(at if i == dim else 0 for i in range(len(shape)))
        parts.append(Source(starts, tuple((size,) for size in one.shape), one))
        at += one.shape[dim]
    if len(parts) < len(made) or at != shape[dim]:
        shapes = " and ".join(str(list(one.shape)) for one in made)
        raise CheckpointError(f"has shape {list(shape)}, and {source} joins {shapes}")
    return parts


def _made(source: From, found: Sequence[Stored]) -> View | Computed:
    views = [_whole(stored) for stored in found]
    if source.view is None:
        return views[0]
    given = [torch.empty(view.shape, dtype=view.dtype, device="meta") for view in views]
    try:
        with torch.no_grad():
            made = source.view(*given)
    except Exception as error:
        raise CheckpointError(f"is read by a view that fails for {_shapes(views)}: {error}") from error
    if not isinstance(made, Tensor):
        raise CheckpointError(f"is read by a view that returns a {type(made).__name__}, not a tensor")
    if len(given) == 1 and _shows(made, given[0]):
        begin = views[0].region.begin + int(made.storage_offset()) * made.dtype.itemsize
        return View(found[0], Region(begin, tuple(made.shape), made.stride(), made.dtype))
    return Computed(tuple(views), source.view, tuple(made.shape), made.dtype)


def _whole(stored: Stored) -> View:
    if stored.dtype is None:
        raise CheckpointError(f"is stored as {stored.code}, which torch has no dtype for")
    return View(stored, contiguous_region(stored.begin, stored.shape, stored.dtype))


def _shapes(views: Sequence[View]) -> str:
    return " and ".join(f"{_name(view.dtype)} {list(view.shape)}" for view in views)


def _shows(made: Tensor, of: Tensor) -> bool:
    """Whether a tensor is a view of another, which was not written to."""
    same = made.untyped_storage()._cdata == of.untyped_storage()._cdata
    return same and not of._version and not made.is_conj() and not made.is_neg()


def _grouped(shape: Sequence[int], found: Sequence[int]) -> Groups | None:
    """The dims of a view that make up each dim of a parameter, in row-major order; None where they do not."""
    if tuple(shape) == tuple(found):
        return tuple((size,) for size in found)
    if 0 in shape or len(found) < len(shape):
        return None
    groups, left = [], list(found)
    for dim, size in enumerate(shape):
        group = [left.pop(0)]
        spare = len(shape) - dim - 1  # each dim that follows needs one
        while len(left) > spare and (math.prod(group) < size or (left[0] == 1 and not spare)):
            group.append(left.pop(0))
        if math.prod(group) != size:
            return None
        groups.append(tuple(group))
    return None if left else tuple(groups)


# Reading


def fill(sources: Sequence[Source], box: Box, target: Tensor, readers: Readers) -> None:
    """Read a box of a parameter into a tensor of its size."""
    for source in sources:
        both = overlap(box, (source.starts, source.sizes))
        if both is None:
            continue
        there = _relative(both, source.starts)
        here = part(target, _relative(both, box[0])[0], both[1])
        if isinstance(source.made, View):
            _fill_from_view(source, there, here, readers)
        else:
            whole = _compute(source.made, readers).reshape(source.sizes)
            with torch.no_grad():
                here.copy_(part(whole, *there))


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common, unless that is nothing."""
    starts = tuple(map(max, a[0], b[0]))
    stops = [min(s + m, t + n) for s, m, t, n in zip(*a, *b, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return None if any(size <= 0 for size in sizes) else (starts, sizes)


def _relative(box: Box, starts: Sequence[int]) -> Box:
    return tuple(at - start for at, start in zip(box[0], starts, strict=True)), box[1]


def _fill_from_view(source: Source, box: Box, target: Tensor, readers: Readers) -> None:
    """By the dims of the view, of which several may make up one of the parameter's."""
    made = source.made
    assert isinstance(made, View)
    reader, key = readers[made.stored.path], made.stored.key
    per_dim = [list(_runs(start, start + size, group)) for start, size, group in zip(*box, source.groups, strict=True)]
    for runs in itertools.product(*per_dim):
        starts = [at for _, run_starts, _ in runs for at in run_starts]
        sizes = [size for _, _, run_sizes in runs for size in run_sizes]
        here = target
        for dim in reversed(range(len(runs))):
            ahead, _, extents = runs[dim]
            here = here.narrow(dim, ahead, math.prod(extents)).unflatten(dim, extents)
        read(reader, made.region.box(starts, sizes), here, key=key)


def _runs(start: int, stop: int, sizes: Sequence[int], ahead: int = 0) -> Iterator[tuple[int, list[int], list[int]]]:
    """The interval of a dim as boxes of the dims that it is made of: how far each is from the beginning of the
    interval, where it starts, and its sizes."""
    if len(sizes) == 1:
        yield ahead, [start], [stop - start]
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one
        yield from _in_one(start, stop, sizes, last, ahead)
        return
    if start < first * inner:
        yield from _in_one(start, first * inner, sizes, first - 1, ahead)
    if first < last:
        yield ahead + first * inner - start, [first] + [0] * (len(sizes) - 1), [last - first, *sizes[1:]]
    if last * inner < stop:
        yield from _in_one(last * inner, stop, sizes, last, ahead + last * inner - start)


def _in_one(
    start: int, stop: int, sizes: Sequence[int], at: int, ahead: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    base = at * math.prod(sizes[1:])
    for further, starts, extents in _runs(start - base, stop - base, sizes[1:], ahead):
        yield further, [at, *starts], [1, *extents]


def _compute(made: Computed, readers: Readers) -> Tensor:
    given = []
    for view in made.whole:
        given.append(torch.empty(view.shape, dtype=view.dtype))
        read(readers[view.stored.path], view.region, given[-1], key=view.stored.key)
    with torch.no_grad():
        found = made.function(*given)
    if tuple(found.shape) != made.shape:
        raise CheckpointError(
            f"a view of {made.whole[0].stored.key!r} returned {list(found.shape)}, not {list(made.shape)}"
        )
    return found
