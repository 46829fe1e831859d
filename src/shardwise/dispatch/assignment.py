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
from shardwise.tensor import DTensor, distribute_tensor


@handles(Tensor.__setitem__)
def _set_item(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    x, index, value = args
    if not isinstance(x, DTensor):
        raise MixedTensorError("a part of a plain tensor cannot be set to a DTensor; use full_tensor()")
    try:
        _assign(x, index, value)
    except MixedTensorError:
        raise
    except Exception as error:
        raise torchs_own(error, func, args, {}) or error from None


def _assign(x: DTensor, index: Any, value: Any) -> None:
    items = _whole_index(x, _items(index, x))
    tensors = [item for item in items if isinstance(item, Tensor)]
    one_value = not isinstance(value, Tensor) or not value.dim()
    alone = one_value and len(tensors) == 1 and bool(tensors[0].dim()) and tensors[0].dtype == torch.bool
    basic: list[Any] = []  # what a view of the part is taken by, in which no dim is lost: an int is a slice there
    lost: list[int] = []
    chosen: list[Tensor | None] = []  # the indices in the dims of that view
    for item in items:
        if isinstance(item, int):
            lost.append(len(chosen))
            item = slice(item, item + 1)
        if not isinstance(item, Tensor):
            basic.append(item)
            chosen.append(None)
        elif not item.dim() and item.dtype == torch.bool:
            basic.append(None)
            chosen.append(distribute_tensor(torch.zeros(int(item.item()), dtype=torch.long), x._layout.mesh))
        else:
            basic += [slice(None)] * _num_dims(item)
            chosen += [item] if alone or item.dtype != torch.bool else item.nonzero().unbind(1)
    view: Any = x[tuple(basic)] if any(item != slice(None) for item in basic) else x
    if not tensors:
        _copy(view, lost, value)
    elif alone:
        _fill(view, chosen, value)
    elif one_value:
        _put(view, chosen, value)
    else:
        _put(view, chosen, _as_written(view, lost, [*chosen, *[None] * (view.ndim - len(chosen))], value))


# The index


def _items(index: Any, x: DTensor) -> list[Any]:
    """The items of an index: ints, slices, None, Ellipsis, and tensors of ints or bools."""
    found = []
    for item in index if _is_tuple(index) else (index,):
        if isinstance(item, Tensor) and not item.dim() and item.dtype != torch.bool:
            item = int(item.item())
        if item is None or item is Ellipsis or isinstance(item, (slice, Tensor)) or type(item) is int:
            found.append(item)
        elif not isinstance(item, bool) and hasattr(item, "__index__") and not getattr(item, "ndim", 0):
            found.append(operator.index(item))
        else:
            found.append(distribute_tensor(_indices(item), x._layout.mesh))
    return [item.bool() if isinstance(item, Tensor) and item.dtype == torch.uint8 else item for item in found]


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


def _indices(item: Any) -> Tensor:
    if isinstance(item, (float, str)):
        raise IndexError(f"{item!r} is no index")
    made = torch.as_tensor(item)
    return made if made.numel() or made.dtype == torch.bool else made.long()


def _whole_index(x: DTensor, items: list[Any]) -> list[Any]:
    """The items with an ellipsis written out, and ints counted from the front. A mask has the shape of its dims."""
    places = [0 if item is None or item is Ellipsis else _num_dims(item) for item in items]
    missing = x.ndim - sum(places)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    whole = [*items[:at], *[slice(None)] * missing, *(item for item in items[at:] if item is not Ellipsis)]
    dim = 0
    for position, item in enumerate(whole):
        if isinstance(item, int):
            size = x.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            whole[position] = item % size
        elif isinstance(item, Tensor) and item.dtype == torch.bool and item.shape != x.shape[dim : dim + item.dim()]:
            raise IndexError(f"the shape of the mask {list(item.shape)} does not match the tensor's at dimension {dim}")
        dim += 0 if item is None else _num_dims(item)
    return whole


def _num_dims(item: Any) -> int:
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


# Writing


def _copy(view: DTensor, lost: Sequence[int], value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
    elif not value.dim():
        view.copy_(value)
    else:
        value = _expanded(value, [size for dim, size in enumerate(view.shape) if dim not in lost])
        for dim in lost:
            value = value.unsqueeze(
                dim
            )  # a view with the same strides, for values that are the part itself: `x[i] *= 2`
        view.copy_(value)


def _expanded(value: Tensor, shape: Sequence[int]) -> Tensor:
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = value.squeeze(0)
    return value.expand(list(shape))


def _fill(view: DTensor, chosen: Sequence[Tensor | None], value: Any) -> None:
    """One value wherever a mask says so."""
    (at,) = (dim for dim, item in enumerate(chosen) if item is not None)
    mask: Any = chosen[at]
    view.masked_fill_(mask.reshape(*mask.shape, *[1] * (view.ndim - at - mask.dim())), value)


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
