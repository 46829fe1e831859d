"""Assembling: a lowered call as a list of steps over numbered slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.dispatch.plan import Plan, localised
from shardwise.dispatch.planning.lower import Lowered, LoweredCall, is_builtin, local_call
from shardwise.dispatch.planning.randomness import is_random, random_call
from shardwise.dispatch.planning.trace import map_tensors
from shardwise.dispatch.steps import CallStep, ConstantStep, MoveArgument, MoveStep, MoveTogether, Slot, Steps
from shardwise.layout import Mesh
from shardwise.local import spread
from shardwise.redistribute import Move, can_join
from shardwise.rules import Call, Value


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
        args = [_slotted(arg, here) for arg in args]
        kwargs = {name: _slotted(arg, here) for name, arg in kwargs.items()}
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


def _slotted(template: Any, here: dict[int, list[int]]) -> Any:
    """A template with slots for values. A value that a call uses twice may have been moved twice, in order."""
    if isinstance(template, Value):
        slots = here[template.index]
        return Slot(slots.pop(0) if len(slots) > 1 else slots[0])
    if isinstance(template, (list, tuple)):
        return [_slotted(item, here) for item in template]
    return template


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
