"""Whether a function may run as itself: on the shards it must make the very calls that were planned for them.

A function may read sizes off its arguments, or be given some, and on shards those are other sizes. So where it could
have, it runs once more, on meta tensors of the shards' shapes, and its calls are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.planning.local_calls import comparable, has_composites, makes_call
from shardwise.dispatch.planning.lower import Lowered, LoweredCall
from shardwise.dispatch.planning.trace import map_tensors, trace_call
from shardwise.rules import Call, Value
from shardwise.rules.kit.treatments import treatment_of

Shapes = Sequence[tuple[int, ...]]


def runs_alike(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function on the shards makes the calls of the lowered trace, with these arguments."""
    wanted = [_needed_layout(lowered, position) for position in range(len(lowered.trace.inputs))]
    if not any(any(layout.splits) for layout in wanted) or treatment_of(function).op is not None:
        return True
    if _has_no_sizes(lowered, args, kwargs) or _is_binding(function, lowered, args, kwargs):
        return True
    same = _makes_the_call if len(lowered.calls) == 1 else _makes_the_calls
    ranks = {tuple(layout.held_shapes[rank] for layout in wanted): rank for rank in range(len(lowered.mesh.held))}
    return all(same(function, lowered, args, kwargs, shapes, rank) for shapes, rank in ranks.items())


def _needed_layout(lowered: Lowered, position: int) -> Any:
    """The layout in which the function gets an argument: as the calls that use it want it, or as it is."""
    value = lowered.trace.inputs[position]
    for call in lowered.calls:
        for used, layout in zip(call.call.inputs, call.layouts.ins, strict=True):
            if used is value:
                return layout
    return lowered.layouts[value.index]


def _has_no_sizes(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
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
    if call.name != name or has_composites(call.op) or len(args) > len(call.bound) or kwargs.keys() - call.bound:
        return False
    left = iter(lowered.trace.inputs)
    given_args, given_kwargs = map_tensors((args, kwargs), lambda _: next(left))
    given = Call(call.op, given_args, given_kwargs, (), ()).bound.values()
    pairs = zip(map(comparable, given), map(comparable, call.bound.values()), strict=True)
    return all(x == y or [x] == y for x, y in pairs)


def _has_int(tree: Any) -> bool:
    if isinstance(tree, (list, tuple)):
        return any(_has_int(item) for item in tree)
    return isinstance(tree, int) and not isinstance(tree, bool)


def _makes_the_call(
    function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], shapes: Shapes, rank: int
) -> bool:
    """The same for a function that makes one call. Its kernel need not run, if what it gives on the shards is known."""
    (call,) = lowered.calls
    metas = _metas(lowered.trace.inputs, shapes)
    left = iter(metas)
    args, kwargs = map_tensors((args, kwargs), lambda _: next(left))
    known = {id(meta): value for meta, value in zip(metas, lowered.trace.inputs, strict=True)}
    kinds = {str(returned.type) for returned in call.call.op._schema.returns}
    is_fresh = not call.call.mutated and not call.call.is_view and kinds <= {"Tensor", "List[Tensor]"}
    results = (
        _metas(call.call.outputs, [layout.held_shapes[rank] for layout in call.layouts.outs]) if is_fresh else None
    )
    return makes_call(function, args, kwargs, call.call, known, results)


def _makes_the_calls(
    function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], shapes: Shapes, rank: int
) -> bool:
    try:
        with torch.no_grad():
            metas = _metas(lowered.trace.inputs, shapes)
            trace = trace_call(function, args, kwargs, metas, torch.device("cpu"))
    except Exception:  # whatever it is, it does not do on shards what it does globally
        return False
    if len(trace.calls) != len(lowered.calls) or len(trace.results) != len(lowered.trace.results):
        return False
    pairs = zip(trace.calls, lowered.calls, strict=True)
    return all(x.op is y.call.op and comparable((x.args, x.kwargs)) == _planned(y, rank) for x, y in pairs)


def _planned(lowered: LoweredCall, rank: int) -> Any:
    """The arguments that a call is to have on one rank."""
    if lowered.local is None:
        return comparable((lowered.call.args, lowered.call.kwargs))
    return comparable((tuple(lowered.local.args), dict(lowered.local.kwargs)), rank)


def _metas(values: Sequence[Value], shapes: Shapes) -> list[Tensor]:
    pairs = zip(shapes, values, strict=True)
    return [torch.empty(shape, dtype=value.dtype, device="meta") for shape, value in pairs]
