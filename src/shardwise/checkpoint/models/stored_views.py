"""What stored tensors become for a parameter: views, of which any box can be read, or what is computed of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.reading import Region, contiguous_region, read
from shardwise.checkpoint.files.safetensors import Stored
from shardwise.checkpoint.models.recipes import Groups, Noted, Taken, recipe
from shardwise.checkpoint.models.sources import From
from shardwise.checkpoint.pieces import overlap
from shardwise.errors import CheckpointError
from shardwise.layout import Box
from shardwise.local import part
from shardwise.words import dtype_name


@dataclass(frozen=True, slots=True)
class View:
    """A view of one stored tensor."""

    stored: Stored
    region: Region

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
    views = [_whole(stored) for stored in found]
    made, parts = _tried_out(source, views)
    if tuple(shape) != tuple(made.shape):
        raise CheckpointError(f"has shape {list(shape)}, and {source} gives {list(made.shape)}")
    if not is_converted(made.dtype, dtype):
        raise CheckpointError(f"is {dtype_name(dtype)}, and {dtype_name(made.dtype)} is not converted to that unasked")
    if parts is None:
        assert source.make is not None
        each = tuple((size,) for size in shape)
        return [Source((0,) * len(shape), each, Computed(tuple(views), source.make, tuple(shape), made.dtype))]
    return [Source(one.starts, one.groups, _view(views[one.argument], one)) for one in parts]


def _whole(stored: Stored) -> View:
    if stored.dtype is None:
        raise CheckpointError(f"is stored as {stored.code}, which torch has no dtype for")
    return View(stored, contiguous_region(stored.begin, stored.shape, stored.dtype))


def _view(view: View, taken: Taken) -> View:
    begin = view.region.begin + taken.offset * taken.dtype.itemsize
    return View(view.stored, Region(begin, taken.sizes, taken.strides, taken.dtype))


@torch.inference_mode(False)
def _tried_out(source: From, views: Sequence[View]) -> tuple[Tensor, list[Taken] | None]:
    """What is made of tensors like the stored ones, without data; and the parts that it is put together of. Whether
    they were written to is told by their versions, which tensors of inference do not have."""
    given = [torch.empty(view.region.sizes, dtype=view.dtype, device="meta") for view in views]
    noted = Noted(given)
    if source.make is None:
        return given[0], recipe(given[0], noted)
    try:
        with torch.no_grad(), noted:
            made = source.make(*given)
        parts = recipe(made, noted)
    except Exception:  # it looks at numbers, or has tensors of its own
        parts = None
    return (_made_of_ones(source, views), None) if parts is None else (made, parts)


def _made_of_ones(source: From, views: Sequence[View]) -> Tensor:
    """What is computed will be when some of the model was written to: better to find out now that torch cannot."""
    assert source.make is not None
    given = [torch.ones(view.region.sizes, dtype=view.dtype, device="cpu") for view in views]
    try:
        with torch.no_grad(), torch.device("cpu"):
            made = source.make(*given)
    except Exception as error:
        shapes = " and ".join(f"{dtype_name(x.dtype)} {list(x.shape)}" for x in given)
        raise CheckpointError(f"is read {source}, which fails for {shapes}: {error}") from error
    if not isinstance(made, Tensor):
        raise CheckpointError(f"is read {source}, which makes a {type(made).__name__} and not a tensor")
    return made


def is_converted(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers are taken as another dtype without being asked: of one kind, and integers only as wider ones."""
    if stored == wanted or (stored.is_complex and wanted.is_complex):
        return True
    if stored.is_floating_point or wanted.is_floating_point:
        return stored.is_floating_point and wanted.is_floating_point
    return torch.bool not in (stored, wanted) and torch.promote_types(stored, wanted) == wanted


# Reading


def fill(sources: Sequence[Source], box: Box, target: Tensor, files: Opened) -> None:
    """Read a box of a parameter into a tensor of its size."""
    for source in sources:
        both = overlap(box, (source.starts, source.sizes))
        if both is None:
            continue
        there = _relative(both, source.starts)
        here = part(target, _relative(both, box[0])[0], both[1])
        if isinstance(source.made, View):
            _fill_from_view(source, there, here, files)
        else:
            whole = _compute(source.made, files)
            with torch.no_grad():
                here.copy_(part(whole, *there))


def _relative(box: Box, starts: Sequence[int]) -> Box:
    return tuple(at - start for at, start in zip(box[0], starts, strict=True)), box[1]


def _fill_from_view(source: Source, box: Box, target: Tensor, files: Opened) -> None:
    """By the dims of the view, of which several may make up one of the parameter's."""
    made = source.made
    assert isinstance(made, View)
    reader, key = files[made.stored.path], made.stored.key
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


def _compute(made: Computed, files: Opened) -> Tensor:
    given = []
    for view in made.whole:
        given.append(torch.empty(view.region.sizes, dtype=view.dtype, device="cpu"))
        read(files[view.stored.path], view.region, given[-1], key=view.stored.key)
    with torch.no_grad(), torch.device("cpu"):
        found = made.function(*given)
    if tuple(found.shape) != made.shape:
        raise CheckpointError(
            f"a view of {made.whole[0].stored.key!r} returned {list(found.shape)}, not {list(made.shape)}"
        )
    return found
