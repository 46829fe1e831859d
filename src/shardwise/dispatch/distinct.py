"""What is distinct in a tensor: each rank knows it of what it holds, and little travels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.ranked import shards_of
from shardwise.dispatch.counts import of_all
from shardwise.dispatch.fallback import forms, keeps_shards
from shardwise.dispatch.ragged import (
    axes_of,
    in_order,
    joined,
    leading,
    lengths,
    shards_in,
    told,
    with_sizes,
)
from shardwise.dispatch.subscripts import everywhere
from shardwise.layout import Layout
from shardwise.layout.sizes import offsets
from shardwise.redistribute import Group
from shardwise.tensor import DTensor, wrap

aten = torch.ops.aten
_disabled = torch._C.DisableTorchFunctionSubclass


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
        if dim is None and not return_inverse and sum(sizes) > x.numel() // group.size:
            parts = _row(group, group.map(torch.flatten, shards_in(x, layout)) if return_counts else values)
            return _unique_consecutive(parts.sort().values, False, return_counts)  # too many for one rank to hold
        values, places, _ = group.map(_distinct, group.gather(values, along, sizes), dim, sorted, True, False)
        if return_inverse:
            inverse = group.map(_looked_up, places, inverse, group.index(), offsets(sizes))
        if return_counts:
            counts = group.map(_added, places, group.gather(counts, 0, sizes), values, along)
    out = [of_all(values, Layout(layout.mesh, (0,) if dim is None else x.shape), along)]
    if return_inverse:
        out.append(wrap(inverse, _of_elements(layout, dim)))
    if return_counts:
        out.append(wrap(counts, Layout(layout.mesh, (out[0].shape[along],))))
    return tuple(out) if len(out) > 1 else out[0]


def _row(group: Group, local: Tensor) -> DTensor:
    """What the ranks have, one after another."""
    return joined(group, local, 0, Layout(group.mesh, (0,), (group.axes,)))


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


@keeps_shards(torch._unique2, *forms(aten._unique2))
def _unique2(x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    return _all_of(_unique(x, sorted, return_inverse, return_counts), (return_inverse, return_counts))


@keeps_shards(torch._unique, *forms(aten._unique))
def _unique1(x: Any, sorted: bool = True, return_inverse: bool = False) -> Any:
    return _all_of(_unique(x, sorted, return_inverse), (return_inverse,))


@keeps_shards(*forms(aten.unique_dim))
def _unique_dim(
    x: Any, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    asked = _asked(x, return_inverse, return_counts)
    return _all_of(_unique(x, sorted, *asked, dim), asked)


def _asked(x: Any, *flags: bool) -> tuple[bool, ...]:
    """On the CPU torch returns everything about a dim, asked for or not."""
    return tuple(flag or x.device.type == "cpu" for flag in flags)


def _all_of(found: Any, asked: Sequence[bool]) -> tuple[Any, ...]:
    """What ops return: nothing in the place of what was not asked for."""
    values, *rest = found if isinstance(found, tuple) else (found,)
    given = iter(rest)
    nothing = torch.empty(0, dtype=torch.long, device=values.device)
    return values, *(next(given) if flag else everywhere(nothing, values._layout.mesh) for flag in asked)


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


@keeps_shards(*forms(aten.unique_consecutive))
def _consecutive(x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    return _all_of(_unique_consecutive(x, return_inverse, return_counts, dim), (return_inverse, return_counts))


@keeps_shards(*forms(aten.unique_dim_consecutive))
def _dim_consecutive(x: Any, dim: int, return_inverse: bool = False, return_counts: bool = False) -> Any:
    asked = _asked(x, return_inverse, return_counts)
    return _all_of(_unique_consecutive(x, *asked, dim), asked)


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
