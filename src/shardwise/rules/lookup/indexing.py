"""Reading at indices: gather, index, searches.

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
from shardwise.layout.sizes import broadcast_shape
from shardwise.rules.kit.empty import has_empty
from shardwise.rules.kit.indices import Bound, along, axes_of, guarded_call, not_empty, owned, wrapped
from shardwise.rules.kit.notation import Factors, broadcast, dims_of, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import (
    PENDING,
    PROGRAM_COST,
    SUM,
    Call,
    Collectives,
    Local,
    Rule,
    Strategy,
    Value,
    replicated,
)

MASKS = (torch.bool, torch.uint8)


def looked_up(dtype: torch.dtype) -> Partial:
    """The pending reduction of terms of which all but one are zero."""
    return Partial("max") if dtype == torch.bool else SUM


# Along a dim: gather with an index of as many dims, index_select with one of rows


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
    x, index = call.inputs
    found = [replicated(call), Strategy((PENDING, None), (PENDING,))]
    if call["sparse_grad"] or not gather_sizes_agree(call):
        return found
    (dim,) = call.dims()
    found.append(Strategy((dim, None), (looked_up(x.dtype),)))
    for d in range(x.ndim):
        if d == dim or x.shape[d] == index.shape[d]:
            found.append(Strategy((None if d == dim else d, d), (d,), PROGRAM_COST))
    return found


def _index_select(call: Call) -> list[Strategy]:
    x, index = call.inputs
    found = [replicated(call), Strategy((PENDING, None), (PENDING,))]
    if not x.ndim:
        return found
    (dim,) = call.dims()
    found += [Strategy((d, None), (looked_up(x.dtype) if d == dim else d,)) for d in range(x.ndim)]
    return [*found, Strategy((None, 0), (dim,), PROGRAM_COST)] if index.ndim else found


def _along_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x = call.inputs[0]
    if not x.ndim or not (any(ins[1].splits) or ins[0].splits[call.dims()[0]] or has_empty(ins)):
        return None
    (dim,) = call.dims()
    op = torch.gather if call.name == "gather" else torch.index_select
    step = partial(_look_up, op=op, split=bool(ins[0].splits[dim]))
    return guarded_call(call, step, [Bound(range(x.shape[dim]), any(ins[1].splits))], ins, ins[1:])


def _look_up(starts: Sequence[int], x: Tensor, dim: int, index: Tensor, *, op: Any, split: bool) -> Tensor:
    if not split:
        return op(x, dim, index)
    mine, local = owned(index, starts[dim], x.shape[dim])
    x = not_empty(x, [dim])
    found = op(x, dim, local.clamp(0, x.shape[dim] - 1))
    return found.masked_fill(~along(mine, dim, x.ndim), 0)


register("gather", rule=Rule(_gather, _along_local))
register("index_select", rule=Rule(_index_select, _along_local))


# index: `x[i, :, j]`, with index tensors that broadcast


class Indexed:
    """The dims of `x[indices]`: which of the input are indexed, and which of the output are the indices' own."""

    def __init__(self, x: Value, indices: Sequence[Value | None]) -> None:
        self.count = len(indices)
        self.at = {dim: index for dim, index in enumerate(indices) if index is not None}
        self.shape = broadcast_shape(*(index.shape for index in self.at.values()))
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
        """One for each of the op's indices, which have these layouts."""
        left = iter(layouts)
        sizes = [x.shape[dim] if dim in self.at else None for dim in range(self.count)]
        return [None if size is None else Bound(range(-size, size), any(next(left).splits)) for size in sizes]


def _index(call: Call) -> list[Strategy]:
    x, *indices = call.inputs
    found = [replicated(call)]
    dims = Indexed(x, call["indices"])
    if dims.masked:
        return found
    unsharded = (None,) * len(indices)
    found.append(Strategy((PENDING, *unsharded), (PENDING,)))
    found += [Strategy((dim, *unsharded), (out,)) for dim, out in dims.free_dims().items()]
    found += [Strategy((dim, *unsharded), (looked_up(x.dtype),)) for dim in dims.at]
    return [*found, *(Strategy((None, *ins), (out,), PROGRAM_COST) for out, ins in dims.index_dims())]


def _index_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    """Never None: a plan for the op itself would be taken for masks, too, whose result has another shape."""
    x, dims = call.inputs[0], Indexed(call.inputs[0], call["indices"])
    split = [dim for dim in dims.at if ins[0].splits[dim]]
    if not split and not any(any(layout.splits) for layout in ins[1:]) and not has_empty(ins):
        return Local(torch.ops.aten.index.Tensor, call.args)
    step = partial(_index_here, split=split, shape=x.shape)
    return guarded_call(call, step, dims.bounds(x, ins[1:]), ins, ins[1:])


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
    together = broadcast_shape(*(index.shape for index in local if index is not None))
    return mine.expand(together), local


register("index", "_unsafe_index", rule=Rule(_index, _index_local))


# Searches in sorted sequences: where a value belongs is how many elements come before it, so counts add up. In a set of
# which each rank has a part: if any rank finds it


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


def _isin(call: Call) -> Factors:
    elements, tests = (call.bound.get(name) for name in ("elements", "test_elements"))
    out = dims_of(elements.ndim, "element") if isinstance(elements, Value) else ()
    known = dims_of(tests.ndim, "test") if isinstance(tests, Value) else ()
    ins = [names for value, names in ((elements, out), (tests, known)) if isinstance(value, Value)]
    return Factors(ins, [out], reduce=dict.fromkeys(known, Partial("min" if call["invert"] else "max")))


register("bucketize", rule=Rule(_bucketize))
register("searchsorted", rule=Rule(_searchsorted))
register("isin", rule=factor_rule(_isin))


# one_hot


def _one_hot(call: Call) -> list[Strategy]:
    return [replicated(call), *(Strategy((d,), (d,), PROGRAM_COST) for d in range(call.inputs[0].ndim))]


def _one_hot_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    args = [Bound(range(call["num_classes"]), True), call.inputs[0], call["num_classes"]]
    return Local(_checked_one_hot, args, groups=(axes_of(ins),))


def _checked_one_hot(group: Collectives, bound: Bound, index: Tensor, classes: int) -> Tensor:
    bound.check(group, index)
    return group.map(torch.nn.functional.one_hot, index, classes)


register("one_hot", rule=Rule(_one_hot, _one_hot_local))
