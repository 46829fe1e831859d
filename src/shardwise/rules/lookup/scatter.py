"""Writing at indices: scatter, index_put, index_add and their kin.

Dims that are not indexed are free. Where the indexed dim is sharded, each rank writes what falls into its own part, and
the rest into a spare row that is then dropped, so nothing moves but indices and sources. Sums may instead be split by
source: each rank adds its own sources to a pending result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import has_empty
from shardwise.rules.kit.indices import Bound, along, axes_of, guarded_call, owned, padded, wrapped
from shardwise.rules.kit.notation import LINEAR
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PENDING, SUM, Call, Local, Rule, Strategy, replicated
from shardwise.rules.lookup.indexing import Indexed, flat_bound, gather_sizes_agree, owned_at, owned_flat, refuse_along
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import PROGRAM_COST

MOVES = {"scatter", "index_copy", "index_put", "_index_put_impl", "put", "select_scatter", "slice_scatter"}
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
    whole = (None,) * num_indices
    if _accumulates(call):
        return [Strategy((kind, *whole, kind), (kind,)) for kind in LINEAR]
    if _name(call) in MOVES and "reduce" not in call.bound:
        return [Strategy((PENDING, *whole, PENDING), (PENDING,))]
    return []


def functional(op: Any) -> Any:
    """The op that returns its result, of one that writes it to an argument."""
    name = op._schema.name.split("::")[1].rstrip("_")
    packet = getattr(torch.ops.aten, "index_put" if name == "_index_put_impl" else name)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out and a.name != "unsafe"]
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return next(o for o in overloads if [(a.name, str(a.type)) for a in o._schema.arguments] == wanted)


def _written(x: Tensor, result: Tensor, in_place: bool) -> Tensor:
    """The part of the result that is ours, where it belongs."""
    for dim, size in enumerate(x.shape):
        if result.shape[dim] != size:
            result = result.narrow(dim, 0, size)
    return x.copy_(result) if in_place else result.contiguous()


# Along a dim: scatter with an index of the source's shape, index_add with a 1-d index


def _scatter(call: Call) -> list[Strategy]:
    x, index, *sources = call.inputs
    found = [replicated(call), *_pending(call, 1)]
    if not gather_sizes_agree(call) or any(source.ndim != x.ndim for source in sources):
        return found
    (dim,) = call.dims()
    for d in range(x.ndim):
        alike = all(value.shape[d] == index.shape[d] for value in (*sources, *((x,) if d != dim else ())))
        if d == dim or not alike:  # ours of the index, and of the source
            found.append(Strategy((d, *[None] * (len(call.inputs) - 1)), (d,)))
        else:
            found.append(Strategy((d,) * len(call.inputs), (d,), PROGRAM_COST))
        if d == dim and alike and _accumulates(call):
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
    same_shape = _name(call).startswith("scatter")
    split = bool(x.ndim and ins[0].splits[dim])
    parts = [d for d in range(x.ndim) if d != dim and ins[0].splits[d] and not ins[1].splits[d]] if same_shape else []
    if not split and not parts and not any(ins[1].splits) and not has_empty(ins):
        return None
    in_place = bool(call.mutated) and split
    op = functional(call.op) if split or not call.mutated else call.op
    step = partial(
        _write_along,
        op=partial(op, **call.kwargs),
        split=x.shape[dim] if split else None,
        parts=parts,
        mask=_name(call) in ("scatter_reduce", "index_reduce"),
        rows=not same_shape,
        in_place=in_place,
    )
    low = -x.shape[dim] if _name(call) == "index_fill" else 0
    bound = Bound(low, x.shape[dim], any(ins[1].splits), partial(refuse_along, call, dim))
    return guarded_call(call, step, [bound], ins, axes_of([ins[1]]))


def _write_along(
    starts: tuple[int, ...],
    x: Tensor,
    dim: int,
    index: Tensor,
    *sources: Any,
    op: Any,
    split: int | None,
    parts: list[int],
    mask: bool,
    rows: bool,
    in_place: bool,
) -> Tensor:
    """Write to a shard. `parts` are other dims of which only the target is cut; `split` is the whole size of `dim` if
    that is. With `mask`, sources that are not ours count as zeros: a NaN in the spare row would reach all gradients."""
    source, *rest = sources
    for d in parts:
        start = min(starts[d], index.shape[d])
        count = min(x.shape[d], index.shape[d] - start)
        index = index.narrow(d, start, count)
        source = source.narrow(d, start, count) if isinstance(source, Tensor) else source
    if split is None:
        return op(x, dim, index, source, *rest)
    dim %= x.ndim
    size = x.shape[dim]
    mine, local = owned(wrapped(index, split), starts[dim], size)
    if mask and rows:
        source = torch.where(along(mine, dim, x.ndim), source, source.new_zeros(()))
    elif mask:
        source = torch.where(mine, source[tuple(map(slice, index.shape))], source.new_zeros(()))
    result = op(padded(x, [dim]), dim, torch.where(mine, local, size), source, *rest)
    return _written(x, result, in_place)


register("scatter", "scatter_add", "scatter_reduce", rule=Rule(_scatter, _along_local))
register("index_add", "index_copy", "index_fill", "index_reduce", rule=Rule(_index_write, _along_local))


# index_put: `x[i, :, j] = values`, with index tensors and values that broadcast


def _index_put(call: Call) -> list[Strategy]:
    x, *indices, values = call.inputs
    dims = Indexed(x, call["indices"])
    if dims.masked:
        return _mask_put(call)
    whole = (None,) * len(indices)
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
    found += [Strategy((dim, *whole, position.get(out)), (dim,)) for dim, out in free.items()]
    found += [Strategy((dim, *whole, None), (dim,)) for dim in dims.at]
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


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if len(shape) > len(whole):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(whole), strict=False))


def _index_put_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    """Never None: a plan for the op itself would be taken for masks, too, which have other ways."""
    x, dims = call.inputs[0], Indexed(call.inputs[0], call["indices"])
    split = [dim for dim in dims.at if ins[0].splits[dim]]
    op = call.op if call.mutated and not split else functional(call.op)
    if dims.masked or not (split or any(any(layout.splits) for layout in ins[1:-1]) or has_empty(ins)):
        return Local(op, call.args)
    step = partial(_put_at, op=op, split=split, shape=x.shape, in_place=bool(call.mutated and split))
    bounds = dims.bounds(x, ins[1:-1])
    bounds += [None] * (len(call["indices"]) - len(bounds))
    return guarded_call(call, step, bounds, ins, axes_of(ins[1:-1]))


def _put_at(
    starts: tuple[int, ...],
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
    *,
    op: Any,
    split: list[int],
    shape: tuple[int, ...],
    in_place: bool,
) -> Tensor:
    if not split:
        return op(x, indices, values, accumulate)
    mine, local = owned_at(starts, x, indices, split, shape)
    for dim in split:
        local[dim] = torch.where(mine, local[dim], x.shape[dim])
    return _written(x, op(padded(x, split), local, values, accumulate), in_place)


register("index_put", "_index_put_impl", "_unsafe_index_put", rule=Rule(_index_put, _index_put_local))


# put: into the flattened tensor


def _put(call: Call) -> list[Strategy]:
    x, index, source = call.inputs
    found = [replicated(call), *_pending(call, 1)]
    if x.numel:
        found += [Strategy((d, None, None), (d,)) for d in range(x.ndim)]
    if _accumulates(call) and index.shape == source.shape:
        found += [Strategy((SUM, d, d), (SUM,), PROGRAM_COST) for d in range(index.ndim)]
    return found


def _put_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    split = any(ins[0].splits)
    if not split and not any(ins[1].splits):
        return None
    op = call.op if call.mutated and not split else functional(call.op)
    step = partial(_put_flat, op=op, shape=call.inputs[0].shape, split=split, in_place=bool(call.mutated))
    return guarded_call(call, step, [flat_bound(call, ins[1])], ins, axes_of([ins[1]]))


def _put_flat(
    starts: tuple[int, ...],
    x: Tensor,
    index: Tensor,
    source: Tensor,
    accumulate: bool = False,
    *,
    op: Any,
    shape: tuple[int, ...],
    split: bool,
    in_place: bool,
) -> Tensor:
    if not split:
        return op(x, index, source, accumulate)
    mine, local = owned_flat(index, starts, x.shape, shape)
    flat = padded(x.reshape(-1), [0])
    result = op(flat, torch.where(mine, local, x.numel()), source, accumulate)
    result = result.narrow(0, 0, x.numel()).reshape(x.shape)
    return x.copy_(result) if in_place else result


register("put", rule=Rule(_put, _put_local))
