"""`x[index] = value`: what ints and slices name is a view of the shards, and is copied into. What tensors name is then
written in that view, by `index_put_`: each rank writes what falls into its piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.dispatch.aliasing.copied_views import storage_of
from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.functions.ragged import with_chosen
from shardwise.dispatch.functions.subscripts import in_full, is_mask, items_of, numbered, view_and_chosen
from shardwise.dispatch.interop.mixing import mixed
from shardwise.dispatch.modes import replicates_implicitly
from shardwise.dispatch.planning.trace import map_tensors
from shardwise.errors import InPlaceError, MixedTensorError
from shardwise.layout.sizes import broadcast_shape
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass


@handles(Tensor.__setitem__)
def _set_item(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    x, index, value = args
    if not isinstance(x, DTensor):
        if isinstance(x, Ranked) or not replicates_implicitly():
            raise MixedTensorError(
                "a part of a plain tensor cannot be set to a DTensor, nor named by one; use full_tensor() or, if every "
                "rank holds the same values, shardwise.experimental.implicit_replication()"
            )
        return func(x, map_tensors(index, _whole), map_tensors(value, _whole))
    try:
        items = in_full(x, items_of(index, x._layout.mesh))
        fills = _is_one(value) and _is_lone_mask(items)
        if not fills and _overwrite(x, items, value):
            return
        _assign(x, items if fills else numbered(items), value, fills=fills)
    except MixedTensorError:
        raise mixed(func, args, kwargs) from None  # what the user called, not what it is made of


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _assign(x: DTensor, items: Sequence[Any], value: Any, *, fills: bool) -> None:
    lost = [at for at, item in enumerate(items) if type(item) is int]  # dims of the view that the value does not have
    kept = [slice(item, item + 1) if type(item) is int else item for item in items]
    basic, chosen = view_and_chosen(kept, x._layout.mesh)
    view: Any = x[tuple(basic)] if any(item != slice(None) for item in basic) else x
    if value is view:  # as after `x[:] += 1`
        return
    value = _apart_from(x, value)
    if all(item is None for item in chosen):
        _copy(view, lost, value)
    elif fills:
        _fill(view, chosen, value)
    elif not isinstance(value, Tensor) or not value.dim():
        _put(view, chosen, value)
    else:
        _put(view, chosen, _as_written(view, lost, [*chosen, *[None] * (view.ndim - len(chosen))], value))


def _overwrite(x: DTensor, items: Sequence[Any], value: Any) -> bool:
    """`x[:, mask] = values`, as many as there are places: if each rank has its own, it writes them."""
    if not _is_lone_mask(items) or any(item != slice(None) for item in items if not isinstance(item, Tensor)):
        return False
    written = with_chosen(x, [item if isinstance(item, Tensor) else None for item in items], value)
    if written is None:
        return False
    x.copy_(written)
    return True


# The value


def _is_one(value: Any) -> bool:
    """Whether a value is one number, which torch fills the places of a mask with, in whatever dtype it is."""
    return not isinstance(value, Tensor) or value.numel() == 1


def _apart_from(x: DTensor, value: Any) -> Any:
    """The value; a copy where it is a part of what is written to. On one device torch refuses parts that overlap, but
    here only some ranks might see that they do. All ranks see whose storage it is."""
    shared = isinstance(value, DTensor) and storage_of(value) == storage_of(x)
    return value.clone() if shared else value


def _is_lone_mask(items: Sequence[Any]) -> bool:
    tensors = [item for item in items if isinstance(item, (Tensor, bool))]
    return len(tensors) == 1 and is_mask(tensors[0])


# Writing


def _copy(view: DTensor, lost: Sequence[int], value: Any) -> None:
    _refuse_expanded(view, range(view.ndim))
    if not isinstance(value, Tensor):
        view.fill_(value)
    elif not value.dim():
        view.copy_(value)
    else:
        value = _expanded(value, [size for dim, size in enumerate(view.shape) if dim not in lost])
        for dim in lost:
            value = value.unsqueeze(dim)
        view.copy_(value)


def _expanded(value: Tensor, shape: Sequence[int]) -> Tensor:
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = value.squeeze(0)
    return value.expand(list(shape))


def _fill(view: DTensor, chosen: Sequence[Tensor | None], value: Any) -> None:
    """One value wherever a mask says so."""
    (at,) = (dim for dim, item in enumerate(chosen) if item is not None)
    mask: Any = chosen[at]
    one = value.reshape(()) if isinstance(value, DTensor) else value
    view.masked_fill_(mask.reshape(*mask.shape, *[1] * (view.ndim - at - mask.dim())), one)


def _put(view: Any, indices: Sequence[Tensor | None], value: Any) -> None:
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=view.dtype)
    _refuse_expanded(view, [dim for dim in range(view.ndim) if dim >= len(indices) or indices[dim] is None])
    torch.ops.aten.index_put_.default(view, list(indices), value)


def _refuse_expanded(view: DTensor, dims: Iterable[int]) -> None:
    """Refuse dims along which all elements are one in memory (those of `expand`). On all ranks alike: a dim that is cut
    is not looked at, nor are strides that empty shards have by chance."""
    layout = view._layout
    with _disabled():
        steps, base = view.stride(), view._base
        if 0 in torch._C.TensorBase.size(view) and (base is None or not all(base.stride())):
            return
    if any(not steps[dim] and layout.shape[dim] > 1 and not layout.splits[dim] for dim in dims):
        raise InPlaceError(
            "more than one element of the written-to tensor refers to a single memory location, as after expand(). "
            "Nothing was changed; clone() the tensor first"
        )


def _as_written(view: DTensor, lost: Sequence[int], indices: Sequence[Tensor | None], value: Tensor) -> Tensor:
    """A value for the part that an index names, as one for the part of the view, in which no dim is lost."""
    common = broadcast_shape(*(item.shape for item in indices if item is not None))
    kept = [dim for dim in range(view.ndim) if dim not in lost]
    rest = [dim for dim in range(view.ndim) if indices[dim] is None]
    before, after = _first(kept, indices), _first(range(view.ndim), indices)
    shape = [view.shape[dim] for dim in rest if dim in kept]
    shape[before:before] = common
    value = _expanded(value, shape)
    if not lost:
        return value
    front = range(len(common))
    value = value.movedim([before + d for d in front], list(front))
    for position, dim in enumerate(rest):
        if dim in lost:
            value = value.unsqueeze(len(common) + position)
    return value.movedim(list(front), [after + d for d in front])


def _first(dims: Sequence[int], indices: Sequence[Tensor | None]) -> int:
    """Before which of the other dims the ones of the indices stand: in their place if they are side by side."""
    at = [position for position, dim in enumerate(dims) if indices[dim] is not None]
    return at[0] if at[-1] - at[0] == len(at) - 1 else 0
