"""Whether a function may run whole: on the shards it must make the very calls that were planned for them.

A function may read sizes off its arguments, or be given some, and on shards those are other sizes. So where it could
have, it is traced once more, on meta tensors of the shards' shapes, and the two traces are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.lower import Lowered, has_composites
from shardwise.dispatch.trace import OPAQUE, Trace, map_tensors, trace_call
from shardwise.rules import Call, Value, flat_values


def runs_alike(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function on the shards makes the calls of the lowered trace, with these arguments."""
    wanted = [_needed_layout(lowered, position) for position in range(len(lowered.trace.inputs))]
    if not any(any(layout.splits) for layout in wanted) or function in OPAQUE:
        return True
    if _is_plain(lowered, args, kwargs) or _is_binding(function, lowered, args, kwargs):
        return True
    shapes = {tuple(layout.held_shapes[rank] for layout in wanted) for rank in range(len(lowered.mesh.held))}
    return all(_same_on(function, lowered, args, kwargs, shape) for shape in shapes)


def _needed_layout(lowered: Lowered, position: int) -> Any:
    """The layout in which the function gets an argument: as the calls that use it want it, or as it is."""
    value = lowered.trace.inputs[position]
    for call in lowered.calls:
        for used, layout in zip(call.call.inputs, call.layouts.ins, strict=True):
            if used is value:
                return layout
    return lowered.layouts[value.index]


def _is_plain(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    """One op that uses every tensor, in a call without any number that could be a size: nothing to read sizes from."""
    if len(lowered.calls) != 1 or len(lowered.calls[0].call.inputs) != len(lowered.trace.inputs):
        return False
    call = lowered.calls[0].call
    return not _has_int((args, *kwargs.values(), call.args, *call.kwargs.values()))


def _is_binding(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function is an op itself, and gives it the very arguments it has: whatever their sizes, it will."""
    if len(lowered.calls) != 1:
        return False
    call = lowered.calls[0].call
    name = function._schema.name.split("::")[1] if isinstance(function, torch._ops.OpOverload) else function.__name__
    if call.name != name or has_composites(call.op) or len(args) > len(call.op._schema.arguments):
        return False
    left = iter(lowered.trace.inputs)
    given_args, given_kwargs = map_tensors((args, kwargs), lambda _: next(left))
    given = Call(call.op, given_args, given_kwargs, (), ())
    if not call.bound.keys() >= kwargs.keys():
        return False
    got = [_plain(argument) for argument in call.bound.values()]
    return all(x == y or [x] == y for x, y in zip(map(_plain, given.bound.values()), got, strict=True))


def _has_int(tree: Any) -> bool:
    if isinstance(tree, (list, tuple)):
        return any(_has_int(item) for item in tree)
    return isinstance(tree, int) and not isinstance(tree, bool)


def _same_on(
    function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], shapes: tuple[tuple[int, ...], ...]
) -> bool:
    metas: list[Tensor] = []
    left = iter(zip(shapes, lowered.trace.inputs, strict=True))

    def meta(_: Tensor) -> Tensor:
        shape, value = next(left)
        metas.append(torch.empty(shape, dtype=value.dtype, device="meta"))
        return metas[-1]

    try:
        with torch.no_grad():
            local_args, local_kwargs = map_tensors(args, meta), map_tensors(kwargs, meta)
            trace = trace_call(function, local_args, local_kwargs, metas, torch.device("cpu"))
    except Exception:  # whatever it is, the function does not do on shards what it does on the whole
        return False
    return _same_calls(trace, lowered.trace)


def _same_calls(a: Trace, b: Trace) -> bool:
    if len(a.calls) != len(b.calls) or len(flat_values(a.output)) != len(flat_values(b.output)):
        return False
    return all(x.op is y.op and _plain(x.args) == _plain(y.args) for x, y in zip(a.calls, b.calls, strict=True))


def _plain(tree: Any) -> Any:
    """Arguments with each value as its number: shapes differ, everything else must not."""
    if isinstance(tree, Value):
        return ("value", tree.index)
    if isinstance(tree, (list, tuple)):
        return [_plain(item) for item in tree]
    return tree
