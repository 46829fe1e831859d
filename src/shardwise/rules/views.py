"""Views and the ops that cut, join and rearrange dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.notation import Factor, Factors, dims_of, factor_rule
from shardwise.rules.registry import register
from shardwise.rules.types import PENDING, SUM, Call, HeldValues, Local, Resize, Rule, Strategy, replicated

ANY_PENDING = Strategy((PENDING,), (PENDING,))


# Reshapes


def matching_dims(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Cut a reshape into the smallest groups of dims, input and output, with the same product.

    >>> matching_dims((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    groups = []
    i = j = 0
    while i < len(source) or j < len(target):
        ins, outs = [], []
        size_in = size_out = 1
        if i < len(source):
            ins.append(i)
            size_in *= source[i]
            i += 1
        if j < len(target):
            outs.append(j)
            size_out *= target[j]
            j += 1
        while size_in != size_out:
            if size_in < size_out and i < len(source):
                ins.append(i)
                size_in *= source[i]
                i += 1
            elif j < len(target):
                outs.append(j)
                size_out *= target[j]
                j += 1
            else:
                ins.append(i)
                size_in *= source[i]
                i += 1
        groups.append((ins, outs))
    return groups


def _view(call: Call) -> list[Strategy]:
    """A sharded dim survives a reshape if it is the outermost of its group on both sides."""
    if "dtype" in call.bound:
        return _reinterpretation(call)
    source, target = call.inputs[0].shape, call.outputs[0].shape
    found = [replicated(call), ANY_PENDING]
    if 0 in source:
        return found
    for ins, outs in matching_dims(source, target):
        wide_in = [d for d in ins if source[d] != 1]
        wide_out = [d for d in outs if target[d] != 1]
        if wide_in and wide_out:
            inner_in = math.prod(source[d] for d in wide_in[1:])
            inner_out = math.prod(target[d] for d in wide_out[1:])
            found.append(Strategy((wide_in[0],), (wide_out[0],), resize=_rescale(inner_in, inner_out)))
    return found


def _reinterpretation(call: Call) -> list[Strategy]:
    """`x.view(dtype)`: the same bytes. A last dim that changes its length must be whole; pending terms mean nothing."""
    names: list[Factor] = list(dims_of(call.inputs[0].ndim))
    if call.inputs[0].shape != call.outputs[0].shape:
        names[-1] = None
    return Factors([names], [names]).strategies()


def _rescale(inner_in: int, inner_out: int) -> Resize:
    def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if any(size * inner_in % inner_out for size in sizes):
            return None
        return [tuple(size * inner_in // inner_out for size in sizes)]

    return resize


def _view_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """`reshape` is a view wherever the shard's strides allow one; they may differ from the global tensor's."""
    if "dtype" in call.bound:
        return None
    return Local(Tensor.reshape, [call.inputs[0], HeldValues(outs[0].held_shapes)], resized=True)


register("view", "_unsafe_view", "reshape", "_reshape_alias", rule=Rule(_view, _view_local))


# Dims rearranged, added, removed


def _permutation(call: Call) -> tuple[int, ...]:
    ndim = call.inputs[0].ndim
    match call.name.rstrip("_"):
        case "permute":
            return call.dims("dims")
        case "t":
            return tuple(reversed(range(ndim)))
        case _:
            order = list(range(ndim))
            if ndim:
                a, b = call["dim0"] % ndim, call["dim1"] % ndim
                order[a], order[b] = order[b], order[a]
            return tuple(order)


def _permute(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    return [*Factors([names], [[names[d] for d in _permutation(call)]]).strategies(), ANY_PENDING]


register("permute", "transpose", "t", rule=Rule(_permute))


def _expand(call: Call) -> list[Strategy]:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    lead = len(target) - len(source)
    out = dims_of(len(target))
    names = [None if size == 1 and target[lead + d] != 1 else out[lead + d] for d, size in enumerate(source)]
    return [*Factors([names], [out]).strategies(), ANY_PENDING]


def _expand_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    return Local(Tensor.expand, [call.inputs[0], HeldValues(outs[0].held_shapes)], resized=True)


register("expand", rule=Rule(_expand, _expand_local))


def _squeezed(call: Call) -> tuple[int, ...]:
    """The dims that a squeeze removes from the global tensor."""
    shape = call.inputs[0].shape
    if call.bound.get("dim") == []:
        return ()
    dims = call.dims() if "dim" in call.bound else tuple(range(len(shape)))
    return tuple(d for d in range(len(shape)) if d in dims and shape[d] == 1)


def _squeeze(call: Call) -> list[Strategy]:
    gone = _squeezed(call)
    names = [None if d in gone else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return [*Factors([names], [[name for name in names if name is not None]]).strategies(), ANY_PENDING]


def _squeeze_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    op = torch.ops.aten.squeeze_.dims if call.name.endswith("_") else torch.ops.aten.squeeze.dims
    return Local(op, [call.inputs[0], list(_squeezed(call))])


register("squeeze", rule=Rule(_squeeze, _squeeze_local))


def _unsqueeze(call: Call) -> list[Strategy]:
    names: list[Factor] = list(dims_of(call.inputs[0].ndim))
    out = list(names)
    out.insert(call["dim"] % (len(names) + 1), None)
    return [*Factors([names], [out]).strategies(), ANY_PENDING]


register("unsqueeze", rule=Rule(_unsqueeze))


# Parts of a dim


def _along(call: Call, dim: int, *more: Strategy) -> list[Strategy]:
    """All dims but `dim` may be sharded, in a call whose one input and all outputs have the same dims."""
    names = [None if d == dim else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    outs = [_without(names, dim) if out.ndim < call.inputs[0].ndim else names for out in call.outputs]
    passing = Strategy((PENDING,), (PENDING,) * len(call.outputs))
    return [*Factors([names], outs).strategies(), passing, *more]


def _without(names: Sequence[Factor], dim: int) -> list[Factor]:
    return [*names[:dim], *names[dim + 1 :]]


def _bounds(call: Call) -> tuple[int, int, int]:
    start, end, _ = slice(call["start"], call["end"]).indices(call.inputs[0].shape[call.dims()[0]])
    return start, end, call["step"]


def _slice(call: Call) -> list[Strategy]:
    """A slice of a sharded dim stays where it lies: the new pieces are the parts of the old ones inside it."""
    (dim,) = call.dims()
    start, end, step = _bounds(call)

    def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        pieces = zip(offsets(sizes), sizes, strict=True)
        return [tuple(_count(start, end, step, at, size) for at, size in pieces)]

    return _along(call, dim, Strategy((dim,), (dim,), resize=resize))


def _first(start: int, step: int, at: int) -> int:
    """The first index of a slice that is not before `at`."""
    return start if start >= at else start + -(-(at - start) // step) * step


def _count(start: int, end: int, step: int, at: int, size: int) -> int:
    return len(range(_first(start, step, at), min(end, at + size), step))


def _slice_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    start, end, step = _bounds(call)
    if not ins[0].splits[dim]:
        return None
    starts, ends = [], []
    for begin, extent in (ins[0].box(coordinate) for coordinate in ins[0].mesh.held):
        at, size = begin[dim], extent[dim]
        count = _count(start, end, step, at, size)
        first = _first(start, step, at) - at if count else 0
        starts.append(first)
        ends.append(first + (count - 1) * step + 1 if count else 0)
    return Local(call.op, [call.inputs[0], dim, HeldValues(starts), HeldValues(ends), step], resized=True)


register("slice", rule=Rule(_slice, _slice_local))


def _select(call: Call) -> list[Strategy]:
    """One index of a sharded dim: its owner has it, the others contribute zeros."""
    (dim,) = call.dims()
    return _along(call, dim, Strategy((dim,), (SUM,)))


def _select_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    index = call["index"] % call.inputs[0].shape[dim]
    places: list[int | None] = []
    for begin, extent in (ins[0].box(coordinate) for coordinate in ins[0].mesh.held):
        inside = begin[dim] <= index < begin[dim] + extent[dim]
        places.append(index - begin[dim] if inside else None)
    return Local(_select_or_zero, [call.inputs[0], dim, HeldValues(places)])


def _select_or_zero(x: Tensor, dim: int, index: int | None) -> Tensor:
    """The selected slice, or zeros that are still part of the graph, so that every rank takes part in backward."""
    if index is not None:
        return x.select(dim, index)
    return x.narrow(dim, 0, 0).sum(dim).to(x.dtype)


register("select", rule=Rule(_select, _select_local))


def _split_sizes(call: Call) -> list[int]:
    (dim,) = call.dims()
    return [out.shape[dim] for out in call.outputs]


def _split(call: Call) -> list[Strategy]:
    """Parts of a sharded dim stay where they lie, like slices."""
    (dim,) = call.dims()
    parts = _split_sizes(call)

    def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        pieces = list(zip(offsets(sizes), sizes, strict=True))
        return [
            tuple(_count(start, start + part, 1, at, size) for at, size in pieces)
            for start, part in zip(offsets(parts), parts, strict=True)
        ]

    return _along(call, dim, Strategy((dim,), (dim,) * len(call.outputs), resize=resize))


def _split_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    sizes = [[out.held_shapes[rank][dim] for out in outs] for rank in range(len(ins[0].mesh.held))]
    return Local(torch.split_with_sizes, [call.inputs[0], HeldValues(sizes), dim])


register("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", rule=Rule(_split, _split_local))
register("unbind", rule=Rule(lambda call: _along(call, call.dims()[0])))


# Joining tensors


def _joined(call: Call, names: Sequence[Sequence[Factor]], out: Sequence[Factor]) -> list[Strategy]:
    together = [frozenset(range(len(call.inputs)))]
    return Factors(names, [out], linear=together).strategies()


def _cat(call: Call) -> list[Strategy]:
    ndim = call.outputs[0].ndim
    dim = (call["dim"] or 0) % ndim
    names = [None if d == dim else name for d, name in enumerate(dims_of(ndim))]
    return _joined(call, [names if value.ndim == ndim else [None] for value in call.inputs], names)


def _stack(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    out: list[Factor] = list(names)
    out.insert((call["dim"] or 0) % (len(names) + 1), None)
    return _joined(call, [names] * len(call.inputs), out)


register("cat", rule=Rule(_cat))
register("stack", rule=Rule(_stack))


# Dims that must be whole for the op to run as it is


def _flip(call: Call) -> list[Strategy]:
    dims = call.dims("dims")
    names = [None if d in dims else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return [*Factors([names], [names]).strategies(), ANY_PENDING]


register("flip", "roll", rule=Rule(_flip))


def _repeat(call: Call) -> Factors:
    source, repeats = call.inputs[0].shape, list(call["repeats"])
    lead = len(repeats) - len(source)
    names = [name if repeats[lead + d] == 1 else None for d, name in enumerate(dims_of(len(source)))]
    return Factors([names], [[*[None] * lead, *names]], linear=[frozenset({0})])


register("repeat", rule=factor_rule(_repeat))


def _triangle(call: Call) -> Factors:
    names: list[Any] = [*dims_of(call.inputs[0].ndim - 2), None, None]
    return Factors([names], [names], linear=[frozenset({0})])


register("tril", "triu", rule=factor_rule(_triangle))
