"""Views: dims rearranged, added and removed, parts of a dim; and the `_copy` forms of all views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, intervals
from shardwise.rules.kit.notation import Factor, Factors, broadcast, dims_but, dims_of, factor_rule, moved, moved_along
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import SUM, Call, HeldValues, Local, Resize, Rule, Strategy
from shardwise.rules.kit.windows import indices_inside
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


def _permute(call: Call) -> Factors:
    names = dims_of(call.inputs[0].ndim)
    return moved([names], [[names[d] for d in _permutation(call)]])


PERMUTE = register("permute", "transpose", "t", rule=factor_rule(_permute))


def _expand(call: Call) -> Factors:
    target = call.outputs[0].shape
    return moved([broadcast(call.inputs[0].shape, target)], [range(len(target))])


def _expand_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    return Local(Tensor.expand, [call.inputs[0], HeldValues(outs[0].held_shapes)], resized=True)


EXPAND = register("expand", rule=factor_rule(_expand, _expand_local))


def _squeezed(call: Call) -> tuple[int, ...]:
    """The dims that a squeeze removes from the global tensor."""
    shape = call.inputs[0].shape
    if call.bound.get("dim") == []:
        return ()
    dims = call.dims() if "dim" in call.bound else tuple(range(len(shape)))
    return tuple(d for d in range(len(shape)) if d in dims and shape[d] == 1)


def _squeeze(call: Call) -> Factors:
    names = dims_but(call.inputs[0].ndim, _squeezed(call))
    return moved([names], [[name for name in names if name is not None]])


def _squeeze_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    op = torch.ops.aten.squeeze_.dims if call.name.endswith("_") else torch.ops.aten.squeeze.dims
    return Local(op, [call.inputs[0], list(_squeezed(call))], resized=True)


SQUEEZE = register("squeeze", rule=factor_rule(_squeeze, _squeeze_local))


def _unsqueeze(call: Call) -> Factors:
    names: list[Factor] = list(dims_of(call.inputs[0].ndim))
    out = list(names)
    out.insert(call["dim"] % (len(names) + 1), None)
    return moved([names], [out])


UNSQUEEZE = register("unsqueeze", rule=factor_rule(_unsqueeze))


# Parts of a dim


def _along(call: Call, *more: Strategy) -> list[Strategy]:
    """All dims but the one that is cut may be sharded: a dim of the input and, unless it is removed, of all outputs."""
    (dim,) = call.dims()
    names = dims_but(call.inputs[0].ndim, [dim])
    outs = [names if out.ndim == len(names) else [*names[:dim], *names[dim + 1 :]] for out in call.outputs]
    return [*moved([names], outs).strategies(), *more]


def _of_slices(slices: Sequence[range]) -> Resize:
    """A slice of a sharded dim moves nothing: its pieces are the parts of the dim's pieces inside it."""
    return lambda sizes: [tuple(len(indices_inside(wanted, piece)) for piece in intervals(sizes)) for wanted in slices]


def _sliced(call: Call) -> range:
    size = call.inputs[0].shape[call.dims()[0]]
    if "length" in call.bound:  # `narrow_copy`
        start = call["start"] + size if call["start"] < 0 else call["start"]
        return range(start, start + call["length"])
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    return range(start, end, call["step"])


def _slice(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    return _along(call, Strategy((dim,), (dim,), resize=_of_slices([_sliced(call)])))


def _slice_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,), wanted = call.dims(), _sliced(call)
    if not ins[0].splits[dim]:
        return None
    parts = [indices_inside(wanted, piece) for piece in ins[0].held_intervals(dim)]
    starts, ends = HeldValues([part.start for part in parts]), HeldValues([part.stop for part in parts])
    return Local(torch.ops.aten.slice.Tensor, [call.inputs[0], dim, starts, ends, wanted.step])


SLICE = register("slice", rule=Rule(_slice, _slice_local))


def _split(call: Call) -> list[Strategy]:
    """Into slices side by side."""
    (dim,) = call.dims()
    parts = [range(*part) for part in intervals([out.shape[dim] for out in call.outputs])]
    return _along(call, Strategy((dim,), (dim,) * len(call.outputs), resize=_of_slices(parts)))


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


def _select(call: Call) -> list[Strategy]:
    """One index of a sharded dim, or each of them: its owner has it, the others contribute zeros."""
    return _along(call, Strategy(call.dims(), (SUM,) * len(call.outputs)))


def _select_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not ins[0].splits[dim]:
        return None
    starts = HeldValues([start[dim] for start in ins[0].held_starts])
    if call.name.startswith("unbind"):
        return Local(_unbind_or_zero, [call.inputs[0], dim, starts, len(call.outputs)])
    return Local(_select_or_zero, [call.inputs[0], dim, starts, call["index"] % call.inputs[0].shape[dim]])


def _select_or_zero(x: Tensor, dim: int, start: int, index: int) -> Tensor:
    """The selected slice, or zeros that are still part of the graph, so that every rank takes part in backward. A copy
    on every rank: what is written to it must not reach the owner's shard alone."""
    if start <= index < start + x.shape[dim]:
        return x.select(dim, index - start).clone()
    return _in_order_of(x, dim, x.narrow(dim, 0, 0).sum(dim).to(x.dtype))


def _in_order_of(x: Tensor, dim: int, zeros: Tensor) -> Tensor:
    """Zeros with their dims in the order in which the owner's copy has them: ranks must agree on what is contiguous."""
    steps = [step for d, step in enumerate(x.stride()) if d != dim]
    if steps == sorted(steps, reverse=True):
        return zeros
    copied = torch.empty_like(torch.empty_strided(zeros.shape, steps, device="meta")).stride()
    order = sorted(range(zeros.dim()), key=lambda d: -copied[d])
    if order == sorted(order):
        return zeros
    back = sorted(range(len(order)), key=order.__getitem__)
    return zeros.permute(order).contiguous().permute(back).clone()


def _unbind_or_zero(x: Tensor, dim: int, start: int, count: int) -> list[Tensor]:
    return [_select_or_zero(x, dim, start, index) for index in range(count)]


SELECT = register("select", "unbind", rule=Rule(_select, _select_local))


# Complex numbers as pairs of real ones


def _as_real(call: Call) -> Factors:
    names = dims_of(call.inputs[0].ndim)
    return Factors([names], [[*names, None]], linear=[frozenset({0})])


def _as_complex(call: Call) -> Factors:
    names = dims_of(call.outputs[0].ndim)
    return Factors([[*names, None]], [names], linear=[frozenset({0})])


def _as_real_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return Local(_real_or_copy, call.args) if ins[0].has_empty else None


def _real_or_copy(x: Tensor) -> Tensor:
    """The gradient of an empty tensor may have any strides, and torch refuses to view it as complex again: where some
    ranks hold nothing, all make a copy. A lazy conjugate, which `real` and `imag` take, must be resolved."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch.view_as_real(x.resolve_conj())
    return torch.stack([x.real, x.imag], -1)


AS_REAL = register("view_as_real", rule=factor_rule(_as_real, _as_real_local))
AS_COMPLEX = register("view_as_complex", rule=factor_rule(_as_complex))


# `_copy` forms: the same results, in memory of their own


def copying(rule: Rule) -> Rule:
    """The rule of an op that returns a copy of the view which has this rule."""

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        found = rule.local(call, ins, outs) if rule.local is not None else None
        return None if found is None else replace(found, function=_Copied(found.function), resized=False)

    return Rule(rule.strategies, local)


class _Copied:
    """A function whose results are copied, contiguous as torch's are."""

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
register("select_copy", "unbind_copy", rule=copying(SELECT))
register("split_copy", "split_with_sizes_copy", rule=copying(SPLIT))
register("view_as_real_copy", rule=AS_REAL)
register("view_as_complex_copy", rule=AS_COMPLEX)


register("alias_copy", "detach_copy", "lift_fresh_copy", rule=factor_rule(moved_along))
