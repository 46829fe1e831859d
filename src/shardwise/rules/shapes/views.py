"""Views: dims rearranged, added and removed, parts of a dim; and the `_copy` forms of all views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.kit.notation import Factor, Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import ANY_PENDING, PENDING, SUM, Call, HeldValues, Local, Rule, Strategy
from shardwise.rules.shapes.reshapes import VIEW

# Dims rearranged, added, removed


def _permutation(call: Call) -> tuple[int, ...]:
    ndim = call.inputs[0].ndim
    match call.name.rstrip("_").removesuffix("_copy"):
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


PERMUTE = register("permute", "transpose", "t", rule=Rule(_permute))


def _expand(call: Call) -> list[Strategy]:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    lead = len(target) - len(source)
    out = dims_of(len(target))
    names = [None if size == 1 and target[lead + d] != 1 else out[lead + d] for d, size in enumerate(source)]
    return [*Factors([names], [out]).strategies(), ANY_PENDING]


def _expand_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    return Local(Tensor.expand, [call.inputs[0], HeldValues(outs[0].held_shapes)], resized=True)


EXPAND = register("expand", rule=Rule(_expand, _expand_local))


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
    return Local(op, [call.inputs[0], list(_squeezed(call))], resized=True)


SQUEEZE = register("squeeze", rule=Rule(_squeeze, _squeeze_local))


def _unsqueeze(call: Call) -> list[Strategy]:
    names: list[Factor] = list(dims_of(call.inputs[0].ndim))
    out = list(names)
    out.insert(call["dim"] % (len(names) + 1), None)
    return [*Factors([names], [out]).strategies(), ANY_PENDING]


UNSQUEEZE = register("unsqueeze", rule=Rule(_unsqueeze))


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
    size = call.inputs[0].shape[call.dims()[0]]
    if "length" in call.bound:  # `narrow_copy`
        start = call["start"] + size if call["start"] < 0 else call["start"]
        return start, start + call["length"], 1
    start, end, _ = slice(call["start"], call["end"]).indices(size)
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
    args = [call.inputs[0], dim, HeldValues(starts), HeldValues(ends), step]
    return Local(torch.ops.aten.slice.Tensor, args)


SLICE = register("slice", rule=Rule(_slice, _slice_local))


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
    """The selected slice, or zeros that are still part of the graph, so that every rank takes part in backward. A copy
    on every rank: what is written to it must not reach the owner's shard alone."""
    if index is not None:
        return x.select(dim, index).clone()
    return x.narrow(dim, 0, 0).sum(dim).to(x.dtype)


SELECT = register("select", rule=Rule(_select, _select_local))


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
    split = torch.unsafe_split_with_sizes if call.name.startswith("unsafe") else torch.split_with_sizes
    return Local(split, [call.inputs[0], HeldValues(sizes), dim])


SPLIT = register(
    *("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), rule=Rule(_split, _split_local)
)


def _unbind(call: Call) -> list[Strategy]:
    """Every index of a sharded dim, as if selected."""
    (dim,) = call.dims()
    return _along(call, dim, Strategy((dim,), (SUM,) * len(call.outputs)))


def _unbind_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    starts = [start[dim] for start in ins[0].held_starts]
    return Local(_unbind_or_zero, [call.inputs[0], dim, HeldValues(starts), len(call.outputs)])


def _unbind_or_zero(x: Tensor, dim: int, start: int, count: int) -> list[Tensor]:
    inside = range(start, start + x.shape[dim])
    return [_select_or_zero(x, dim, index - start if index in inside else None) for index in range(count)]


UNBIND = register("unbind", rule=Rule(_unbind, _unbind_local))


# Complex numbers as pairs of real ones


def _as_real(call: Call) -> Factors:
    names = dims_of(call.inputs[0].ndim)
    return Factors([names], [[*names, None]], linear=[frozenset({0})])


def _as_complex(call: Call) -> Factors:
    names = dims_of(call.outputs[0].ndim)
    return Factors([[*names, None]], [names], linear=[frozenset({0})])


def _as_real_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return Local(_real_of_some, call.args) if ins[0].has_empty else None


def _real_of_some(x: Tensor) -> Tensor:
    """Of nothing, torch's gradient cannot be viewed as complex again: it lies in memory in any way. So where some ranks
    hold nothing, all make a copy. A conjugate that is left for later, which `real` and `imag` take, must be settled."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch.view_as_real(x.resolve_conj())
    return torch.stack([x.real, x.imag], -1)


AS_REAL = register("view_as_real", rule=factor_rule(_as_real, _as_real_local))
AS_COMPLEX = register("view_as_complex", rule=factor_rule(_as_complex))


# `_copy` forms: the same results, in memory of their own


def copying(rule: Rule) -> Rule:
    """The rule of an op that copies what a view, which has this rule, would show."""

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        found = rule.local(call, ins, outs) if rule.local is not None else None
        return None if found is None else replace(found, function=_Copied(found.function), resized=False)

    return Rule(rule.strategies, local)


class _Copied:
    """A function whose results are copied, and lie as torch's do: in the order of their dims."""

    __slots__ = ("function",)

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.function(*args, **kwargs)
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return copy(made) if isinstance(made, Tensor) else [copy(part) for part in made]


register("view_copy", "_reshape_copy", rule=copying(VIEW))
register("permute_copy", "transpose_copy", "t_copy", rule=copying(PERMUTE))
register("expand_copy", rule=copying(EXPAND))
register("squeeze_copy", rule=copying(SQUEEZE))
register("unsqueeze_copy", rule=copying(UNSQUEEZE))
register("slice_copy", "narrow_copy", rule=copying(SLICE))
register("select_copy", rule=copying(SELECT))
register("split_copy", "split_with_sizes_copy", rule=copying(SPLIT))
register("unbind_copy", rule=copying(UNBIND))
register("view_as_real_copy", rule=AS_REAL)
register("view_as_complex_copy", rule=AS_COMPLEX)


def _whole_copy(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    return [*Factors([names], [names]).strategies(), ANY_PENDING]


register("alias_copy", "detach_copy", "lift_fresh_copy", rule=Rule(_whole_copy))
