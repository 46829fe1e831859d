"""Indices as users write them in `x[…]`: one item for every part, with nothing left to say."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Mesh
from shardwise.tensor import DTensor, distribute_tensor


def items_of(index: Any, mesh: Mesh) -> list[Any]:
    """The items of an index: ints, bools, slices, None, Ellipsis, and tensors of numbers or masks."""
    found = []
    for item in index if _is_tuple(index) else (index,):
        if not isinstance(item, (Tensor, slice, int)) and item is not None and item is not Ellipsis:
            item = operator.index(item) if _is_whole_number(item) else everywhere(_indices(item), mesh)
        if isinstance(item, Tensor) and not item.dim() and not (item.is_floating_point() or item.is_complex()):
            item = bool(item.item()) if is_mask(item) else int(item.item())
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


def everywhere(indices: Tensor, mesh: Mesh) -> DTensor:
    """Numbers of the program, which every rank has: nothing is sent."""
    return distribute_tensor(indices, mesh, src_data_rank=None)


def in_full(x: DTensor, items: list[Any]) -> list[Any]:
    """The items with an ellipsis written out, and ints counted from the front. A mask has the shape of its dims."""
    missing = x.ndim - sum(map(num_dims, items))
    at = [position for position, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if missing < 0 or (missing and len(at) > 1):
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    after = [item for item in items[at[0] :] if item is not Ellipsis]
    found = [*items[: at[0]], *[slice(None)] * missing, *after]
    dim = 0
    for position, item in enumerate(found):
        if type(item) is int:
            size = x.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            found[position] = item % size
        elif is_mask(item) and item.shape != x.shape[dim : dim + item.dim()]:
            raise IndexError(f"the shape of the mask {list(item.shape)} does not match the tensor's at dimension {dim}")
        dim += num_dims(item)
    return found


def view_and_chosen(items: Sequence[Any], mesh: Mesh) -> tuple[list[Any], list[Tensor | None]]:
    """What a view of the part is taken by, and what tensors choose in each dim of that view: a mask in all of its dims,
    True and False by numbers in a dim of their own."""
    basic: list[Any] = []
    chosen: list[Tensor | None] = []
    for item in items:
        if isinstance(item, Tensor):
            basic += [slice(None)] * num_dims(item)
            chosen.append(item)
        elif isinstance(item, bool):
            basic.append(None)
            chosen.append(everywhere(torch.zeros(int(item), dtype=torch.long), mesh))
        else:
            basic.append(item)
            chosen += [] if type(item) is int else [None]
    return basic, chosen


def numbered(items: Sequence[Any]) -> list[Any]:
    """The items with masks written out as the numbers of their places."""
    return [one for item in items for one in (item.nonzero().unbind(1) if is_mask(item) else (item,))]


def is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def num_dims(item: Any) -> int:
    """How many dims of the tensor an item stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if is_mask(item) else 1
