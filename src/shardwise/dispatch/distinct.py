"""What is distinct in a tensor, and how often it is there: each rank knows it of what it holds, and little travels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.ranked import shards_of
from shardwise.dispatch.fallback import keeps_shards
from shardwise.dispatch.ragged import (
    Axes,
    axes_of,
    cut,
    in_order,
    joined,
    leading,
    lengths,
    mesh_of,
    on_mesh,
    shards_in,
    sizes_of,
    told,
    with_sizes,
)
from shardwise.dispatch.subscripts import everywhere
from shardwise.layout import Layout, Mesh, Partial
from shardwise.layout.sizes import offsets
from shardwise.redistribute import Group
from shardwise.rules.indices import padded
from shardwise.tensor import DTensor, wrap

aten = torch.ops.aten
_disabled = torch._C.DisableTorchFunctionSubclass


# How often


@keeps_shards(torch.bincount, Tensor.bincount, aten.bincount, aten.bincount.default)
def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> DTensor:
    """Each rank counts what it holds, as far as the largest number of all. The sum is pending."""
    mesh = mesh_of(x, weights)
    tensors = [on_mesh(tensor, mesh) for tensor in (x, weights) if tensor is not None]
    axes = axes_of(tensor._layout.splits[0] for tensor in tensors) if len(x) else ()
    sizes = sizes_of([(tensor._layout, 0) for tensor in tensors], axes)
    local = [shards_in(tensor, cut(tensor._layout, 0, axes, sizes, range(1))) for tensor in tensors]
    group = Group(mesh, axes, [])
    ends = told(group, group.map(_ends, local[0]))
    if min(low for low, _ in ends) < 0:
        torch.bincount(torch.tensor([-1]))  # torch refuses
    counts = group.map(_counts, max(minlength, *(high + 1 for _, high in ends)), len(x) > 0, *local)
    return _of_all(counts, _pending(mesh, axes))


def _ends(x: Tensor) -> Tensor:
    """The smallest number and the largest one."""
    return torch.stack(x.long().aminmax()) if x.numel() else torch.tensor([0, -1], device=x.device)


def _counts(length: int, some: bool, x: Tensor, weights: Tensor | None = None) -> Tensor:
    if x.numel() or not some:
        return torch.bincount(x, weights, minlength=length)
    if weights is None:
        return torch.zeros(length, dtype=torch.long, device=x.device)
    return torch.bincount(padded(x, [0]), padded(weights, [0]), minlength=length)  # zeros of the right dtype


@keeps_shards(torch.histogram, Tensor.histogram)
def _histogram(x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Each rank counts what it holds, over the range of all. The sum is pending."""
    if not x.numel():
        return NotImplemented
    mesh = mesh_of(x, bins, weight)
    x = on_mesh(x, mesh)
    if range is None and not isinstance(bins, Tensor):
        range = [end.item() for end in x.detach().aminmax()]
    layout = x._layout.with_(pending=[None] * mesh.ndim)
    edges = shards_in(on_mesh(bins, mesh), Layout(mesh, bins.shape)) if isinstance(bins, Tensor) else bins
    weights = None if weight is None else shards_in(on_mesh(weight, mesh), layout)
    local = Group(mesh, (), []).map(_histogram_here, shards_in(x, layout), edges, range, weights)
    hist, edges = _of_all(local[0], _pending(mesh, axes_of(layout.splits))), _of_all(local[1], _pending(mesh, ()))
    return torch.return_types.histogram((hist / (hist.sum() * edges.diff()) if density else hist, edges))


def _histogram_here(x: Tensor, bins: Any, range: Any, weight: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(torch.histogram(x, bins, weight=weight, **({} if range is None else {"range": range})))


def _pending(mesh: Mesh, axes: Axes) -> Layout:
    """The layout of any number of numbers that every rank has, to be added up over some axes."""
    return Layout(mesh, (0,), pending=[Partial("sum") if axis in axes else None for axis in range(mesh.ndim)])


def _of_all(local: Tensor, like: Layout, dim: int = 0) -> DTensor:
    """What is equally long on all ranks."""
    return joined(Group(like.mesh, (), []), local, dim, like)


@keeps_shards(F.one_hot)
def _one_hot(x: Any, num_classes: int = -1) -> Tensor:
    """As many classes as the largest number says."""
    low, high = (int(end) for end in x.aminmax())
    if low < 0:
        F.one_hot(torch.tensor([low]))  # torch refuses
    return F.one_hot(x, high + 1)


# What is distinct


@keeps_shards(torch.unique, Tensor.unique)
def _unique(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Of what is distinct on each rank, what is distinct. Only that is gathered."""
    if dim is not None and x.shape[dim] == 1:
        return _one(x, return_inverse, return_counts)
    layout = x._layout.with_(pending=[None] * x._layout.mesh.ndim)
    layout = layout if dim is None else in_order(layout, dim % x.ndim)
    axes, along = axes_of(layout.splits), 0 if dim is None else dim % x.ndim
    group = Group(layout.mesh, axes, [])
    values, inverse, counts = group.map(_distinct, shards_in(x, layout), dim, sorted, return_inverse, return_counts)
    if axes:
        sizes = lengths(group, values, along)
        if dim is None and not (return_inverse or return_counts) and sum(sizes) > x.numel() // group.size:
            parts = wrap(values, with_sizes(Layout(layout.mesh, (0,), (axes,)), 0, sizes))
            return _unique_consecutive(parts.sort().values)  # so many that no rank should hold them all
        values, places, _ = group.map(_distinct, group.gather(values, along, sizes), dim, sorted, True, False)
        if return_inverse:
            inverse = group.map(_looked_up, places, inverse, group.index(), offsets(sizes))
        if return_counts:
            counts = group.map(_added, places, group.gather(counts, 0, sizes), values, along)
    out = [_of_all(values, Layout(layout.mesh, (0,) if dim is None else x.shape), along)]
    if return_inverse:
        out.append(wrap(inverse, _of_elements(layout, dim)))
    if return_counts:
        out.append(wrap(counts, Layout(layout.mesh, (out[0].shape[along],))))
    return tuple(out) if len(out) > 1 else out[0]


def _one(x: Any, return_inverse: bool, return_counts: bool) -> Any:
    """Something that has only one part, which is distinct, wherever the other dims are cut."""
    asked = [number for number, wanted in ((0, return_inverse), (1, return_counts)) if wanted]
    numbers = [everywhere(torch.tensor([number]), x._layout.mesh) for number in asked]
    return (x.clone(), *numbers) if numbers else x.clone()


def _distinct(x: Tensor, dim: int | None, *flags: bool) -> tuple[Tensor, Tensor, Tensor]:
    return aten._unique2(x, *flags) if dim is None else aten.unique_dim(x, dim, *flags)


def _looked_up(places: Tensor, inverse: Tensor, index: int, starts: Sequence[int]) -> Tensor:
    return places[inverse + starts[index]]


def _added(places: Tensor, counts: Tensor, values: Tensor, dim: int) -> Tensor:
    return counts.new_zeros(values.shape[dim]).index_add(0, places, counts)


def _of_elements(layout: Layout, dim: int | None) -> Layout:
    """The layout of something about each element of a tensor, or about each part of it along `dim`."""
    if dim is None:
        return layout
    return Layout(layout.mesh, (layout.shape[dim],), (layout.splits[dim],), sizes=(layout.sizes[dim],))


# What is distinct from what comes before it


@keeps_shards(torch.unique_consecutive, Tensor.unique_consecutive)
def _unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Each rank's runs. One that only goes on from a rank before belongs to that."""
    if dim is not None and x.shape[dim] == 1:
        return _one(x, return_inverse, return_counts)
    layout = in_order(x._layout, leading(x.shape) if dim is None else dim % x.ndim)
    mesh, axes, along = layout.mesh, axes_of(layout.splits), 0 if dim is None else dim % x.ndim
    group = Group(mesh, axes, [])
    values, inverse, counts = group.map(torch.unique_consecutive, shards_in(x, layout), True, True, dim)
    firsts = told(group, group.map(_first_run, counts))
    goes_on = _going_on(group, values, along, [runs for runs, _ in firsts])
    sizes = tuple(runs - on for (runs, _), on in zip(firsts, goes_on, strict=True))
    more = _more(sizes, goes_on, [length for _, length in firsts])
    own = values, inverse, counts, along, group.index(), goes_on, offsets(sizes), more
    values, inverse, counts = group.map(_settled, *own)
    shape = (0,) if dim is None else x.shape
    splits = [axes if d == along else () for d in range(len(shape))]
    out = [wrap(values, with_sizes(Layout(mesh, shape, splits), along, sizes))]
    if return_inverse:
        out.append(wrap(inverse, _of_elements(layout, dim)))
    if return_counts:
        out.append(wrap(counts, with_sizes(Layout(mesh, (0,), (axes,)), 0, sizes)))
    return tuple(out) if len(out) > 1 else out[0]


def _first_run(counts: Tensor) -> Tensor:
    """How many runs there are, and how long the first one is."""
    return torch.cat([counts.new_tensor([len(counts)]), counts[:1] if len(counts) else counts.new_zeros(1)])


def _going_on(group: Group, values: Tensor, dim: int, num_runs: Sequence[int]) -> list[bool]:
    """For each rank, whether its first run is that with which the ranks before end."""
    if group.size == 1:
        return [False]
    edges = group.stack(group.map(_edges, values, dim))
    some = [rank for rank, runs in enumerate(num_runs) if runs]
    with _disabled():
        ends = shards_of(edges)[0]
        same = {rank: bool((ends[rank, 0] == ends[before, 1]).all()) for before, rank in pairwise(some)}
    return [same.get(rank, False) for rank in range(group.size)]


def _edges(values: Tensor, dim: int) -> Tensor:
    """The first element and the last one."""
    if values.shape[dim]:
        return torch.stack([values.select(dim, 0), values.select(dim, -1)])
    return values.new_zeros((2, *values.shape[:dim], *values.shape[dim + 1 :]))


def _more(sizes: Sequence[int], goes_on: Sequence[bool], firsts: Sequence[int]) -> list[int]:
    """By how much each rank's last run goes on."""
    found, last = [0] * len(sizes), 0
    for rank, size in enumerate(sizes):
        if goes_on[rank]:
            found[last] += firsts[rank]
        last = rank if size else last
    return found


def _settled(
    values: Tensor,
    inverse: Tensor,
    counts: Tensor,
    dim: int,
    index: int,
    goes_on: Sequence[bool],
    starts: Sequence[int],
    more: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    skipped = int(goes_on[index])
    counts = counts[skipped:].clone()
    counts[-1:] += more[index]
    values = values.narrow(dim, skipped, values.shape[dim] - skipped).clone() if skipped else values
    return values, inverse + (starts[index] - skipped), counts
