"""Reading at indices: gather, index, take, searches.

Dims that are not indexed are free, and so are the dims of the indices, which the output shares. Where the indexed dim
is sharded, each rank looks up the indices that fall into its part and contributes zeros for the others: the big tensor
stays where it is, and the result is pending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.empty import has_empty
from shardwise.rules.kit.indices import Bound, along, axes_of, guarded_call, not_empty, owned, wrapped
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import (
    PENDING,
    SUM,
    Call,
    Collectives,
    HeldValues,
    Local,
    Rule,
    Strategy,
    Value,
    replicated,
)
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import PROGRAM_COST

MASKS = (torch.bool, torch.uint8)


def looked_up(dtype: torch.dtype) -> Partial:
    """The pending reduction of terms of which all but one are zero."""
    return Partial("max") if dtype == torch.bool else SUM


# gather


def gather_sizes_agree(call: Call) -> bool:
    """Whether the index fits into the input in every dim but the indexed one (an empty index need not)."""
    x, index = call.inputs[:2]
    (dim,) = call.dims()
    return (
        bool(x.ndim)
        and x.ndim == index.ndim
        and all(d == dim or index.shape[d] <= size for d, size in enumerate(x.shape))
    )


def _gather(call: Call) -> list[Strategy]:
    """An index that is shorter than the input in some other dim reads the beginning of it."""
    x, index = call.inputs
    found = [replicated(call), Strategy((PENDING, None), (PENDING,))]
    if call["sparse_grad"] or not gather_sizes_agree(call):
        return found
    (dim,) = call.dims()
    found.append(Strategy((dim, None), (looked_up(x.dtype),)))
    for d in range(x.ndim):
        alike = d != dim and x.shape[d] == index.shape[d]
        found.append(Strategy((d if alike else None, d), (d,), PROGRAM_COST))
    return found


def _gather_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, index = call.inputs
    if not any(ins[1].splits) and (not x.ndim or not ins[0].splits[call.dims()[0]]) and not has_empty(ins):
        return None
    (dim,) = call.dims()
    shorter = [d for d in range(x.ndim) if d != dim and ins[1].splits[d] and x.shape[d] != index.shape[d]]
    begins = HeldValues(ins[1].held_starts)
    step = partial(_gather_here, shorter=shorter, split=bool(ins[0].splits[dim]))
    bound = Bound(0, x.shape[dim], any(ins[1].splits), partial(refuse_along, call, dim))
    found = guarded_call(call, step, [bound], ins, axes_of([ins[1]]))
    return Local(found.function, [*found.args[:3], x, dim, index, begins], groups=found.groups)


def _gather_here(
    starts: tuple[int, ...], x: Tensor, dim: int, index: Tensor, begins: tuple[int, ...], *, shorter: list, split: bool
) -> Tensor:
    for d in shorter:
        x = x.narrow(d, begins[d], index.shape[d])
    if not split:
        return x.gather(dim, index)
    mine, local = owned(index, starts[dim], x.shape[dim])
    x = not_empty(x, [dim])
    return x.gather(dim, local.clamp(0, x.shape[dim] - 1)).masked_fill(~mine, 0)


def refuse_along(call: Call, dim: int, index: int) -> None:
    """What torch says about an index that is not in `dim`."""
    shape = [call.inputs[0].shape[d] if d == dim else 1 for d in range(call.inputs[0].ndim)]
    one, at = torch.zeros([1] * len(shape), dtype=call.inputs[0].dtype), torch.tensor([index])
    match call.name.rstrip("_"):
        case "index_select":
            torch.index_select(one.expand(shape).contiguous(), dim, at)
        case "index_fill":
            one.expand(shape).index_fill(dim, at, 0)
        case "index_copy":
            one.expand(shape).index_copy(dim, at, one)
        case "index_reduce" if not call["include_self"] and not -shape[dim] <= index < shape[dim]:
            one.expand(shape).index_fill(dim, at, 0)
        case "index_reduce":
            torch.index_select(torch.zeros(shape[dim]), 0, at)
        case "index_add" if call["alpha"] != 1 or dim not in (0, len(shape) - 1) or len(shape) == 1:
            torch.index_select(torch.zeros(shape[dim]), 0, at)
        case _:
            one.expand(shape).gather(dim, at.reshape([1] * len(shape)))


register("gather", rule=Rule(_gather, _gather_local))


# index_select


def _index_select(call: Call) -> list[Strategy]:
    x, index = call.inputs
    found = [replicated(call), Strategy((PENDING, None), (PENDING,))]
    if not x.ndim:
        return found
    (dim,) = call.dims()
    found += [Strategy((d, None), (looked_up(x.dtype) if d == dim else d,)) for d in range(x.ndim)]
    return [*found, Strategy((None, 0), (dim,), PROGRAM_COST)] if index.ndim else found


def _index_select_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x = call.inputs[0]
    if not x.ndim or (not any(ins[1].splits) and not ins[0].splits[call.dims()[0]] and not has_empty(ins)):
        return None
    (dim,) = call.dims()
    step = partial(_select_here, split=bool(ins[0].splits[dim]))
    bound = Bound(0, x.shape[dim], any(ins[1].splits), partial(refuse_along, call, dim))
    return guarded_call(call, step, [bound], ins, axes_of([ins[1]]))


def _select_here(starts: tuple[int, ...], x: Tensor, dim: int, index: Tensor, *, split: bool) -> Tensor:
    if not split:
        return x.index_select(dim, index)
    dim %= x.ndim
    mine, local = owned(index, starts[dim], x.shape[dim])
    x = not_empty(x, [dim])
    return x.index_select(dim, local.clamp(0, x.shape[dim] - 1)).masked_fill(~along(mine, dim, x.ndim), 0)


register("index_select", rule=Rule(_index_select, _index_select_local))


# take: indices into the flattened tensor


def _take(call: Call) -> list[Strategy]:
    x, index = call.inputs
    found = [replicated(call), Strategy((PENDING, None), (PENDING,))]
    if x.numel:
        found += [Strategy((d, None), (looked_up(x.dtype),)) for d in range(x.ndim)]
    return [*found, *(Strategy((None, d), (d,), PROGRAM_COST) for d in range(index.ndim))]


def flat_bound(call: Call, index: Layout) -> Bound:
    count = call.inputs[0].numel
    return Bound(-count, count, any(index.splits), lambda bad: torch.zeros(()).expand(count).take(torch.tensor([bad])))


def _take_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[1].splits) and not any(ins[0].splits):
        return None
    step = partial(_take_here, shape=call.inputs[0].shape)
    return guarded_call(call, step, [flat_bound(call, ins[1])], ins, axes_of([ins[1]]))


def _take_here(starts: tuple[int, ...], x: Tensor, index: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    if x.shape == shape:
        return x.take(index)
    mine, local = owned_flat(index, starts, x.shape, shape)
    flat = not_empty(x.reshape(-1), [0])
    return flat.take(torch.where(mine, local, 0)).masked_fill(~mine, 0)


def owned_flat(
    index: Tensor, starts: Sequence[int], extents: Sequence[int], shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Which flat indices of a tensor fall into a box of it, and where in the flattened box."""
    left = wrapped(index, torch.Size(shape).numel())
    mine, flat, step = torch.ones_like(left, dtype=torch.bool), torch.zeros_like(left), 1
    for start, extent, size in zip(reversed(starts), reversed(extents), reversed(shape), strict=True):
        here, local = owned(left % size, start, extent)
        mine, flat, step, left = mine & here, flat + local * step, step * extent, left // size
    return mine, flat


register("take", rule=Rule(_take, _take_local))


# index: `x[i, :, j]`, with index tensors that broadcast


class Indexed:
    """The dims of `x[indices]`: which of the input are indexed, and where the indices' own dims stand in the output."""

    def __init__(self, x: Value, indices: Sequence[Value | None]) -> None:
        self.ndim = x.ndim
        self.at = {dim: index for dim, index in enumerate(indices) if index is not None}
        self.shape = torch.broadcast_shapes(*(index.shape for index in self.at.values()))
        dims = sorted(self.at)
        self.first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        self.free = [dim for dim in range(x.ndim) if dim not in self.at]
        self.masked = any(index.dtype in MASKS for index in self.at.values())

    def free_dims(self) -> Mapping[int, int]:
        """From the dims that are not indexed to where they are in the output."""
        return {dim: i if i < self.first else i + len(self.shape) for i, dim in enumerate(self.free)}

    def index_dims(self) -> list[tuple[int, tuple[int | None, ...]]]:
        """The indices' dims in the output, each with the dims of the index tensors that carry it."""
        carried = [broadcast(index.shape, self.shape) for index in self.at.values()]
        return [
            (self.first + d, tuple(dims.index(d) if d in dims else None for dims in carried))
            for d in range(len(self.shape))
        ]

    def bounds(self, x: Value, layouts: Sequence[Layout]) -> list[Bound | None]:
        """One for each of the op's indices."""
        split = {dim: any(layout.splits) for dim, layout in zip(self.at, layouts, strict=True)}
        return [
            Bound(-x.shape[dim], x.shape[dim], split[dim], partial(self._refuse, x, dim)) if dim in self.at else None
            for dim in range(max(self.at) + 1)
        ]

    def _refuse(self, x: Value, dim: int, index: int) -> None:
        shape = [size if d in self.at else 1 for d, size in enumerate(x.shape)]
        at = [torch.tensor([index if d == dim else 0]) if d in self.at else None for d in range(dim + 1)]
        at += [torch.tensor([0]) if d in self.at else None for d in range(dim + 1, x.ndim)]
        torch.ops.aten.index.Tensor(torch.zeros(()).expand(shape), at)


def _index(call: Call) -> list[Strategy]:
    x, *indices = call.inputs
    found = [replicated(call)]
    dims = Indexed(x, call["indices"])
    if dims.masked:
        return found
    whole = (None,) * len(indices)
    found.append(Strategy((PENDING, *whole), (PENDING,)))
    found += [Strategy((dim, *whole), (out,)) for dim, out in dims.free_dims().items()]
    found += [Strategy((dim, *whole), (looked_up(x.dtype),)) for dim in dims.at]
    return [*found, *(Strategy((None, *ins), (out,), PROGRAM_COST) for out, ins in dims.index_dims())]


def _index_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    """Never None: a plan for the op itself would be taken for masks, too, whose result has another shape."""
    x, dims = call.inputs[0], Indexed(call.inputs[0], call["indices"])
    split = [dim for dim in dims.at if ins[0].splits[dim]]
    if not split and not any(any(layout.splits) for layout in ins[1:]) and not has_empty(ins):
        return Local(torch.ops.aten.index.Tensor, call.args)
    step = partial(_index_here, split=split, shape=x.shape)
    bounds = dims.bounds(x, ins[1:])
    bounds += [None] * (len(call["indices"]) - len(bounds))
    return guarded_call(call, step, bounds, ins, axes_of(ins[1:]))


def _index_here(
    starts: tuple[int, ...], x: Tensor, indices: list[Tensor | None], *, split: list[int], shape: tuple[int, ...]
) -> Tensor:
    if not split:
        return torch.ops.aten.index.Tensor(x, indices)
    mine, local = owned_at(starts, x, indices, split, shape)
    x = not_empty(x, split)
    for dim in split:
        local[dim] = local[dim].clamp(0, x.shape[dim] - 1)
    found = torch.ops.aten.index.Tensor(x, local)
    first = Indexed(x, indices).first  # type: ignore[arg-type]
    return found.masked_fill(~mine.reshape(*mine.shape, *[1] * (found.ndim - first - mine.ndim)), 0)


def owned_at(
    starts: Sequence[int], x: Tensor, indices: Sequence[Tensor | None], split: Sequence[int], shape: Sequence[int]
) -> tuple[Tensor, list[Any]]:
    """Which of the places that index tensors name together are in the shard, and the indices counted from its start."""
    local: list[Any] = [None if index is None else index.to(x.device) for index in indices]
    mine = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in split:
        here, local[dim] = owned(wrapped(local[dim], shape[dim]), starts[dim], x.shape[dim])
        mine = mine & here
    together = torch.broadcast_shapes(*(index.shape for index in local if index is not None))
    return mine.expand(together), local


register("index", "_unsafe_index", rule=Rule(_index, _index_local))


# Searches in sorted sequences: where a value belongs is how many elements come before it, so counts add up


def _bucketize(call: Call) -> list[Strategy]:
    boundaries = len(call.inputs) - 1
    found = [replicated(call), Strategy((*[None] * boundaries, 0), (SUM,))]
    values = call.inputs[0].ndim if boundaries else 0
    return [*found, *(Strategy((d, None), (d,)) for d in range(values))]


def _searchsorted(call: Call) -> list[Strategy]:
    """Inputs are the sequence, the values unless they are a number, and a sorter of the sequence's shape, if any."""
    sequence, values = call["sorted_sequence"], call["self"]
    last, sorter = sequence.ndim - 1, [None] * (call["sorter"] is not None)
    rest = [None] * isinstance(values, Value)
    found = [replicated(call)]
    if not sorter and sequence.ndim:
        found.append(Strategy((last, *rest), (SUM,)))
    for d in range(values.ndim if rest else 0):
        if d < last:
            found.append(Strategy((d, d, *([d] * len(sorter))), (d,)))
        elif d == last or not last:
            found.append(Strategy((None, d, *sorter), (d,)))
    return found


register("bucketize", rule=Rule(_bucketize))
register("searchsorted", rule=Rule(_searchsorted))


# one_hot


def _one_hot(call: Call) -> list[Strategy]:
    return [replicated(call), *(Strategy((d,), (d,), PROGRAM_COST) for d in range(call.inputs[0].ndim))]


def _one_hot_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    classes = call["num_classes"]
    bound = Bound(0, classes, True, lambda bad: torch.nn.functional.one_hot(torch.tensor([bad]), classes))
    return Local(_checked_one_hot, [bound, call.inputs[0], classes], groups=(tuple(sorted(axes_of(ins))),))


def _checked_one_hot(group: Collectives, bound: Bound, index: Tensor, classes: int) -> Tensor:
    bound.check(group, index)
    return group.map(torch.nn.functional.one_hot, index, classes)


register("one_hot", rule=Rule(_one_hot, _one_hot_local))
