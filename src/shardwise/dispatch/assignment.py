"""`x[index] = value`: what ints and slices name is a view of the shards, and is copied into. What tensors name is then
written in that view, by `index_put_`: each rank writes what falls into its piece."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.special import handles
from shardwise.dispatch.stand_ins import torchs_own
from shardwise.errors import MixedTensorError
from shardwise.layout import Mesh
from shardwise.tensor import DTensor, distribute_tensor

_disabled = torch._C.DisableTorchFunctionSubclass


@handles(Tensor.__setitem__)
def _set_item(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    x, index, value = args
    if not isinstance(x, DTensor):
        raise MixedTensorError("a part of a plain tensor cannot be set to a DTensor; use full_tensor()")
    known: Any = index
    try:
        items = _whole_index(x, _items(index, x._layout.mesh))
        fills = _is_one(value) and _is_lone_mask(items)
        items = items if fills else _numbered(items)
        known = tuple(items)
        _assign(x, items, _apart_from(x, value), fills=fills)
    except MixedTensorError:
        raise
    except Exception as error:
        raise torchs_own(error, func, (x, known, value), {}) or error from None


def _assign(x: DTensor, items: Sequence[Any], value: Any, *, fills: bool) -> None:
    basic: list[Any] = []  # what a view of the part is taken by, in which no dim is lost: an int is a slice there
    lost: list[int] = []
    chosen: list[Tensor | None] = []  # what tensors choose in the dims of that view; a mask stands for all of its dims
    for item in items:
        if type(item) is int:
            lost.append(len(chosen))
            item = slice(item, item + 1)
        if isinstance(item, Tensor):
            basic += [slice(None)] * _num_dims(item)
            chosen.append(item)
        elif isinstance(item, bool):
            basic.append(None)
            chosen.append(_everywhere(torch.zeros(int(item), dtype=torch.long), x._layout.mesh))
        else:
            basic.append(item)
            chosen.append(None)
    view: Any = x[tuple(basic)] if any(item != slice(None) for item in basic) else x
    if all(item is None for item in chosen):
        _copy(view, lost, value)
    elif fills:
        _fill(view, chosen, value)
    elif not isinstance(value, Tensor) or not value.dim():
        _put(view, chosen, value)
    else:
        _put(view, chosen, _as_written(view, lost, [*chosen, *[None] * (view.ndim - len(chosen))], value))


# The value


def _is_one(value: Any) -> bool:
    """Whether a value is one number, which torch fills the places of a mask with, in whatever dtype it is."""
    return not isinstance(value, Tensor) or value.numel() == 1


def _apart_from(x: DTensor, value: Any) -> Any:
    """The value; a copy where it is a part of what is written to. On one device torch refuses parts that overlap, but
    here only some ranks might see that they do. All ranks see whose storage it is."""
    with _disabled():
        shared = isinstance(value, DTensor) and _storage(value) == _storage(x)
    return value.clone() if shared else value


def _storage(x: DTensor) -> int:
    return x.untyped_storage()._cdata


# The index


def _items(index: Any, mesh: Mesh) -> list[Any]:
    """The items of an index: ints, bools, slices, None, Ellipsis, and tensors of numbers or masks."""
    found = []
    for item in index if _is_tuple(index) else (index,):
        if not isinstance(item, (Tensor, slice, int)) and item is not None and item is not Ellipsis:
            item = operator.index(item) if _is_whole_number(item) else _everywhere(_indices(item), mesh)
        if isinstance(item, Tensor) and not item.dim() and not (item.is_floating_point() or item.is_complex()):
            item = bool(item.item()) if _is_mask(item) else int(item.item())
        found.append(item)
    return found


def _is_tuple(index: Any) -> bool:
    """Whether torch takes a sequence for several items: in some versions, a list that holds anything but numbers."""
    if isinstance(index, tuple):
        return True
    if not isinstance(index, list) or len(index) >= 32 or not _lists_are_tuples():
        return False
    return any(item is None or item is Ellipsis or isinstance(item, (slice, Tensor, list, tuple)) for item in index)


@cache
def _lists_are_tuples() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1)[[[0], [0]]].dim() == 1


def _is_whole_number(item: Any) -> bool:
    return hasattr(item, "__index__") and not getattr(item, "ndim", 0)


def _indices(item: Any) -> Tensor:
    made = torch.as_tensor(item)
    if not made.dim():
        raise IndexError(f"{item!r} is no index")
    return made if made.numel() or made.dtype == torch.bool else made.long()


def _everywhere(indices: Tensor, mesh: Mesh) -> DTensor:
    """Numbers of the program, which every rank has: nothing is sent."""
    return distribute_tensor(indices, mesh, src_data_rank=None)


def _whole_index(x: DTensor, items: list[Any]) -> list[Any]:
    """The items with an ellipsis written out, and ints counted from the front. A mask has the shape of its dims."""
    missing = x.ndim - sum(map(_num_dims, items))
    at = [position for position, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if missing < 0 or (missing and len(at) > 1):
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    after = [item for item in items[at[0] :] if item is not Ellipsis]
    whole = [*items[: at[0]], *[slice(None)] * missing, *after]
    dim = 0
    for position, item in enumerate(whole):
        if type(item) is int:
            size = x.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            whole[position] = item % size
        elif _is_mask(item) and item.shape != x.shape[dim : dim + item.dim()]:
            raise IndexError(f"the shape of the mask {list(item.shape)} does not match the tensor's at dimension {dim}")
        dim += _num_dims(item)
    return whole


def _numbered(items: Sequence[Any]) -> list[Any]:
    """The items with masks written out as the numbers of their places."""
    return [one for item in items for one in (item.nonzero().unbind(1) if _is_mask(item) else (item,))]


def _is_lone_mask(items: Sequence[Any]) -> bool:
    tensors = [item for item in items if isinstance(item, (Tensor, bool))]
    return len(tensors) == 1 and _is_mask(tensors[0])


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _num_dims(item: Any) -> int:
    """How many dims of the tensor an item stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if _is_mask(item) else 1


# Writing


def _copy(view: DTensor, lost: Sequence[int], value: Any) -> None:
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


def _put(view: DTensor, indices: Sequence[Tensor | None], value: Any) -> None:
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=view.dtype)
    torch.ops.aten.index_put_.default(view, list(indices), value)


def _as_written(view: DTensor, lost: Sequence[int], indices: Sequence[Tensor | None], value: Tensor) -> Tensor:
    """A value for the part that an index names, as one for the part of the view, in which no dim is lost."""
    common = torch.broadcast_shapes(*(item.shape for item in indices if item is not None))
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
