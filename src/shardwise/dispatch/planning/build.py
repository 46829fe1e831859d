"""Building: from a lowered call to the plan that runs it, in the simplest form that the case allows."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.comm.faked import plain_alias
from shardwise.dispatch.plan import Direct, Plan, localised, moved_first, mover_of, reduced_after, runs_in_cpp
from shardwise.dispatch.planning.local_calls import EachRank, local_call, map_values
from shardwise.dispatch.planning.lower import Lowered, LoweredCall
from shardwise.dispatch.planning.randomness import RandomCall, drawn, is_exact, is_random, random_call, streams
from shardwise.dispatch.planning.replay_check import runs_alike
from shardwise.dispatch.planning.trace import map_tensors
from shardwise.dispatch.steps import CallStep, ConstantStep, MoveArgument, MoveStep, MoveTogether, Slot, Steps, Whole
from shardwise.layout import Mesh
from shardwise.local import spread
from shardwise.redistribute import Move, can_join, in_place, joined
from shardwise.rules import Call, Value
from shardwise.rules.kit.kernels import kernels
from shardwise.rules.kit.treatments import treatment_of

aten = torch.ops.aten
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)


def is_builtin(function: Any) -> bool:
    """Whether a function runs in C++, where a DTensor is nothing but its shard. Custom ops may run in Python."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace == "aten"
    return isinstance(function, _BUILTIN)


def build(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], asked: Any = None) -> Plan:
    """The plan of a call: the function itself where nothing inside it has to change, else its ops one by one. `asked`
    is the function as users know it, where `function` stands for it in the trace."""
    if any(any(call.out_moves) for call in lowered.calls):
        return _reduced_plan(function, lowered, args, kwargs) or assemble(lowered, args, kwargs)
    input_moves = _input_moves(lowered)
    runs, rehearsed = _runnable(function, asked)
    if runs is None or input_moves is None or not lowered.trace.inputs or not _stays_itself(lowered):
        return assemble(lowered, args, kwargs)
    together = len(lowered.calls) == 1 and can_join([moves for moves in lowered.calls[0].moves if moves])
    if together or not runs_alike(rehearsed, lowered, args, kwargs):
        return assemble(lowered, args, kwargs)
    function = _on_device(runs, asked or function, lowered.mesh)
    layouts = [lowered.layouts[value.index] for value in lowered.trace.results]
    movers = [mover_of(moves) for moves in input_moves]
    drawing = _drawing(lowered)
    takes_shards = not drawing and _takes_shards(function, lowered)
    if takes_shards and isinstance(lowered.trace.output, Value):
        positions = _positions(lowered, args, kwargs)
        if not any(movers):
            return Direct(function, layouts[0])
        if positions is not None:
            moving = [(at, m) for at, m in zip(positions, movers, strict=True) if m]
            return Direct(moved_first(function, moving, len(args) if not kwargs else 0), layouts[0])
    if drawing:  # from the stream of the shard it makes
        function = RandomCall(function, drawn(drawing[0].call, drawing[0].layouts))
    argument_of = {value.index: position for position, value in enumerate(lowered.trace.inputs)}
    returned = [argument_of.get(value.index) for value in lowered.trace.results]
    return Whole(function, movers, layouts, returned, lowered.mesh, plain=not takes_shards)


def _is_only_traced(function: Any) -> bool:
    return isinstance(function, torch._ops.OpOverload) and function.namespace == "shardwise"


def _runnable(function: Callable, asked: Any) -> tuple[Callable | None, Callable]:
    """The function that can run on the shards (None for an op of ours, which runs on meta tensors only), and the one
    whose calls there are compared with the plan: a form of a function computes what the function does."""
    if asked is None or function is asked:
        return (None if _is_only_traced(function) else function), function
    treatment = treatment_of(asked)
    if function is treatment.unmerged:
        return asked, function
    return (asked, asked) if function is treatment.traced_as else (function, function)


def _on_device(function: Callable, called: Any, mesh: Mesh) -> Callable:
    """A function that runs as itself, or the kernel for the one that users called."""
    kernel = kernels.get((called, mesh.device_type))
    if kernel is None:
        return function
    return kernel if len(mesh.held) == 1 else EachRank(partial(_on_plain_shards, kernel), len(mesh.held))


def _on_plain_shards(kernel: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_tensors((args, kwargs), lambda x: plain_alias(x) if type(x) is Ranked else x)
    return kernel(*args, **kwargs)


def _takes_shards(function: Callable, lowered: Lowered) -> bool:
    """Whether a function takes DTensors for their shards: it runs in C++, where they are nothing else."""
    return runs_in_cpp(lowered.mesh) and (is_builtin(function) or treatment_of(function).op is not None)


def _stays_itself(lowered: Lowered) -> bool:
    """Whether each call of a function would run on the shards as what it is, but for sizes that the function works out;
    or on replicated tensors only."""
    if any(call.local is not None and call.local.always for call in lowered.calls):
        return False
    if _is_replicated(lowered):
        return all(call.call.op.namespace == "aten" or call.local is not None for call in lowered.calls)
    sizes = len(lowered.calls) > 1  # a single call is given its sizes
    if any(call.local is not None and not (call.local.resized and sizes) for call in lowered.calls):
        return False
    return all(call.call.op.namespace == "aten" for call in lowered.calls)


def _is_replicated(lowered: Lowered) -> bool:
    layouts = (layout for call in lowered.calls for layout in (*call.layouts.ins, *call.layouts.outs))
    return all(layout.replicated for layout in layouts)


def _drawing(lowered: Lowered) -> list[LoweredCall]:
    """The calls that draw random numbers."""
    return [call for call in lowered.calls if is_random(call.call)]


def _draws_alike(lowered: Lowered) -> bool:
    """Whether all that a function draws is drawn in parallel, and from the same streams."""
    arguments, drawing = {value.index for value in lowered.trace.inputs}, _drawing(lowered)
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
    input_moves, positions = _input_moves(lowered), _positions(lowered, args, kwargs)
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


def _joined_to(term: Tensor, replicated: Tensor) -> Tensor:
    return joined(replicated, term)


def _positions(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> list[int | str] | None:
    """The positions of the tensor arguments, or their names, if none is part of a list."""
    found: list[int | str] = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
    found += [name for name, arg in kwargs.items() if isinstance(arg, Tensor)]
    return found if len(found) == len(lowered.trace.inputs) else None


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


# The calls of a function one by one: a list of steps over numbered slots


def assemble(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """The plan that makes the calls one by one."""
    return _simplified(_Assembly(lowered).plan, lowered, args)


class _Assembly:
    """Steps as they are put together, and which slot holds what meanwhile."""

    def __init__(self, lowered: Lowered) -> None:
        trace = lowered.trace
        self.lowered, self.plan = lowered, Steps(lowered)
        self.argument_of: dict[int, int] = {}
        for position, value in enumerate(trace.inputs):
            self.argument_of.setdefault(value.index, position)
        self.slot_of = dict(self.argument_of)
        self.moved: dict[tuple[int, tuple[Move, ...]], int] = {}  # a value that was moved, and the slot of the result
        self.families = trace.written_families
        self.fresh = iter(range(len(trace.inputs), 10**9))
        for value, constant in trace.constants:
            self.slot_of[value.index] = next(self.fresh)
            self.plan.steps.append(ConstantStep(self.slot_of[value.index], constant, lowered.mesh))
        for call in lowered.calls:
            self._add(call)
        self.plan.num_slots = next(self.fresh)
        for value in trace.results:
            if value.index in self.argument_of:
                self.plan.returned[value.index] = self.argument_of[value.index]
            else:
                self.plan.outputs[value.index] = self.slot_of[value.index], lowered.layouts[value.index]

    def _add(self, lowered: LoweredCall) -> None:
        here = self._operands(lowered)
        function, args, kwargs = local_call(lowered, self.lowered.mesh)
        if not is_builtin(function):
            self.plan.plain = True
        if self.plan.simulated and not lowered.call.inputs:
            function = _once_for_all(function, self.lowered.mesh)
        elif is_random(lowered.call):
            function = random_call(function, lowered.call, lowered.layouts, self.argument_of)

        def slot(value: Value) -> Slot:
            """One that the call uses twice may have been moved twice, in order."""
            slots = here[value.index]
            return Slot(slots.pop(0) if len(slots) > 1 else slots[0])

        args = [map_values(arg, slot) for arg in args]
        kwargs = {name: map_values(arg, slot) for name, arg in kwargs.items()}
        targets = [self._slot(value) for value in lowered.call.outputs]
        self._forget_written(lowered.call)
        self.plan.steps.append(CallStep(function, args, kwargs, targets))
        for target, moves in zip(targets, lowered.out_moves, strict=True):
            if moves:
                self.plan.steps.append(MoveStep(target, target, moves, fresh=True))

    def _operands(self, lowered: LoweredCall) -> dict[int, list[int]]:
        """The slots of the values that a call uses, brought into the layouts in which it does."""
        here: dict[int, list[int]] = {}
        steps: list[MoveArgument | MoveStep] = []
        for value, moves in zip(lowered.call.inputs, lowered.moves, strict=True):
            slot = self.slot_of[value.index]
            if not all(move.is_identity for move in moves):
                key = (value.index, moves)
                if key not in self.moved:
                    self.moved[key] = next(self.fresh)
                    if value.index in self.argument_of:
                        steps.append(MoveArgument(self.argument_of[value.index], self.moved[key], moves))
                    else:
                        steps.append(MoveStep(slot, self.moved[key], moves))
                slot = self.moved[key]
            here.setdefault(value.index, []).append(slot)
        self.plan.steps += [MoveTogether(steps)] if can_join([step.moves for step in steps]) else steps
        return here

    def _slot(self, value: Value) -> int:
        if value.index not in self.slot_of:
            self.slot_of[value.index] = next(self.fresh)
        return self.slot_of[value.index]

    def _forget_written(self, call: Call) -> None:
        """Moved copies of what a call writes to are stale, and so are those of values that share its storage."""
        made = {value.index for value in call.outputs}
        written = {self.families.get(call.inputs[position].index) for position in call.mutated} - {None}
        for key in [key for key in self.moved if key[0] in made or self.families.get(key[0]) in written]:
            del self.moved[key]


def _once_for_all(function: Callable, mesh: Mesh) -> Callable:
    """A function of nothing that a rank has of its own, in the simulator: every rank would make the same."""
    return lambda *args, **kwargs: map_tensors(function(*args, **kwargs), lambda x: spread(x, mesh))


def _simplified(plan: Steps, lowered: Lowered, args: tuple) -> Plan:
    """A single local call on the first argument needs no slots."""
    if plan.simulated or plan.plain or len(plan.steps) != 1 or not isinstance(lowered.trace.output, Value):
        return plan
    (step,) = plan.steps
    if not isinstance(step, CallStep) or step.kwargs or not plan.outputs or len(lowered.trace.inputs) != 1:
        return plan
    if len(step.targets) != 1:  # of several results the call returns one
        return plan
    if lowered.calls[0].local is None:  # a function in Python (`2.0 - x`), whose floats and dtypes the trace has read
        return plan
    slots = [position for position, arg in enumerate(step.args) if isinstance(arg, Slot)]
    if len(slots) != 1 or not args or not isinstance(args[0], Tensor) or any(_holds_slot(a) for a in step.args):
        return plan
    return localised(step.function, step.args, slots[0], next(iter(plan.outputs.values()))[1])


def _holds_slot(template: Any) -> bool:
    return isinstance(template, list) and any(isinstance(item, Slot) or _holds_slot(item) for item in template)
