"""The layout: how a global tensor is distributed over a mesh. A value, interned: equality is identity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from shardwise.errors import PlacementError
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import SUM, Partial, Placement, Replicate, Shard
from shardwise.layout.sizes import chunk_sizes, intervals, offsets

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The part of the global tensor that a shard is: its start and its size, per dim."""


class Layout:
    """Mesh, global shape, the ordered axes that split each dim, and the pending reduction of each axis.

    `splits[dim]` names mesh axes by index, major first. `pending[axis]` is a `Partial` or None. `sizes[dim]` is None
    where the dim is cut as `torch.chunk` cuts, or the explicit sizes of all its pieces. `reduced` says that what is
    pending has been reduced once, and the tensor keeps the result: calls may take it as whole. `axis_dims[axis]` is the
    dim that an axis splits, or None.
    """

    __slots__ = (
        *("__dict__", "__weakref__", "axis_dims", "has_pending", "mesh", "numel", "pending", "reduced", "replicated"),
        *("shape", "sizes", "splits"),
    )
    _interned: ClassVar[WeakValueDictionary[tuple, Layout]] = WeakValueDictionary()
    _interning = Lock()  # backward passes make layouts on threads of their own

    mesh: Mesh
    shape: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    pending: tuple[Partial | None, ...]
    sizes: tuple[tuple[int, ...] | None, ...]
    reduced: bool
    axis_dims: tuple[int | None, ...]
    has_pending: bool
    replicated: bool
    numel: int

    def __new__(
        cls,
        mesh: Mesh,
        shape: Sequence[int],
        splits: Sequence[tuple[int, ...]] | None = None,
        pending: Sequence[Partial | None] | None = None,
        sizes: Sequence[tuple[int, ...] | None] | None = None,
        *,
        reduced: bool = False,
    ) -> Layout:
        shape = tuple(shape)
        splits = ((),) * len(shape) if splits is None else tuple(splits)
        pending = (None,) * mesh.ndim if pending is None else tuple(pending)
        sizes = (None,) * len(shape) if sizes is None else tuple(sizes)
        if any(sizes):
            sizes = tuple(_canonical_sizes(mesh, *cut) for cut in zip(shape, splits, sizes, strict=True))
        key = (mesh, shape, splits, pending, sizes, reduced)
        self = cls._interned.get(key)
        if self is None:
            made = object.__new__(cls)
            made.mesh, made.shape, made.splits, made.pending, made.sizes, made.reduced = key
            made._derive()
            with cls._interning:
                self = cls._interned.setdefault(key, made)
        return self

    def _derive(self) -> None:
        """What is asked so often that it is worked out once."""
        dims: list[int | None] = [None] * self.mesh.ndim
        for dim, axes in enumerate(self.splits):
            for axis in axes:
                dims[axis] = dim
        self.axis_dims = tuple(dims)
        self.has_pending = any(self.pending)
        self.replicated = not self.has_pending and not any(self.splits)
        self.numel = math.prod(self.shape)

    @classmethod
    def of(cls, mesh: Mesh, shape: Sequence[int], placements: Placements) -> Layout:
        """The layout users mean by `placements`: one per mesh axis, or a mapping from dim to axes, major first."""
        if isinstance(placements, Mapping):
            return cls(mesh, shape, _splits_by_dim(mesh, shape, placements))
        if isinstance(placements, (Placement, str)):
            raise PlacementError(f"placements are a list, one per mesh axis: [{placements}], not {placements}")
        if len(placements) != mesh.ndim:
            raise PlacementError(
                f"{mesh} has {mesh.ndim} axes, so it takes {mesh.ndim} placements; got {_show(placements)}"
            )
        splits: list[tuple[int, ...]] = [()] * len(shape)
        pending: list[Partial | None] = [None] * mesh.ndim
        for axis, placement in enumerate(placements):
            match placement:
                case Shard(dim):
                    splits[_dim(dim, shape, placement)] += (axis,)
                case Partial():
                    pending[axis] = placement
                case Replicate():
                    pass
                case _:
                    raise unknown_placement(placement)
        _check_commute(pending, placements)
        return cls(mesh, shape, splits, pending)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis, as users read it."""
        found: list[Placement] = [pending or Replicate() for pending in self.pending]
        for dim, axes in enumerate(self.splits):
            for axis in axes:
                found[axis] = Shard(dim)
        return tuple(found)

    @cached_property
    def once_reduced(self) -> Layout:
        """The layout of a tensor that keeps what its pending reductions have come to."""
        return Layout(self.mesh, self.shape, self.splits, self.pending, self.sizes, reduced=True)

    @cached_property
    def unreduced(self) -> Layout:
        """The same, of a tensor that has only what is pending."""
        return self.with_() if self.reduced else self

    def along(self, axis: int) -> int | Partial | None:
        """What an axis does: the dim that it splits, what is pending on it, or None where it does nothing."""
        return self.pending[axis] or self.axis_dims[axis]

    @cached_property
    def without_pending(self) -> Layout:
        """The layout of the same tensor once everything pending is reduced."""
        return self.with_(pending=[None] * self.mesh.ndim) if self.has_pending or self.reduced else self

    @cached_property
    def split_axes(self) -> tuple[int, ...]:
        """The axes that split some dim, in order."""
        return tuple(axis for axis, dim in enumerate(self.axis_dims) if dim is not None)

    @cached_property
    def size(self) -> torch.Size:
        """The global shape, as torch says it."""
        return torch.Size(self.shape)

    def pieces(self, dim: int) -> tuple[int, ...]:
        """Sizes of all pieces of a dim, in row-major order of the axes that split it."""
        explicit = self.sizes[dim]
        if explicit is not None:
            return explicit
        return chunk_sizes(self.shape[dim], tuple(self.mesh.shape[axis] for axis in self.splits[dim]))

    def intervals(self, dim: int) -> tuple[tuple[int, int], ...]:
        """Start and stop of all pieces of a dim, in the same order."""
        return intervals(self.pieces(dim))

    @cached_property
    def _cuts(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Sizes and starts of all pieces, per dim."""
        return tuple((pieces, offsets(pieces)) for pieces in map(self.pieces, range(len(self.shape))))

    def piece_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which piece of a dim the rank at `coordinate` holds."""
        index = 0
        for axis in self.splits[dim]:
            index = index * self.mesh.shape[axis] + coordinate[axis]
        return index

    def box(self, coordinate: Sequence[int]) -> Box:
        """Start and size of the shard at a coordinate, per dim."""
        starts, extents = [], []
        for dim, (pieces, begins) in enumerate(self._cuts):
            index = self.piece_index(dim, coordinate)
            starts.append(begins[index])
            extents.append(pieces[index])
        return tuple(starts), tuple(extents)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        return self.box(coordinate)[1]

    @cached_property
    def held_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The local shapes of the ranks held in this process."""
        return tuple(self.local_shape(coordinate) for coordinate in self.mesh.held)

    @cached_property
    def held_starts(self) -> tuple[tuple[int, ...], ...]:
        """Where the shards of the ranks held in this process start, per dim."""
        return tuple(self.box(coordinate)[0] for coordinate in self.mesh.held)

    def held_intervals(self, dim: int) -> list[tuple[int, int]]:
        """Start and stop of a dim on the ranks held in this process."""
        pieces = self.intervals(dim)
        return [pieces[self.piece_index(dim, coordinate)] for coordinate in self.mesh.held]

    @cached_property
    def largest_numel(self) -> int:
        """The most numbers that a shard may have: the same on all ranks."""
        return math.prod(max(self.pieces(dim)) for dim in range(len(self.shape)))

    @cached_property
    def has_empty(self) -> bool:
        """Whether some ranks hold nothing, though there is something."""
        return self.numel > 0 and any(0 in self.pieces(dim) for dim, axes in enumerate(self.splits) if axes)

    @cached_property
    def thinness(self) -> int:
        """How many dims some rank holds one index of where the whole has more; one of which it holds none counts twice.

        Strides of such dims say nothing about the strides of the global tensor.
        """
        least = [(min(self.pieces(dim)), self.shape[dim]) for dim, axes in enumerate(self.splits) if axes]
        return sum(max(2 - size, 0) for size, whole in least if size < whole)

    @cached_property
    def is_thin_in_places(self) -> bool:
        """Whether some ranks hold one index of a dim, or none, and others more than these."""
        pieces = [self.pieces(dim) for dim, axes in enumerate(self.splits) if axes]
        return any(min(sizes) < 2 and min(sizes) < max(sizes) for sizes in pieces)

    @cached_property
    def gradient(self) -> Layout:
        """The layout of a gradient: shards stay shards, a pending sum's gradient is whole on every rank.

        The other reductions split a gradient into terms that add up to it, whatever their own operator.
        """
        dual = [None if p is None or p.reduce_op == "sum" else SUM for p in self.pending]
        return self.with_(pending=dual)

    def with_(
        self,
        *,
        shape: Sequence[int] | None = None,
        splits: Sequence[tuple[int, ...]] | None = None,
        pending: Sequence[Partial | None] | None = None,
        sizes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> Layout:
        """The same layout with some parts replaced; new splits without new sizes are cut evenly."""
        if sizes is None and splits is None:
            sizes = self.sizes
        return Layout(
            self.mesh,
            self.shape if shape is None else shape,
            self.splits if splits is None else splits,
            self.pending if pending is None else pending,
            sizes,
        )

    def on(self, mesh: Mesh) -> Layout:
        """The same layout on another mesh of the same ranks, which has all axes that split it: replicated along the
        others."""
        names = self.mesh.names
        splits = tuple(tuple(mesh.axis(names[axis]) for axis in axes) for axes in self.splits)
        pending = tuple(self.pending[names.index(name)] if name in names else None for name in mesh.names)
        return Layout(mesh, self.shape, splits, pending, self.sizes)

    def __repr__(self) -> str:
        return f"Layout({self})"

    def __str__(self) -> str:
        """`[8,4] S(0)@tp`: global shape, then what each axis does; R axes are left out.

        >>> import shardwise
        >>> mesh = shardwise.simulate((2, 2), ("dp", "tp"))
        >>> str(Layout.of(mesh, (8, 4), {0: ("tp", "dp")}))
        '[8,4] S(0)@tp,dp'
        """
        names = self.mesh.names
        parts = []
        for dim, axes in enumerate(self.splits):
            if axes:
                explicit = self.sizes[dim]
                cut = "" if explicit is None else "=" + "+".join(map(str, explicit))
                parts.append(f"S({dim}{cut})@{','.join(names[axis] for axis in axes)}")
        parts += [f"{p}@{names[axis]}" for axis, p in enumerate(self.pending) if p]
        return f"[{','.join(map(str, self.shape))}] {' '.join(parts) or 'R'}"

    def __reduce__(self) -> tuple:
        return Layout, (self.mesh, self.shape, self.splits, self.pending, self.sizes)

    def __deepcopy__(self, memo: dict) -> Layout:
        return self


Placements = Sequence[Placement] | Mapping[int, str | tuple[str, ...]]


def replicated(mesh: Mesh, shape: Sequence[int]) -> Layout:
    return Layout(mesh, shape)


def _dim(dim: int, shape: Sequence[int], what: object) -> int:
    if not -len(shape) <= dim < len(shape):
        raise PlacementError(f"{what} names dim {dim}, but the tensor has {len(shape)} dims: {list(shape)}")
    return dim % len(shape)


def _splits_by_dim(
    mesh: Mesh, shape: Sequence[int], placements: Mapping[int, str | tuple[str, ...]]
) -> list[tuple[int, ...]]:
    splits: list[tuple[int, ...]] = [()] * len(shape)
    used: set[int] = set()
    for dim, names in placements.items():
        names = (names,) if isinstance(names, str) else tuple(names)
        at, axes = _dim(dim, shape, f"{{{dim}: {names}}}"), tuple(mesh.axis(name) for name in names)
        if splits[at]:
            raise PlacementError(f"{dict(placements)} names dim {at} twice; give all axes that split it in one tuple")
        if len(axes) > len(set(axes)) or used.intersection(axes):
            raise PlacementError(f"{dict(placements)} uses a mesh axis twice, but an axis splits one dim, once")
        splits[at] = axes
        used.update(axes)
    return splits


def _check_commute(pending: Sequence[Partial | None], placements: Sequence[Placement]) -> None:
    """Reductions over several axes must give one result in whatever order they are done: sums and averages do."""
    kinds = {SUM if p.reduce_op == "avg" else p for p in pending if p is not None}
    if len(kinds) > 1:
        raise PlacementError(
            f"{_show(placements)} mixes reductions whose order matters, and placements do not say which comes first; "
            f"redistribute one of them before the other begins"
        )


def unknown_placement(placement: object) -> PlacementError:
    """What is said of something that is no placement, or only named like one."""
    cls = type(placement)
    is_named_alike = cls.__name__ in ("Replicate", "Shard", "Partial")
    home = f" of {cls.__module__}; import {cls.__name__} from shardwise" if is_named_alike else ""
    return PlacementError(f"expected Replicate(), Shard(dim) or Partial(op), got {placement!r}{home}")


def _show(placements: Sequence[object]) -> str:
    return "[" + ", ".join(str(p) for p in placements) + "]"


def _canonical_sizes(
    mesh: Mesh, size: int, axes: tuple[int, ...], explicit: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Explicit sizes, or None where they are what `torch.chunk` would give."""
    if explicit is None:
        return None
    explicit, counts = tuple(explicit), tuple(mesh.shape[axis] for axis in axes)
    assert len(explicit) == math.prod(counts) and sum(explicit) == size, (explicit, size, counts)
    return None if explicit == chunk_sizes(size, counts) else explicit
