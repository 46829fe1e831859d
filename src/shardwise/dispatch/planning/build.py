"""Building: from a lowered call to the plan that runs it, in the simplest form that the case allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.dispatch.plan import (
    Direct,
    Plan,
    moved_first,
    mover_of,
    reduced_after,
    runs_in_cpp,
)
from shardwise.dispatch.planning.assemble import assemble
from shardwise.dispatch.planning.lower import EachRank, Lowered, is_builtin
from shardwise.dispatch.planning.randomness import RandomCall, drawn, is_exact, is_random, streams
from shardwise.dispatch.planning.replay_check import runs_alike
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.dispatch.steps import Whole
from shardwise.layout import Mesh
from shardwise.redistribute import Move, can_join, in_place, joined
from shardwise.rules import Value
from shardwise.rules.kit.kernels import kernels
from shardwise.rules.kit.treatments import treatment_of

aten = torch.ops.aten
_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


def build(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], asked: Any = None) -> Plan:
    """The plan of a call: the function itself where nothing inside it has to change, else its ops one by one. `asked`
    is the function as users know it, where `function` stands for it in the trace."""
    if any(any(call.out_moves) for call in lowered.calls):
        return _reduced_plan(function, lowered, args, kwargs) or assemble(lowered, args, kwargs)
    input_moves = _input_moves(lowered)
    runs, rehearsed = _runnable(function, asked)
    if runs is None or input_moves is None or not lowered.trace.inputs or not _stays_itself(lowered):
        return assemble(lowered, args, kwargs)
    if not runs_alike(rehearsed, lowered, args, kwargs) or _travel_together(lowered):
        return assemble(lowered, args, kwargs)
    function = _on_device(runs, asked or function, lowered.mesh)
    layouts = [lowered.layouts[value.index] for value in lowered.trace.results]
    movers = [mover_of(moves) for moves in input_moves]
    draw = _drawing(lowered)
    if draw is None and _takes_shards(function, lowered) and isinstance(lowered.trace.output, Value):
        positions = _positions(args, kwargs)
        if not any(movers):
            return Direct(function, layouts[0])
        if positions is not None:
            moving = [(at, m) for at, m in zip(positions, movers, strict=True) if m]
            return Direct(moved_first(function, moving, len(args) if not kwargs else 0), layouts[0])
    returned = [_argument_index(value, lowered) for value in lowered.trace.results]
    plain = draw is not None or not _takes_shards(function, lowered)
    return Whole(function if draw is None else draw(function), movers, layouts, returned, lowered.mesh, plain)


def _is_only_traced(function: Any) -> bool:
    return isinstance(function, torch._ops.OpOverload) and function.namespace == "shardwise"


def _runnable(function: Callable, asked: Any) -> tuple[Callable | None, Callable]:
    """What can run on shards, and what must make the planned calls there. One op of ours that stands for a function of
    torch's runs on meta tensors only; another form of one gives what it gives, on shards too."""
    if asked is None or function is asked:
        return (None if _is_only_traced(function) else function), function
    treatment = treatment_of(asked)
    if function is treatment.apart:
        return asked, function
    return (asked, asked) if function is treatment.traced_as else (function, function)


def _on_device(function: Callable, called: Any, mesh: Mesh) -> Callable:
    """A function that runs as itself, or the kernel for the one that users called."""
    kernel = kernels.get((called, mesh.device_type))
    if kernel is None:
        return function
    return kernel if len(mesh.held) == 1 else EachRank(partial(_on_plain_shards, kernel), len(mesh.held))


def _on_plain_shards(kernel: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_tensors((args, kwargs), lambda x: x.as_subclass(Tensor) if type(x) is Ranked else x)
    return kernel(*args, **kwargs)


def _takes_shards(function: Callable, lowered: Lowered) -> bool:
    """Whether a function takes DTensors for their shards: it runs in C++, where they are nothing else."""
    return runs_in_cpp(lowered.mesh) and (is_builtin(function) or treatment_of(function).op is not None)


def _stays_itself(lowered: Lowered) -> bool:
    """Whether each call of a function would run on the shards as what it is, but for sizes that the function works out;
    or on whole tensors only."""
    if any(call.local is not None and call.local.always for call in lowered.calls):
        return False
    if _is_whole(lowered):
        return all(call.call.op.namespace == "aten" or call.local is not None for call in lowered.calls)
    sizes = len(lowered.calls) > 1  # a single call is given its sizes
    if any(call.local is not None and not (call.local.resized and sizes) for call in lowered.calls):
        return False
    return all(call.call.op.namespace == "aten" for call in lowered.calls)


def _travel_together(lowered: Lowered) -> bool:
    """Whether a call of one op has arguments that one collective can move."""
    return len(lowered.calls) == 1 and can_join([moves for moves in lowered.calls[0].moves if moves])


def _is_whole(lowered: Lowered) -> bool:
    layouts = (layout for call in lowered.calls for layout in (*call.layouts.ins, *call.layouts.outs))
    return all(layout.replicated for layout in layouts)


def _drawing(lowered: Lowered) -> Callable[[Callable], Callable] | None:
    """How a function that draws random numbers runs whole: from the stream of the shard it makes."""
    drawing = [call for call in lowered.calls if is_random(call.call)]
    return partial(RandomCall, layout=drawn(drawing[0].call, drawing[0].layouts)) if drawing else None


def _draws_alike(lowered: Lowered) -> bool:
    """Whether all that a function draws is drawn in parallel, and from the same streams."""
    arguments = {value.index for value in lowered.trace.inputs}
    drawing = [call for call in lowered.calls if is_random(call.call)]
    if any(is_exact(call.call, call.layouts, arguments) for call in drawing):
        return False
    return len({tuple(streams(drawn(call.call, call.layouts))) for call in drawing}) <= 1


def _reduced_plan(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> Plan | None:
    """The function itself on the shards, whose fresh result is then reduced where it is."""
    if len(lowered.calls) != 1 or not _takes_shards(function, lowered) or not isinstance(lowered.trace.output, Value):
        return None
    (call,) = lowered.calls
    (moves,) = call.out_moves
    same_shape = all(value.shape == call.call.outputs[0].shape for value in call.call.inputs)
    input_moves, positions = _input_moves(lowered), _positions(args, kwargs)
    if len(moves) != 1 or moves[0].kind != "all_reduce" or call.local is not None or is_random(call.call):
        return None
    if input_moves is None or positions is None or not runs_alike(function, lowered, args, kwargs):
        return None
    reduce, layout = in_place(moves[0]), lowered.layouts[lowered.trace.output.index]
    movers = [(at, mover) for at, m in zip(positions, input_moves, strict=True) if (mover := mover_of(m))]
    masks = [move.kind for _, mover in movers for move in mover.moves] == ["mask"]  # and nothing else moves
    if call.call.op is aten.add.Tensor and len(args) == 2 and not kwargs and masks and same_shape:
        # One node on every rank, so that gradients add up in the same order everywhere.
        ((at, mover),) = movers
        if not mover.moves[0].keeps_value:
            function = joined if at == positions[0] else _joined_to
        movers = []
    return Direct(reduced_after(moved_first(function, movers, len(args) if not kwargs else 0), reduce), layout)


def _joined_to(term: Tensor, whole: Tensor) -> Tensor:
    return joined(whole, term)


def _positions(args: tuple, kwargs: dict[str, Any]) -> list[int] | None:
    """The positions of the tensor arguments, if all of them stand at the top level of the positional arguments."""
    if flat_tensors(kwargs) or any(isinstance(arg, (list, tuple)) and flat_tensors(arg) for arg in args):
        return None
    return [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]


def _argument_index(value: Value, lowered: Lowered) -> int | None:
    """Which argument an output is, if it is one."""
    for index, candidate in enumerate(lowered.trace.inputs):
        if candidate is value:
            return index
    return None


def _input_moves(lowered: Lowered) -> list[tuple[Move, ...]] | None:
    """The moves of each argument if it is moved before the function and nothing within it is; None otherwise."""
    moves: dict[int, tuple[Move, ...]] = {}
    inputs = {value.index for value in lowered.trace.inputs}
    if not _draws_alike(lowered):
        return None
    for call in lowered.calls:
        for value, wanted in zip(call.call.inputs, call.moves, strict=True):
            if value.index not in inputs:
                if wanted:
                    return None
            elif moves.setdefault(value.index, wanted) != wanted:
                return None
    return [moves.get(value.index, ()) for value in lowered.trace.inputs]
