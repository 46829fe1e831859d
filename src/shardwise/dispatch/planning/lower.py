"""Lowering: from a traced call and the layouts of its inputs to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.dispatch.planning.choose import Ban, Chooser, NoStrategyError
from shardwise.dispatch.planning.realise import CannotRealise, Realised, realise
from shardwise.dispatch.planning.trace import Trace
from shardwise.errors import InPlaceError
from shardwise.layout import Layout, Mesh
from shardwise.redistribute import Move, Typed, parameter_moves, plan_moves
from shardwise.rules import Call, Local, Rule, Strategy, Value, is_inexact, rule_for
from shardwise.rules.kit.registry import strategies_of


@dataclass(slots=True)
class LoweredCall:
    """One aten op of a trace: moves per input, how it runs, and moves per output."""

    call: Call
    layouts: Realised
    moves: list[tuple[Move, ...]]
    out_moves: list[tuple[Move, ...]]
    local: Local | None
    gathers: bool  # whether it cannot run on the shards it was given, and they were gathered for it


@dataclass(slots=True)
class Lowered:
    """A trace, lowered; `layouts` are the values' layouts, `copies` the values that torch would make views of
    others and that are copies here; `by_gradient` says that other calls that are alike but for who needs a gradient, or
    is a parameter, may be lowered otherwise."""

    trace: Trace
    mesh: Mesh
    calls: list[LoweredCall]
    layouts: dict[int, Layout]
    copies: frozenset[int]
    by_gradient: bool = False


def lower(trace: Trace, layouts: Sequence[Layout]) -> Lowered:
    """Choose strategies for every call, along every axis, and turn them into layouts, moves and local calls."""
    mesh = layouts[0].mesh
    if any(call.op.namespace != "aten" for call in trace.calls):  # only rules of users' ask for layouts
        for value in trace.values:
            value.layout = Layout(mesh, value.shape)
    for value, layout in zip(trace.inputs, layouts, strict=True):
        value.layout = layout
    for index in trace.parameters:
        trace.values[index].is_parameter = True
    chooser = Chooser(trace, mesh, [strategies_of(call) for call in trace.calls])
    try:
        lowered = lower_calls(chooser, layouts)
    except NoStrategyError as error:
        raise _cannot_write(error.call, trace, layouts) from None
    lowered.by_gradient = chooser.by_gradient or any(map(_parameters_matter, lowered.calls))
    return lowered


def _parameters_matter(lowered: LoweredCall) -> bool:
    """Whether a parameter would be moved otherwise than what is none."""
    ends = [(path[0].source.layout, path[-1].target.layout, path[-1].target.varying) for path in lowered.moves if path]
    return any(parameter_moves(*pair) is not plan_moves(*pair) for pair in ends)


def _cannot_write(call: Call, trace: Trace, layouts: Sequence[Layout]) -> InPlaceError:
    name = call.op._schema.name.replace("::", ".")
    written = call.inputs[call.mutated[0]] if call.mutated else call.inputs[0]
    given = {value.index: str(layout) for value, layout in zip(trace.inputs, layouts, strict=True)}
    at = given.get(written.index, f"{list(written.shape)} inside of the call")
    return InPlaceError(
        f"{name} cannot write to a tensor with the layout {at}: its result has another layout. Nothing was changed; "
        f"redistribute the tensor first, or use the out-of-place function"
    )


def lower_calls(chooser: Chooser, layouts: Sequence[Layout]) -> Lowered:
    """Turn the strategies chosen for each call in turn into layouts, moves and local calls. Raises `CannotRealise` if
    the chooser insists on strategies that do not go together."""
    trace, mesh, options = chooser.trace, chooser.mesh, chooser.options
    current = {value.index: layout for value, layout in zip(trace.inputs, layouts, strict=True)}
    current.update({value.index: Layout(mesh, value.shape) for value, _ in trace.constants})
    aliases = _Aliases(trace)
    rules = [rule_for(call.op) for call in trace.calls]
    gathered = [at for at, call in enumerate(trace.calls) if _needs_all(call, rules[at], options[at])]
    calls = []
    for position, (call, rule) in enumerate(zip(trace.calls, rules, strict=True)):
        have = [current[value.index] for value in call.inputs]
        ways, realised = _realised(position, have, chooser)
        lowered = _lowered_call(call, rule, realised, have, is_only=len(trace.calls) == 1)
        later = chooser.deferred(position, have, ways)
        if later is not ways and any(a is not b for a, b in zip(later, ways, strict=True)):
            pending = realise(call, later, have, mesh)  # a fresh result, which is then reduced
            lowered = _lowered_call(call, rule, pending, have, is_only=False)
            lowered.out_moves = [plan_moves(pending.outs[0], realised.outs[0])]
        sees_all = rule is not None and rule.sees_all
        doomed = bool(gathered) and position <= gathered[-1]
        lowered.gathers = not sees_all and _gathers(ways, have, options[position], doomed)
        aliases.follow(lowered, position, have)
        chooser.follow(call, have, ways)
        calls.append(lowered)
        for value, layout in zip(call.outputs, realised.outs, strict=True):
            current[value.index] = layout
    _vary_before_views(calls, trace)
    copies = frozenset(index for index, is_alias in aliases.views.items() if not is_alias)
    return Lowered(trace, mesh, calls, current, copies)


def _vary_before_views(calls: Sequence[LoweredCall], trace: Trace) -> None:
    """Views of one tensor that are all used as varying (the parts of a packed weight) are views of what is varying: its
    gradient is reduced once, not part by part."""
    uses: dict[int, list[tuple[LoweredCall, int]]] = {}
    for lowered in reversed(calls):
        call = lowered.call
        if call.is_view and len(call.inputs) == 1 and not lowered.moves[0] and not trace.written_families:
            seen = [use for value in call.outputs for use in uses.get(value.index, ())]
            axes = {use.moves[i][0].axes if _only_varies(use.moves[i]) else None for use, i in seen}
            covers = sum(value.numel for value in call.outputs) == call.inputs[0].numel
            seen_outside = any(value.index in trace.returned for value in call.outputs)
            if len(axes) == 1 and None not in axes and covers and not seen_outside:
                for use, i in seen:
                    use.moves[i] = ()
                layout = lowered.layouts.ins[0]
                lowered.moves[0] = plan_moves(layout, layout, frozenset(axes.pop() or ()))
        for i, value in enumerate(call.inputs):
            uses.setdefault(value.index, []).append((lowered, i))


def _only_varies(moves: tuple[Move, ...]) -> bool:
    return len(moves) == 1 and moves[0].kind == "nothing" and moves[0].dual.kind == "all_reduce"


def _realised(position: int, have: Sequence[Layout], chooser: Chooser) -> tuple[Sequence[Strategy], Realised]:
    """The strategies of a call, and the layouts they mean together."""
    banned: set[Ban] = set()
    while True:
        ways = chooser.choose(position, have, banned)
        try:
            return ways, realise(chooser.trace.calls[position], ways, have, chooser.mesh)
        except CannotRealise as cannot:
            if (cannot.axis, cannot.strategy) in banned:
                raise
            banned.add((cannot.axis, cannot.strategy))


def _lowered_call(
    call: Call, rule: Rule | None, realised: Realised, have: Sequence[Layout], *, is_only: bool
) -> LoweredCall:
    wanted = zip(call.inputs, have, realised.ins, realised.varying, strict=True)
    moves = [
        ()
        if source is target and not varying
        else (parameter_moves if value.is_parameter else plan_moves)(source, target, varying)
        for value, source, target, varying in wanted
    ]
    local = rule.local(call, realised.ins, realised.outs) if rule is not None and rule.local is not None else None
    if local is not None and local.resized and not any(any(o.splits) for o in (*realised.ins, *realised.outs)):
        # Nothing is sharded: the global sizes are the local ones. But what a function does to contiguous tensors by a
        # view may take a copy of others.
        if is_only or call.name not in ("view", "_unsafe_view"):
            local = None
    return LoweredCall(call, realised, moves, _out_moves(call, realised, local), local, gathers=False)


def _needs_all(call: Call, rule: Rule | None, options: list[Strategy]) -> bool:
    """Whether no strategy of a call takes anything split, though there is something to split."""
    if all(value.numel < 2 for value in call.inputs) or (rule is not None and rule.sees_all):
        return False
    return not any(isinstance(placement, int) for way in options for placement in way.ins)


def _gathers(chosen: Sequence[Strategy], have: Sequence[Layout], options: list[Strategy], doomed: bool) -> bool:
    """Whether some input that is split along an axis is gathered there because no strategy takes it split, or none of
    a call to come does."""
    for axis, strategy in enumerate(chosen):
        if all(placement is None for placement in strategy.ins):
            split = [i for i, layout in enumerate(have) if layout.numel and layout.axis_dims[axis] is not None]
            if any(doomed or not any(isinstance(way.ins[i], int) for way in options) for i in split):
                return True
    return False


def _out_moves(call: Call, realised: Realised, local: Local | None) -> list[tuple[Move, ...]]:
    """V → R for outputs that every rank computes alike while others are split: their gradient arrives on every rank,
    and what it sends on to inputs that are used as varying must count once. Programs see to that themselves."""
    if (local is not None and local.groups) or not any(realised.varying):
        return [()] * len(call.outputs)
    found: list[tuple[Move, ...]] = []
    for value, layout, axes in zip(call.outputs, realised.outs, realised.alike, strict=True):
        matters = axes and is_inexact(value.dtype) and value not in call.inputs
        found.append((Move(Typed(layout, axes), Typed(layout), tuple(sorted(axes))),) if matters else ())
    return found


class LostWriteError(Exception):
    """A write that would not be seen where it must be: the function must be gathered."""


class _Aliases:
    """Which values are true views of others, and which are seen again, so that a write to a copy of one is noticed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.arguments = {value.index for value in trace.inputs}
        self.families = trace.written_families
        self.views = dict.fromkeys((*self.arguments, *self.families.values()), True)  # still a true alias?

    def follow(self, lowered: LoweredCall, at: int, have: Sequence[Layout]) -> None:
        call = lowered.call
        for position in call.mutated:
            value, layout = call.inputs[position], have[position]
            copied = self.views.get(value.index) is False
            moved = lowered.layouts.ins[position] is not layout and self._is_seen_after(at, call, value)
            if (copied or moved) and self.families.get(value.index, value.index) not in self.arguments:
                raise LostWriteError("writes to a copy of something of its own, and then looks at the original")
            name = call.op._schema.name.replace("::", ".")
            if copied:
                raise InPlaceError(
                    f"{name} would write to a part of a sharded dim that is not a view of the shards; nothing was "
                    f"changed. Assign with slices, or redistribute the tensor first"
                )
            if moved:
                raise InPlaceError(
                    f"{name} cannot write to a tensor with the layout {layout} beside others that are cut otherwise; "
                    f"nothing was changed. Redistribute them alike first"
                )
        if call.is_view and call.inputs and call.inputs[0].index in self.views:
            moved = any(not move.is_identity for move in lowered.moves[0])
            stays = not moved and (lowered.local is None or lowered.local.resized)
            for value in call.outputs:
                if value.index not in self.views:
                    self.views[value.index] = stays and self.views[call.inputs[0].index]

    def _is_seen_after(self, at: int, call: Call, value: Value) -> bool:
        """Whether somebody looks at a value itself after a call that writes to it, rather than at what that returns."""
        if value.index in self.arguments or value.index in self.families:
            return True
        later = (*(call.inputs for call in self.trace.calls[at + 1 :]), self.trace.results)
        return value not in call.outputs and any(value in values for values in later)
