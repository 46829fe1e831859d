"""How often something is there. Each rank counts what it holds, and the sum is pending."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.dispatch.fallback import forms, keeps_shards
from shardwise.dispatch.ragged import (
    Axes,
    axes_of,
    cut,
    joined,
    leading,
    mesh_of,
    on_mesh,
    shards_in,
    sizes_of,
    told,
)
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import Group
from shardwise.rules.indices import padded
from shardwise.tensor import DTensor, wrap

aten = torch.ops.aten


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
    return of_all(counts, _pending(mesh, axes))


def _ends(x: Tensor) -> Tensor:
    """The smallest number and the largest one."""
    return torch.stack(x.long().aminmax()) if x.numel() else torch.tensor([0, -1], device=x.device)


def _counts(length: int, some: bool, x: Tensor, weights: Tensor | None = None) -> Tensor:
    if x.numel() or not some:
        return torch.bincount(x, weights, minlength=length)
    if weights is None:
        return torch.zeros(length, dtype=torch.long, device=x.device)
    return torch.bincount(padded(x, [0]), padded(weights, [0]), minlength=length)  # zeros of the right dtype


@keeps_shards(torch.histogram, Tensor.histogram, *forms(aten.histogram))
def _histogram(x: Any, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
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
    hist, edges = of_all(local[0], _pending(mesh, axes_of(layout.splits))), of_all(local[1], _pending(mesh, ()))
    return torch.return_types.histogram((hist / (hist.sum() * edges.diff()) if density else hist, edges))


def _histogram_here(x: Tensor, bins: Any, range: Any, weight: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(torch.histogram(x, bins, weight=weight, **({} if range is None else {"range": range})))


@keeps_shards(torch.histogramdd, *forms(aten.histogramdd))
def _histogramdd(x: Any, bins: Any, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """The same for points: each rank has all coordinates of some."""
    if not x.numel() or x.ndim < 2:
        return NotImplemented
    mesh = mesh_of(x, bins, weight)
    x = on_mesh(x, mesh)
    bins = list(bins) if isinstance(bins, (list, tuple)) else [bins] * x.shape[-1]
    edges: Any = bins
    if isinstance(bins[0], Tensor):
        edges = [shards_in(on_mesh(one, mesh), Layout(mesh, one.shape)) for one in bins]
    elif range is None:
        range = _ranges(x.detach().flatten(0, -2))
    layout = _of_points(x._layout)
    if weight is not None:
        without = Layout(mesh, layout.shape[:-1], layout.splits[:-1], sizes=layout.sizes[:-1])
        weight = shards_in(on_mesh(weight, mesh), without)
    hist, *edges = Group(mesh, (), []).map(_histogramdd_here, shards_in(x, layout), edges, range, weight)
    edges = tuple(of_all(one, _pending(mesh, ())) for one in edges)
    shape, pending = [len(one) - 1 for one in edges], _pending(mesh, axes_of(layout.splits)).pending
    counts = wrap(hist, Layout(mesh, shape, pending=pending))
    return torch.return_types.histogramdd((_density(counts, edges) if density else counts, edges))


def _ranges(points: Any) -> list[float]:
    """The least and the greatest of each coordinate, one after another."""
    return torch.stack(points.aminmax(dim=0), 1).flatten().tolist()


def _of_points(layout: Layout) -> Layout:
    """A layout in which every point is whole: axes that cut coordinates cut points."""
    last = len(layout.shape) - 1
    first = leading(layout.shape[:last])
    axes = axes_of((layout.splits[first], layout.splits[last]))
    return cut(layout, first, axes, sizes_of([(layout, first)], axes), range(last, last + 1))


def _density(counts: Any, edges: tuple[Any, ...]) -> Any:
    density = counts / counts.sum()
    for dim, one in enumerate(edges):
        density = density / one.diff().reshape([-1 if d == dim else 1 for d in range(len(edges))])
    return density


def _histogramdd_here(x: Tensor, bins: Any, range: Any, weight: Tensor | None) -> tuple[Tensor, ...]:
    hist, edges = torch.histogramdd(x, bins, weight=weight, **({} if range is None else {"range": range}))
    return hist, *edges


@keeps_shards(torch._histogramdd_from_bin_cts, *forms(aten._histogramdd_from_bin_cts))
@keeps_shards(torch._histogramdd_from_bin_tensors, *forms(aten._histogramdd_from_bin_tensors))
def _histogramdd_counts(x: Any, bins: Any, **how: Any) -> Any:
    found = _histogramdd(x, bins, **how)
    return found if found is NotImplemented else found[0]


@keeps_shards(torch._histogramdd_bin_edges, *forms(aten._histogramdd_bin_edges))
def _histogramdd_bin_edges(x: Any, bins: Any, **how: Any) -> Any:
    found = _histogramdd(x, bins, **how)
    return found if found is NotImplemented else list(found[1])


def _pending(mesh: Mesh, axes: Axes) -> Layout:
    """The layout of any number of numbers that every rank has, to be added up over some axes."""
    return Layout(mesh, (0,), pending=[Partial("sum") if axis in axes else None for axis in range(mesh.ndim)])


def of_all(local: Tensor, like: Layout, dim: int = 0) -> DTensor:
    """What is equally long on all ranks."""
    return joined(Group(like.mesh, (), []), local, dim, like)


@keeps_shards(F.one_hot)
def _one_hot(x: Any, num_classes: int = -1) -> Tensor:
    """As many classes as the largest number says."""
    low, high = (int(end) for end in x.aminmax())
    if low < 0:
        F.one_hot(torch.tensor([low]))  # torch refuses
    return F.one_hot(x, high + 1)
