"""What transformers' files have of a model: its parameters, converted back by transformers.

The conversions run on tensors without data. Where they take parameters apart and put them together along their dims, as
they do for experts that are one tensor in memory, a part of a parameter is a part of a stored tensor, and whoever
writes it writes it there: nothing moves. What they do otherwise is done with DTensors, by all ranks, and may gather.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.models.recipes import Noted, Taken, recipe
from shardwise.checkpoint.pieces import overlap, whole, within
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.writers import Part
from shardwise.layout import Box
from shardwise.parallel.fully_sharded.module import FSDPModule, class_before
from shardwise.words import dtype_name


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a tensor that this process has, as a part of a stored one, from `starts` on. `dims` says for each dim of
    the stored tensor which one it is here; None: none, it has one index."""

    key: str
    shape: tuple[int, ...]
    box: Box
    starts: tuple[int, ...]
    dims: tuple[int | None, ...]

    def put(self, part: Part) -> Part | None:
        """What of a part belongs here, as a part of the stored tensor."""
        both = overlap(part.box, self.box)
        if both is None:
            return None
        ahead = (0 if dim is None else both[0][dim] - self.box[0][dim] for dim in self.dims)
        starts = tuple(start + further for start, further in zip(self.starts, ahead, strict=True))
        sizes = tuple(1 if dim is None else both[1][dim] for dim in self.dims)
        order = [dim for dim in self.dims if dim is not None]
        order += [dim for dim in range(part.data.dim()) if dim not in order]
        data = part.data[within(both, outer=part.box)].permute(order).reshape(sizes)  # a view: the rest has one index
        return Part(self.key, self.shape, (starts, sizes), data)


class Reverted(NamedTuple):
    """What is written of which tensors: `places`, by the tensors' names. `stored` is what files will have, without
    data."""

    tensors: dict[str, Tensor]
    places: dict[str, list[Place]]
    stored: dict[str, Tensor]

    def parts(self, parts: Sequence[Part], facts: Mapping[str, Any]) -> tuple[list[Part], dict[str, Any]]:
        """Of what this process writes, and tells the others of it, what it is in the files."""
        made = [put for part in parts for place in self.places[part.key] if (put := place.put(part)) is not None]
        tensors = [(key, dtype_name(x.dtype), tuple(x.shape)) for key, x in self.stored.items()]
        boxes = [(part.key, *part.box) for part in made]
        return made, {**facts, "tensors": tensors if facts["tensors"] else [], "boxes": boxes}


def reverted(model: Any, tensors: Mapping[str, Tensor], ranks: Ranks, doing: str) -> Reverted:
    """All ranks ask together, for what they have of a model."""
    stored, places, others = ranks.all(doing, lambda: _found(model, tensors))
    left = {name: x for name, x in tensors.items() if name not in places}
    done = _revert(model, left) if others else {}
    if done.keys() != others or not done.keys().isdisjoint(places):  # they are made of what others are made of, too
        stored, places, left, done = {}, {}, dict(tensors), _revert(model, tensors)
    found = {name: tensors[name] for name in places} | done
    places |= {key: [_own_place(key, x)] for key, x in done.items()}
    return Reverted(found, places, stored | {key: _without_data(x) for key, x in done.items()})


@torch.inference_mode(False)  # in which tensors have versions
def _found(model: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Place]], set[str]]:
    """What is stored, without data; places in it; and the keys for which there are none."""
    given, names = {name: _without_data(x) for name, x in tensors.items()}, [*tensors]
    places: dict[str, list[Place]] = {}
    others: set[str] = set()
    try:
        with torch.no_grad(), (noted := _Views(given.values())):
            stored = _revert(model, given)
    except Exception:  # it looks at numbers, say; if something is wrong, it is raised with them
        return {}, {}, {*tensors}
    for key, x in stored.items():
        parts = recipe(x, noted) or ()
        found = [place for one in parts if (place := _place(key, x, one, given[names[one.argument]])) is not None]
        if len(found) < len(parts) or not parts:
            others.add(key)
            continue
        for one, place in zip(parts, found, strict=True):
            places.setdefault(names[one.argument], []).append(place)
    return stored, places, others


class _Views(Noted):
    """A view stays one where a copy of it is asked for: what is taken of the copy is then seen to be taken of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else super().__torch_function__(func, types, args, kwargs)


def _without_data(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _place(key: str, stored: Tensor, taken: Taken, x: Tensor) -> Place | None:
    """None where a dim of the view is no dim of the tensor, or two of them are put together."""
    left, starts, sizes, dims = taken.offset, [], [1] * x.dim(), []
    for stride in x.stride():
        start, left = divmod(left, stride)
        starts.append(start)
    views = iter(zip(taken.sizes, taken.strides, strict=True))
    for group in taken.groups:
        wide = [(size, stride) for size, stride in (next(views) for _ in group) if size != 1]
        dim = next((d for d in range(x.dim()) if x.shape[d] != 1 and wide and x.stride(d) == wide[0][1]), None)
        if len(wide) > 1 or (wide and (dim is None or starts[dim] + wide[0][0] > x.shape[dim])):
            return None
        if dim is not None:
            sizes[dim] = wide[0][0]
        dims.append(dim)
    if taken.dtype != x.dtype or stored.dtype != x.dtype:
        return None
    return Place(key, tuple(stored.shape), (tuple(starts), tuple(sizes)), taken.starts, tuple(dims))


def _own_place(key: str, x: Tensor) -> Place:
    shape = tuple(x.shape)
    return Place(key, shape, whole(shape), (0,) * len(shape), tuple(range(len(shape))))


def _revert(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    with as_transformers_has_it(model):
        return loading.revert_weight_conversion(model, dict(tensors))


@contextmanager
def as_transformers_has_it(model: Any) -> Iterator[None]:
    """Inside, modules are of their own classes, by whose names transformers finds what is converted, and how;
    `fully_shard` has given them others."""
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, cls in sharded:
            module.__class__ = class_before(cls)
        yield
    finally:
        for module, cls in sharded:
            module.__class__ = cls
