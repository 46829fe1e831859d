"""Writing at indices: scatter, index_put, index_add and their kin.

Dims that are not indexed are free. Where the indexed dim is sharded, each rank writes what falls into its own part, and
the rest into a spare row that is then dropped, so nothing moves but indices and sources. Sums may instead be split by
source: each rank adds its own sources to a pending result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import has_empty
from shardwise.rules.kit.indices import Bound, along, guarded_call, owned, padded, wrapped
from shardwise.rules.kit.notation import LINEAR, broadcast
from shardwise.rules.kit.registry import functional, register
from shardwise.rules.kit.types import PENDING, PROGRAM_COST, SUM, Call, Local, Rule, Strategy, replicated
from shardwise.rules.lookup.indexing import Indexed, gather_sizes_agree, owned_at

MOVES = {"scatter", "index_copy", "index_put", "_index_put_impl"}
"""Ops that only copy: whatever reduction is pending on target and source passes through."""


def _name(call: Call) -> str:
    return call.name.rstrip("_")


def _accumulates(call: Call) -> bool:
    """Whether sources are added to the target, so that any split of them into terms is right."""
    if call.inputs[0].dtype == torch.bool:
        return False
    match _name(call):
        case "scatter_add" | "index_add":
            return True
        case "scatter_reduce":
            return call["reduce"] == "sum" and call["include_self"]
        case _:
            return bool(call.bound.get("accumulate"))


def _pending(call: Call, num_indices: int) -> list[Strategy]:
    """Target and source pending together."""
    if len(call.inputs) != num_indices + 2:
        return []
    unsharded = (None,) * num_indices
    if _accumulates(call):
        return [Strategy((kind, *unsharded, kind), (kind,)) for kind in LINEAR]
    if _name(call) in MOVES and "reduce" not in call.bound:
        return [Strategy((PENDING, *unsharded, PENDING), (PENDING,))]
    return []


def _unpadded(result: Tensor, x: Tensor) -> Tensor:
    """The part of a result that belongs to the shard `x`, without the spare rows."""
    if result.shape == x.shape:
        return result
    return result[tuple(map(slice, x.shape))].contiguous()


# Along a dim: scatter with an index of the source's shape, index_add with a 1-d index


def _scatter(call: Call) -> list[Strategy]:
    x, index, *sources = call.inputs
    found = [replicated(call), *_pending(call, 1)]
    if not gather_sizes_agree(call) or any(source.ndim != x.ndim for source in sources):
        return found
    (dim,) = call.dims()
    for d in range(x.ndim):
        same_size = all(value.shape[d] == index.shape[d] for value in (*sources, *((x,) if d != dim else ())))
        if d == dim:  # each rank writes its part of the index, and of the source
            found.append(Strategy((d, *[None] * (len(call.inputs) - 1)), (d,)))
        elif same_size:
            found.append(Strategy((d,) * len(call.inputs), (d,), PROGRAM_COST))
        if d == dim and same_size and _accumulates(call):
            found.append(Strategy((SUM, d, d), (SUM,), PROGRAM_COST))
    return found


def _index_write(call: Call) -> list[Strategy]:
    """`index_add` and others whose 1-d index names rows; what else they take is a source of rows, or a number."""
    x, index, *sources = call.inputs
    found = [replicated(call), *_pending(call, 1)]
    rows = _name(call) != "index_fill"
    if not x.ndim or (rows and sources[0].ndim != x.ndim):
        return found
    (dim,) = call.dims()
    for d in range(x.ndim):
        source = d if rows and d != dim else None
        found.append(Strategy((d, None, *[source] * len(sources)), (d,)))
    if index.ndim and _accumulates(call):
        found.append(Strategy((SUM, 0, dim), (SUM,), PROGRAM_COST))
    return found


def _along_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x = call.inputs[0]
    dim = call.dims()[0] if x.ndim else 0
    split = bool(x.ndim and ins[0].splits[dim])
    if not split and not any(ins[1].splits) and not has_empty(ins):
        return None
    op = partial(functional(call.op), **call.kwargs)
    size = x.shape[dim]
    step = _WriteAlong(op, size if split else None, _name(call) in ("scatter_reduce", "index_reduce"))
    allowed = range(-size if _name(call) == "index_fill" else 0, size)
    return guarded_call(call, step, [Bound(allowed, any(ins[1].splits))], ins, ins[1:2])


@dataclass(frozen=True, slots=True)
class _WriteAlong:
    """A write to a shard along a dim, which has `size` elements in all if it is sharded. With `mask`, sources that are
    not ours count as zeros: a NaN in the spare row would reach all gradients."""

    op: Callable[..., Tensor]
    size: int | None
    mask: bool

    def __call__(self, starts: Sequence[int], x: Tensor, dim: int, index: Tensor, source: Any, *rest: Any) -> Tensor:
        if self.size is None:
            return self.op(x, dim, index, source, *rest)
        mine, local = owned(wrapped(index, self.size), starts[dim], x.shape[dim])
        if self.mask:
            used = source[tuple(map(slice, index.shape))] if index.ndim == x.ndim else source
            source = torch.where(along(mine, dim, x.ndim), used, source.new_zeros(()))
        local = torch.where(mine, local, x.shape[dim])
        return _unpadded(self.op(padded(x, [dim]), dim, local, source, *rest), x)


register("scatter", "scatter_add", "scatter_reduce", rule=Rule(_scatter, _along_local))
register("index_add", "index_copy", "index_fill", "index_reduce", rule=Rule(_index_write, _along_local))


# index_put: `x[i, :, j] = values`, with index tensors and values that broadcast


def _index_put_ways(call: Call) -> list[Strategy]:
    x, *indices, values = call.inputs
    dims = Indexed(x, call["indices"])
    if dims.masked:
        return _mask_put(call)
    unsharded = (None,) * len(indices)
    found = [replicated(call), *_pending(call, len(indices))]
    free = dims.free_dims()
    shape = [0] * (len(free) + len(dims.shape))
    for dim, out in free.items():
        shape[out] = x.shape[dim]
    for d, (out, _) in enumerate(dims.index_dims()):
        shape[out] = dims.shape[d]
    if not _fits(values.shape, shape):
        return found  # torch refuses
    carried = broadcast(values.shape, tuple(shape))
    position = {out: d for d, out in enumerate(carried) if out is not None}
    found += [Strategy((dim, *unsharded, position.get(out)), (dim,)) for dim, out in free.items()]
    found += [Strategy((dim, *unsharded, None), (dim,)) for dim in dims.at]
    if _accumulates(call):
        for out, ins in dims.index_dims():
            if out in position:
                found.append(Strategy((SUM, *ins, position[out]), (SUM,), PROGRAM_COST))
    return found


def _mask_put(call: Call) -> list[Strategy]:
    """`x[mask] = value`, with a value that is the same for all places of the mask: element by element."""
    x, *indices, values = call.inputs
    found = [replicated(call)]
    if len(indices) != 1 or indices[0].dtype != torch.bool or call["indices"][0] is None:
        return found
    (mask,) = indices
    rest = x.shape[mask.ndim :]
    row = values.shape[1:] if values.ndim > len(rest) and values.shape[0] == 1 else values.shape
    if mask.shape != x.shape[: mask.ndim] or not _fits(row, rest):
        return found
    found += [Strategy((d, d, None), (d,)) for d in range(mask.ndim)]
    carried = broadcast(row, rest)
    for d in range(len(rest)):
        own = carried.index(d) + values.ndim - len(row) if d in carried else None
        found.append(Strategy((mask.ndim + d, None, own), (mask.ndim + d,)))
    return found


def _fits(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if len(shape) > len(target):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False))


def _index_put_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    """Never None: a plan for the op itself would be taken for masks, too, which have other ways."""
    x, dims = call.inputs[0], Indexed(call.inputs[0], call["indices"])
    split = [dim for dim in dims.at if ins[0].splits[dim]]
    if dims.masked or not (split or any(any(layout.splits) for layout in ins[1:-1]) or has_empty(ins)):
        return Local(call.op if call.mutated else _index_put, call.args)
    step = partial(_put_at, split=split, shape=x.shape)
    return guarded_call(call, step, dims.bounds(x, ins[1:-1]), ins, ins[1:-1])


def _put_at(
    starts: Sequence[int],
    x: Tensor,
    indices: list[Tensor | None],
    *rest: Any,
    split: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """`rest` are values, and whether they are added up. (A last one, whether indices go unchecked, does not matter.)"""
    mine, local = owned_at(starts, x, indices, split, shape)
    for dim in split:
        local[dim] = torch.where(mine, local[dim], x.shape[dim])
    return _unpadded(_index_put(padded(x, split), local, *rest[:2]), x)


_index_put = torch.ops.aten.index_put.default

register("index_put", "_index_put_impl", "_unsafe_index_put", rule=Rule(_index_put_ways, _index_put_local))
