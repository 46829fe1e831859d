"""Calls whose results are as long as the data say: where something is, what a mask chooses, how often it is there.

Each rank looks at what it holds, and the parts come in the order of the tensor if the ranks hold it in that order: if
only the leading dim is cut. So axes that cut another dim are moved there, which costs less than a gather. Then the
ranks tell each other, in eight bytes each, how much they have found: the result is cut into pieces of these sizes, and
stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.cause import watchers
from shardwise.comm.ranked import per_rank, shards_of
from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.functions.subscripts import in_full, is_mask, items_of, num_dims, numbered, view_and_chosen
from shardwise.dispatch.planning.fallback import keeps_shards
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.dispatch.watch import unplanned
from shardwise.layout import SUM, Layout, Mesh
from shardwise.layout.sizes import broadcast_shape
from shardwise.redistribute import Group, plan_moves
from shardwise.rules.kit.indices import padded
from shardwise.tensor import DTensor, as_layout, localise, wrap

aten = torch.ops.aten
Axes = tuple[int, ...]
Sizes = tuple[int, ...] | None
_disabled = torch._C.DisableTorchFunctionSubclass


# Cuts of one dim


def leading(shape: Sequence[int]) -> int:
    """The dim that decides about order before all others: the first that is longer than one."""
    return next((dim for dim, size in enumerate(shape) if size > 1), 0)


def axes_of(cuts: Iterable[Axes], but: Iterable[Axes] = ()) -> Axes:
    """The axes of some cuts, in order, without those of others."""
    taken = {axis for axes in but for axis in axes}
    return tuple(dict.fromkeys(axis for axes in cuts for axis in axes if axis not in taken))


def sizes_of(layouts: Iterable[tuple[Layout, int]], axes: Axes) -> Sizes:
    """The sizes in which some tensor's dim is cut by the axes already: it need not be moved."""
    return next((layout.sizes[dim] for layout, dim in layouts if axes and layout.splits[dim] == axes), None)


def cut(layout: Layout, dim: int, axes: Axes, sizes: Sizes, dims: range, *, pending: bool = False) -> Layout:
    """A layout with `dim` cut by `axes`, and the others of `dims` not. `pending` keeps what is pending."""
    splits = [axes if d == dim else () if d in dims else split for d, split in enumerate(layout.splits)]
    pieces = [sizes if d == dim else None if d in dims else size for d, size in enumerate(layout.sizes)]
    left = [p if pending and axis not in axes else None for axis, p in enumerate(layout.pending)]
    return layout.with_(splits=splits, sizes=pieces, pending=left)


def in_order(layout: Layout, dim: int) -> Layout:
    """A layout in which ranks hold a tensor in the order of `dim`: all axes cut that one."""
    axes = axes_of((*layout.splits[dim : dim + 1], *layout.splits))
    return cut(layout, dim, axes, sizes_of([(layout, dim)], axes), range(len(layout.shape)))


# Shards and what their ranks tell each other


def shards_in(x: DTensor, layout: Layout) -> Tensor:
    """The shards of a tensor that is brought into a layout."""
    if watchers and x._layout.shape == layout.shape:
        unplanned(x, plan_moves(x._layout, layout))
    return localise(as_layout(x, layout, "input"))


def gathered_numbers(group: Group, mine: Tensor) -> list[Any]:
    """A few numbers of every rank. Groups beside each other hold the same shards, so all get the same."""
    all_of_them = group.stack(mine) if group.size > 1 else mine.unsqueeze(0)
    with _disabled():
        return shards_of(all_of_them)[0].tolist()


def lengths(group: Group, local: Tensor, dim: int) -> tuple[int, ...]:
    """How long the ranks' parts are."""
    return tuple(gathered_numbers(group, group.map(lambda x: torch.tensor(x.shape[dim], device=x.device), local)))


def joined(group: Group, local: Tensor, dim: int, like: Layout) -> DTensor:
    """Parts that are as long in `dim` as the ranks have found, as one tensor, otherwise laid out as `like`."""
    return wrap(local, with_sizes(like, dim, lengths(group, local, dim)))


def with_sizes(layout: Layout, dim: int, sizes: Sequence[int]) -> Layout:
    """A layout with pieces of these sizes in `dim`, as long as they are together."""
    shape = [sum(sizes) if d == dim else size for d, size in enumerate(layout.shape)]
    pieces = [tuple(sizes) if d == dim and layout.splits[d] else size for d, size in enumerate(layout.sizes)]
    return Layout(layout.mesh, shape, layout.splits, layout.pending, pieces)


def mesh_of(*args: Any) -> Mesh:
    return next(x._layout.mesh for x in flat_tensors(args) if isinstance(x, DTensor))


def on_mesh(x: Tensor, mesh: Mesh) -> Any:
    """A DTensor. A plain tensor that has come so far is the same on all ranks."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh)


# Where something is


@keeps_shards(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, aten.nonzero, aten.nonzero.default)
def _nonzero(x: Any, *, as_tuple: bool = False) -> Any:
    if as_tuple:
        return _nonzero(x if x.ndim else x.unsqueeze(0)).unbind(1)
    mask = x if x.dtype == torch.bool else x != 0  # one byte each, should they have to move
    dim = leading(x.shape)
    layout = in_order(mask._layout, dim)
    axes = axes_of(layout.splits)
    group = Group(layout.mesh, axes, [layout])
    places = shards_in(mask, layout).nonzero()
    if axes:
        places = group.map(_shifted, places, dim, group.offset(0, dim))
    return joined(group, places, 0, Layout(layout.mesh, (0, x.ndim), (axes, ())))


def _shifted(places: Tensor, dim: int, offset: int) -> Tensor:
    places[:, dim] += offset
    return places


@keeps_shards(torch.where, aten.where.default)
def _where(x: Any) -> Any:
    return _nonzero(x, as_tuple=True)


# What a mask chooses


@keeps_shards(torch.masked_select, Tensor.masked_select, aten.masked_select, aten.masked_select.default)
def _masked_select(x: Any, mask: Any) -> DTensor:
    mesh = mesh_of(x, mask)
    shape = broadcast_shape(x.shape, mask.shape, (1,))
    return _chosen(on_mesh(x, mesh).expand(shape), on_mesh(mask, mesh).expand(shape), 0)


@keeps_shards(Tensor.__getitem__)
def _get_item(x: Any, index: Any) -> Any:
    """What ints and slices name is a view. What tensors choose is then taken from it."""
    mesh = mesh_of(x, index)
    x = on_mesh(x, mesh)
    basic, chosen = view_and_chosen(in_full(x, items_of(index, mesh)), mesh)
    return _index(x[tuple(basic)] if any(item != slice(None) for item in basic) else x, chosen)


@keeps_shards(aten.index, aten.index.Tensor)
def _index(x: Any, indices: Sequence[Any]) -> Any:
    mesh = mesh_of(x, indices)
    x, items = on_mesh(x, mesh), [None if item is None else on_mesh(item, mesh) for item in indices]
    chosen = [(at, item) for at, item in enumerate(items) if item is not None]
    if any(is_mask(item) and not item.ndim for _, item in chosen):
        return NotImplemented
    if len(chosen) == 1 and is_mask(chosen[0][1]):
        ((at, mask),) = chosen
        return _chosen(x, mask.bool(), at)
    return aten.index.Tensor(x, numbered(items))


class _Choice:
    """`x[:, …, mask]`, where the mask stands for the dims of `x` from `at` on: their layouts when each rank chooses for
    itself. The other dims are free: ranks along an axis that cuts one of them look at the same part of the mask."""

    def __init__(self, x: Any, mask: Any, at: int) -> None:
        dims, dim = range(at, at + mask.ndim), at + leading(mask.shape)
        have, look = x._layout, mask._layout
        cuts = (have.splits[dim], look.splits[dim - at], *have.splits[at : dims.stop], *look.splits)
        axes = axes_of(cuts, but=(*have.splits[:at], *have.splits[dims.stop :]))
        sizes = sizes_of([(have, dim), (look, dim - at)], axes)
        self.at = at
        self.layout = cut(have, dim, axes, sizes, dims, pending=True)
        self.group = Group(have.mesh, axes, [])
        self.mask = shards_in(mask, cut(look, dim - at, axes, sizes, range(mask.ndim)))
        parts = ((self.layout.shape, 0), (self.layout.splits, axes), (self.layout.sizes, None))
        shape, splits, pieces = ((*of[:at], here, *of[dims.stop :]) for of, here in parts)
        self.found = Layout(have.mesh, shape, splits, self.layout.pending, pieces)

    def index(self, mask: Tensor) -> list[Tensor | None]:
        return [*[None] * self.at, mask]


def _chosen(x: Any, mask: Any, at: int) -> DTensor:
    choice = _Choice(x, mask, at)
    local = choice.group.map(
        lambda x, m: aten.index.Tensor(x, choice.index(m)), shards_in(x, choice.layout), choice.mask
    )
    return joined(choice.group, local, at, choice.found)


def with_chosen(x: Any, indices: Sequence[Any], values: Any) -> Any:
    """`x` with other values where a mask says so, if that is all that chooses and each rank has its own values, or can
    be sent them: those of a result of the same mask have this layout already."""
    ((at, mask), *others) = ((at, item) for at, item in enumerate(indices) if item is not None)
    if others or not is_mask(mask) or not isinstance(values, DTensor) or values.dtype != x.dtype:
        return None
    mask = on_mesh(mask, x._layout.mesh).bool()
    choice = _Choice(x, mask, at)
    if choice.layout is not x._layout or x._layout.has_pending or values.ndim != len(choice.found.shape):
        return None
    counts = gathered_numbers(choice.group, choice.mask.count_nonzero())
    wanted = with_sizes(choice.found, at, counts)
    if wanted.shape != values.shape:
        return None
    shapes = per_rank(choice.layout.held_shapes)
    dense = choice.group.map(
        lambda v, m, shape: aten.index_put.default(v.new_zeros(shape), choice.index(m), v),
        shards_in(values, wanted),
        choice.mask,
        shapes,
    )
    rest = [1] * (x.ndim - at - mask.ndim)
    return torch.where(mask.reshape(*mask.shape, *rest), wrap(dense, choice.layout), x)


@handles(torch.index_put, torch.index_put_, Tensor.index_put, Tensor.index_put_)
def _index_put(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """As many values as a mask names places; or, at the numbers of the places that masks name."""
    if len(args) < 2 or not any(is_mask(item) and item.dim() for item in args[1]):
        return NotImplemented
    if not _fit(*args[:2]):
        raise IndexError("a mask has another shape than what it is a mask of")
    if len(args) == 3 and not kwargs and isinstance(args[0], DTensor):
        written = with_chosen(*args)
        if written is not None:
            return args[0].copy_(written) if func.__name__.endswith("_") else written
    return func(args[0], tuple(numbered(args[1])), *args[2:], **kwargs)


def _fit(x: Tensor, items: Sequence[Tensor | None]) -> bool:
    """Whether masks have the shape of the dims that they stand for."""
    dim = 0
    for item in items:
        if is_mask(item) and item.shape != x.shape[dim : dim + num_dims(item)]:  # type: ignore[union-attr]
            return False
        dim += 1 if item is None else num_dims(item)
    return True


# How often something is there


@keeps_shards(torch.bincount, Tensor.bincount, aten.bincount, aten.bincount.default)
def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> DTensor:
    """Each rank counts what it holds, as far as the largest number of all. The sum is pending."""
    mesh = mesh_of(x, weights)
    tensors = [on_mesh(tensor, mesh) for tensor in (x, weights) if tensor is not None]
    axes = axes_of(tensor._layout.splits[0] for tensor in tensors) if len(x) else ()
    sizes = sizes_of([(tensor._layout, 0) for tensor in tensors], axes)
    local = [shards_in(tensor, cut(tensor._layout, 0, axes, sizes, range(1))) for tensor in tensors]
    group = Group(mesh, axes, [])
    ends = gathered_numbers(group, group.map(_ends, local[0]))
    if min(low for low, _ in ends) < 0:
        torch.bincount(torch.tensor([-1]))  # torch refuses
    pending = [SUM if axis in axes else None for axis in range(mesh.ndim)]
    counts = group.map(_counts, max(minlength, *(high + 1 for _, high in ends)), len(x) > 0, *local)
    return joined(Group(mesh, (), []), counts, 0, Layout(mesh, (0,), pending=pending))


def _ends(x: Tensor) -> Tensor:
    """The smallest number and the largest one."""
    return torch.stack(x.long().aminmax()) if x.numel() else torch.tensor([0, -1], device=x.device)


def _counts(length: int, some: bool, x: Tensor, weights: Tensor | None = None) -> Tensor:
    if x.numel() or not some:
        return torch.bincount(x, weights, minlength=length)
    if weights is None:
        return torch.zeros(length, dtype=torch.long, device=x.device)
    return torch.bincount(padded(x, [0]), padded(weights, [0]), minlength=length)  # zeros of the right dtype


# Lengths of sequences in tensors. Torch reads them before anything else, which a trace cannot; all ranks must know all
# of them anyway, so they are read once, and the call is planned with numbers


def _with_numbers(function: Callable) -> Callable[..., Any]:
    def run(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [_numbers(input_lengths), _numbers(target_lengths)]
        return NotImplemented if None in numbers else function(log_probs, targets, *numbers, *args, **kwargs)

    return run


def _numbers(lengths: Any) -> list[int] | None:
    """What a tensor of integers holds; None where torch has something to complain about."""
    if not isinstance(lengths, Tensor) or lengths.dtype not in INTEGERS:
        return None
    return (lengths.full_tensor() if isinstance(lengths, DTensor) else lengths).flatten().tolist()


INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

for _function in (F.ctc_loss, torch.ctc_loss):
    keeps_shards(_function)(_with_numbers(_function))
