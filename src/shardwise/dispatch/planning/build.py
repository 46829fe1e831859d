"""Building: from a lowered call to the plan that runs it, as plainly as the case allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.dispatch.plan import (
    Direct,
    Mover,
    Plan,
    localised,
    moved_first,
    mover_for,
    mover_of,
    reduced_after,
    runs_in_cpp,
    wrap_fresh,
)
from shardwise.dispatch.planning.lower import Lowered, LoweredCall, is_builtin, local_call
from shardwise.dispatch.planning.randomness import RandomCall, drawn, is_exact, is_random, random_call, streams
from shardwise.dispatch.planning.replay_check import runs_alike
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors, written_families
from shardwise.layout import Layout, Mesh
from shardwise.local import is_leaf
from shardwise.redistribute import Move, can_join, in_place, joined, run_path, run_together
from shardwise.rules import Value, flat_values
from shardwise.rules.kit.treatments import treatment_of
from shardwise.tensor import DTensor, localise, spread

aten = torch.ops.aten
_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


def build(function: Callable, lowered: Lowered, args: tuple, kwargs: dict[str, Any], asked: Any = None) -> Plan:
    """The plan of a call: the function itself where nothing inside it has to change, else its ops one by one. `asked`
    is the function as users know it, where `function` stands for it in the trace."""
    if any(any(call.out_moves) for call in lowered.calls):
        return _reduced_plan(function, lowered, args, kwargs) or _steps(lowered, args, kwargs)
    input_moves = _input_moves(lowered)
    runs, rehearsed = _runnable(function, asked)
    if runs is None or input_moves is None or not lowered.trace.inputs or not _stays_itself(lowered):
        return _steps(lowered, args, kwargs)
    if not runs_alike(rehearsed, lowered, args, kwargs) or _travel_together(lowered):
        return _steps(lowered, args, kwargs)
    function = runs
    layouts = [lowered.layouts[value.index] for value in flat_values(lowered.trace.output)]
    movers = [mover_of(moves) for moves in input_moves]
    draw = _drawing(lowered)
    if draw is None and _takes_shards(function, lowered) and isinstance(lowered.trace.output, Value):
        positions = _positions(args, kwargs)
        if not any(movers):
            return Direct(function, layouts[0])
        if positions is not None:
            moving = [(at, m) for at, m in zip(positions, movers, strict=True) if m]
            return Direct(moved_first(function, moving, len(args) if not kwargs else 0), layouts[0])
    returned = [_argument_index(value, lowered) for value in flat_values(lowered.trace.output)]
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


class Whole:
    """The function itself on the shards, in full generality: nested arguments, several results, the simulator,
    functions in Python. `plain` says that the function must see plain local tensors, not DTensors."""

    __slots__ = ("function", "layouts", "mesh", "movers", "plain", "returned", "labels")

    def __init__(
        self,
        function: Callable,
        movers: list[Mover | None],
        layouts: list[Layout],
        returned: list[int | None],
        mesh: Mesh,
        plain: bool = False,
    ) -> None:
        self.mesh = mesh
        self.plain = plain or not runs_in_cpp(mesh)
        self.function = function
        self.movers = movers
        self.layouts = layouts
        self.returned = returned

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        out, originals = self.run(args, kwargs)
        with _disabled():
            return self._wrapped(out, originals)

    def run(self, args: tuple, kwargs: dict[str, Any] | None) -> tuple[Any, list[Tensor]]:
        """The local results, and the tensor arguments as they came."""
        originals: list[Tensor] = []
        movers = iter(self.movers)

        def localised_argument(x: Tensor) -> Tensor:
            originals.append(x)
            mover = next(movers)
            y = mover(x) if mover is not None else x
            return _plainly(y, self.mesh) if self.plain else y

        with _disabled():
            local_args = tuple(map_tensors(arg, localised_argument) for arg in args)
            local_kwargs = map_tensors(kwargs, localised_argument) if kwargs else {}
        if self.plain:
            return self.function(*local_args, **local_kwargs), originals
        with _disabled():
            return self.function(*local_args, **local_kwargs), originals

    def _wrapped(self, out: Any, originals: list[Tensor]) -> Any:
        results = iter(zip(self.layouts, self.returned, strict=True))

        def wrap(x: Tensor) -> Tensor:
            layout, argument = next(results)
            if argument is not None and originals[argument].__class__ is DTensor:
                if originals[argument] is x or type(x) is Ranked or self.mesh.device_type == "meta":
                    return originals[argument]
            return wrap_fresh(x, layout)

        return map_tensors(out, wrap)


def _plainly(x: Tensor, mesh: Mesh) -> Tensor:
    """An argument as a local tensor that Python may see. One that came plain is every rank's, and has one gradient."""
    return localise(x) if x.__class__ is DTensor else x if x.__class__ is Ranked else spread(x, mesh)


# Step by step


class MoveStep:
    """Bring an interior value into another layout; one that is `fresh`, and was never seen, may be overwritten."""

    __slots__ = ("moves", "run", "source", "target")

    def __init__(self, source: int, target: int, moves: tuple[Move, ...], *, fresh: bool = False) -> None:
        self.source, self.target, self.moves = source, target, moves
        self.run = in_place(moves[0]) if fresh and len(moves) == 1 else partial(run_path, moves=moves)

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        slots[self.target] = self.run(slots[self.source])


class MoveArgument:
    """Bring an argument into another layout, sharing the move with other uses of it."""

    __slots__ = ("mover", "moves", "source", "target")

    def __init__(self, source: int, target: int, moves: tuple[Move, ...]) -> None:
        self.source, self.target, self.moves, self.mover = source, target, moves, mover_for(moves)

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        x = originals[self.source]
        y = self.mover(x)
        slots[self.target] = slots[self.source] if y is x else y


class MoveTogether:
    """Bring several operands of a call into other layouts, by one collective."""

    __slots__ = ("arguments", "paths", "steps")

    def __init__(self, steps: Sequence[MoveStep | MoveArgument]) -> None:
        self.steps, self.paths = steps, [step.moves for step in steps]
        self.arguments = [step for step in steps if isinstance(step, MoveArgument)]

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        if any(step.mover.key in originals[step.source].__dict__.get("_moved", ()) for step in self.arguments):
            for step in self.steps:  # another call has moved some of them
                step(slots, originals)
            return
        moved = run_together([slots[step.source] for step in self.steps], self.paths)
        for step, x in zip(self.steps, moved, strict=True):
            slots[step.target] = x
        for step in self.arguments:
            x = originals[step.source]
            if _grad_enabled() and x.requires_grad and not is_leaf(x):
                x.__dict__.setdefault("_moved", {})[step.mover.key] = slots[step.target], x._version, step.moves


class CallStep:
    """Run a local function."""

    __slots__ = ("args", "function", "kwargs", "targets")

    def __init__(self, function: Callable, args: list[Any], kwargs: dict[str, Any], targets: list[int]) -> None:
        self.function, self.args, self.kwargs, self.targets = function, args, kwargs, targets

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        args = [_fill(arg, slots) for arg in self.args]
        kwargs = {name: _fill(arg, slots) for name, arg in self.kwargs.items()}
        out = self.function(*args, **kwargs)
        if isinstance(out, Tensor):
            slots[self.targets[0]] = out
        else:
            for target, tensor in zip(self.targets, flat_tensors(out), strict=True):
                slots[target] = tensor


class Slot:
    """Where an argument of a step is found."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _fill(template: Any, slots: list[Any]) -> Any:
    if template.__class__ is Slot:
        return slots[template.index]
    if template.__class__ is list or template.__class__ is tuple:
        return [_fill(item, slots) for item in template]
    return template


class Steps:
    """A flat list of steps over numbered slots."""

    __slots__ = ("mesh", "num_slots", "output", "outputs", "plain", "returned", "simulated", "steps", "labels")

    def __init__(self, lowered: Lowered) -> None:
        trace = lowered.trace
        self.steps: list[Any] = []
        self.num_slots = len(trace.values) + len(trace.inputs)
        self.mesh = lowered.mesh
        self.simulated = len(lowered.mesh.held) > 1
        self.output = trace.output
        self.plain = not runs_in_cpp(lowered.mesh)
        self.outputs: dict[int, tuple[int, Layout]] = {}
        self.returned: dict[int, int] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        originals = flat_tensors(args)
        if kwargs:
            originals += flat_tensors(kwargs)
        slots: list[Any] = [None] * self.num_slots
        if self.plain:
            slots[: len(originals)] = [_plainly(x, self.mesh) for x in originals]
        else:
            slots[: len(originals)] = originals
        if self.simulated:
            self._run(slots, originals)
        else:
            with _disabled():
                self._run(slots, originals)
        with _disabled():
            return self._result(self.output, slots, originals)

    def _run(self, slots: list[Any], originals: list[Tensor]) -> None:
        for step in self.steps:
            step(slots, originals)

    def _result(self, template: Any, slots: list[Any], originals: list[Tensor]) -> Any:
        if isinstance(template, Value):
            argument = self.returned.get(template.index)
            if argument is not None:
                return originals[argument]
            slot, layout = self.outputs[template.index]
            out = slots[slot]
            return wrap_fresh(out, layout)
        if isinstance(template, list):
            return [self._result(item, slots, originals) for item in template]
        if isinstance(template, tuple):
            items = [self._result(item, slots, originals) for item in template]
            if type(template) is tuple:
                return tuple(items)
            return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
        return template


def _steps(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> Plan:
    trace = lowered.trace
    plan = Steps(lowered)
    num_arguments = len(trace.inputs)
    slot_of: dict[int, int] = {}
    for position, value in enumerate(trace.inputs):
        slot_of.setdefault(value.index, position)
    argument_of = dict(slot_of)
    fresh = iter(range(num_arguments, 10**9))
    for value, constant in trace.constants:
        slot_of[value.index] = next(fresh)
        plan.steps.append(_Constant(slot_of[value.index], constant, lowered.mesh))
    placed: dict[tuple[int, tuple], int] = {}
    families = written_families(trace)
    for call in lowered.calls:
        _add_call(plan, call, lowered, slot_of, argument_of, placed, families, fresh)
    plan.num_slots = next(fresh)
    for value in flat_values(trace.output):
        if value.index in argument_of:
            plan.returned[value.index] = argument_of[value.index]
        else:
            plan.outputs[value.index] = slot_of[value.index], lowered.layouts[value.index]
    return _simplified(plan, lowered, args, kwargs)


class _Constant:
    """A tensor that the traced function brought along. Every call has its own: it may be written to, or returned."""

    __slots__ = ("mesh", "slot", "tensor")

    def __init__(self, slot: int, tensor: Tensor, mesh: Mesh) -> None:
        self.slot, self.tensor, self.mesh = slot, tensor, mesh

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        slots[self.slot] = spread(self.tensor.clone(), self.mesh)


def _add_call(
    plan: Steps,
    lowered_call: LoweredCall,
    lowered: Lowered,
    slot_of: dict[int, int],
    argument_of: dict[int, int],
    placed: dict[tuple[int, tuple], int],
    families: dict[int, int],
    fresh: Any,
) -> None:
    call = lowered_call.call
    here: dict[int, list[int]] = {}
    steps: list[MoveArgument | MoveStep] = []
    for value, moves in zip(call.inputs, lowered_call.moves, strict=True):
        slot = slot_of[value.index]
        if not all(move.is_identity for move in moves):
            key = (value.index, moves)
            if key not in placed:
                placed[key] = next(fresh)
                if value.index in argument_of:
                    steps.append(MoveArgument(argument_of[value.index], placed[key], moves))
                else:
                    steps.append(MoveStep(slot, placed[key], moves))
            slot = placed[key]
        here.setdefault(value.index, []).append(slot)
    plan.steps += [MoveTogether(steps)] if can_join([step.moves for step in steps]) else steps
    function, args, kwargs = local_call(lowered_call, lowered.mesh)
    if not is_builtin(function):
        plan.plain = True
    if plan.simulated and not call.inputs:
        function = _once_for_all(function, lowered.mesh)
    elif is_random(call):
        function = random_call(function, call, lowered_call.layouts, argument_of)
    args = [_slotted(arg, here) for arg in args]
    kwargs = {name: _slotted(arg, here) for name, arg in kwargs.items()}
    targets = []
    for value in call.outputs:
        if value.index not in slot_of:
            slot_of[value.index] = next(fresh)
        targets.append(slot_of[value.index])
        for key in [key for key in placed if key[0] == value.index]:
            del placed[key]  # written in place: moved copies are stale
    written = {families.get(call.inputs[position].index) for position in call.mutated} - {None}
    for key in [key for key in placed if families.get(key[0]) in written]:
        del placed[key]  # so are those of values that share its storage
    plan.steps.append(CallStep(function, args, kwargs, targets))
    for target, moves in zip(targets, lowered_call.out_moves, strict=True):
        if moves:
            plan.steps.append(MoveStep(target, target, moves, fresh=True))


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


def _simplified(plan: Steps, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> Plan:
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
