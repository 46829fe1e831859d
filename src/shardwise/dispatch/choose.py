"""Choosing: along each mesh axis, the cheapest way to run a traced call.

Axes are chosen independently. Along one axis every value has one placement, every op a list of strategies, and the
price of a strategy is what its inputs must be moved; dynamic programming over the straight line of ops, with the
placements of the values still needed as its state, finds the cheapest combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.dispatch.trace import Trace, written_families
from shardwise.layout import Layout, Partial
from shardwise.redistribute import transition_cost
from shardwise.rules import PENDING, AxisPlacement, Call, Strategy, Value, flat_values, replicated, rule_for

BACKWARD = 1e-6
"""The weight of a gradient's journey against the value's own. It decides only between ways that are otherwise alike: a
weight's gradient is larger than a batch, and gathering the batch would undo what the user chose."""

DEFERRAL = 0.1
"""What leaving a reduction pending is worth, of its price: linear ops pass it on, and a shard of it may be all that is
wanted. Making a whole value pending costs twice that, so that a sum is not deferred by splitting what is whole."""

BEAM = 256
"""States kept per op; fewer in traces of more than `LONG` ops, which functions that loop over numbers make."""

LONG = 64

IMPOSSIBLE = float("inf")


def strategies_of(call: Call) -> list[Strategy]:
    """The strategies of a call by its rule; without one, everything is replicated."""
    rule = rule_for(call.op)
    return [replicated(call)] if rule is None else rule.strategies(call)


def kind_between(source: AxisPlacement, target: AxisPlacement) -> str:
    """The kind of transition between two placements along one axis."""
    if source == target:
        return "nothing"
    if source is None:
        return "slice" if isinstance(target, int) else "mask"
    if isinstance(source, int):
        return "all_gather" if target is None else "all_to_all" if isinstance(target, int) else "pad"
    return "all_reduce" if target is None else "reduce_scatter" if isinstance(target, int) else "impossible"


_DUAL_KIND = {
    "nothing": "nothing",
    "slice": "all_gather",
    "mask": "nothing",
    "all_gather": "slice",
    "all_to_all": "all_to_all",
    "pad": "slice",
    "all_reduce": "nothing",
    "reduce_scatter": "all_gather",
}


def move_cost(value: Value, source: AxisPlacement, target: AxisPlacement, ranks: int) -> float:
    """The price of bringing a value from one placement to another along one axis, its gradient's way back included."""
    if source == target:
        return 0.0
    kind = kind_between(source, target)
    if kind == "impossible":
        return move_cost(value, source, None, ranks) + move_cost(value, None, target, ranks)
    if isinstance(target, Partial) and not _can_begin(target, kind):
        return IMPOSSIBLE
    cost = transition_cost(kind, value.numel, ranks)
    if kind in ("slice", "reduce_scatter"):  # a call does not shard what was not: that would be paid for later
        cost += (0.5 if kind == "slice" else 1.0) * transition_cost("all_gather", value.numel, ranks)
    if kind == "mask":
        cost += 2 * DEFERRAL * transition_cost("all_reduce", value.numel, ranks)
    if value.dtype.is_floating_point:
        cost += BACKWARD * transition_cost(_DUAL_KIND[kind], value.numel, ranks)
    return cost


def _can_begin(pending: Partial, kind: str) -> bool:
    """Whether there is a way to make a value pending that is not: a sum of anything; an average or an extremum of equal
    terms. A norm has no sign."""
    return pending.reduce_op == "sum" or (kind != "pad" and pending.reduce_op in ("avg", "max", "min"))


@dataclass(slots=True)
class _State:
    cost: float
    placements: dict[int, AxisPlacement]
    chosen: tuple[Any, ...]  # a linked list: (previous, strategy)


def choose_axis(
    trace: Trace,
    axis: int,
    layouts: Sequence[Layout],
    options: Sequence[list[Strategy]],
    banned: set[tuple[int, int, Strategy]],
) -> list[Strategy]:
    """The cheapest strategy of every call along one axis, given the layouts of the trace's inputs."""
    ranks = layouts[0].mesh.shape[axis]
    start = {value.index: placement_of(layout, axis) for value, layout in zip(trace.inputs, layouts, strict=True)}
    start.update((value.index, None) for value, _ in trace.constants)
    if all(placement is None for placement in start.values()):
        whole = [ways[0] for ways in options]
        if not any(_is_sharded(way) or (position, axis, way) in banned for position, way in enumerate(whole)):
            return whole  # nothing lies otherwise than whole: nothing costs nothing
    last_use, pinned, families = _last_uses(trace), _pinned(trace), written_families(trace)
    beam = BEAM if len(trace.calls) <= LONG else BEAM // 8
    states = {(): _State(0.0, start, ())}
    for position, call in enumerate(trace.calls):
        found: dict[tuple, _State] = {}
        for state in states.values():
            for strategy in _concrete(options[position], call, state.placements):
                if (position, axis, strategy) in banned:
                    continue
                cost = state.cost + step_cost(call, strategy, state.placements, ranks, pinned, families)
                if cost >= IMPOSSIBLE:
                    continue
                placements = dict(state.placements)
                for value, placement in zip(call.outputs, strategy.outs, strict=True):
                    placements[value.index] = placement
                for gone in last_use.get(position, ()):
                    placements.pop(gone, None)
                key = tuple(placements.values())  # of the same values, in the same order, in every state
                known = found.get(key)
                if known is None or cost < known.cost:
                    found[key] = _State(cost, placements, (state.chosen, strategy))
        if not found:
            raise NoStrategyError(call)
        states = _pruned(found, beam)
    outputs = flat_values(trace.output)
    best = min(states.values(), key=lambda state: state.cost + _debt(outputs, state.placements, ranks))
    picked: list[Strategy] = []
    chosen = best.chosen
    while chosen:
        chosen, strategy = chosen
        picked.append(strategy)
    return picked[::-1]


class NoStrategyError(Exception):
    """No strategy of a call can be reached, because what it writes to cannot be moved."""

    def __init__(self, call: Call) -> None:
        super().__init__(str(call))
        self.call = call


def placement_of(layout: Layout, axis: int) -> AxisPlacement:
    return layout.pending[axis] or layout.axis_dim(axis)


def step_cost(
    call: Call,
    strategy: Strategy,
    placements: dict[int, AxisPlacement],
    ranks: int,
    pinned: set[int],
    families: dict[int, int],
) -> float:
    """What it costs to run a call by a strategy, with its inputs where they are."""
    cost = strategy.cost
    for position in call.mutated:
        value = call.inputs[position]
        if value.index in pinned and placements[value.index] != strategy.ins[position]:
            return IMPOSSIBLE  # what others see being written to stays where it is
        if call.outputs and strategy.outs and strategy.ins[position] not in strategy.outs:
            return IMPOSSIBLE
    if call.is_view and call.inputs and call.inputs[0].index in families:
        if placements[call.inputs[0].index] != strategy.ins[0]:
            return IMPOSSIBLE  # a view of a moved copy: what is written to it, or to its base, would be lost
    varies = any(placement is not None for placement in strategy.outs)
    for value, wanted in zip(call.inputs, strategy.ins, strict=True):
        cost += move_cost(value, placements[value.index], wanted, ranks)
        if varies and wanted is None and value.dtype.is_floating_point:
            cost += BACKWARD * transition_cost("all_reduce", value.numel, ranks)
    return cost


def _debt(outputs: Sequence[Value], placements: dict[int, AxisPlacement], ranks: int) -> float:
    """Pending results are paid for later."""
    return (1 - DEFERRAL) * sum(
        transition_cost("all_reduce", value.numel, ranks)
        for value in outputs
        if isinstance(placements.get(value.index), Partial)
    )


def _concrete(options: list[Strategy], call: Call, placements: dict[int, AxisPlacement]) -> list[Strategy]:
    """Strategies for whatever reduction is pending, with that reduction filled in."""
    found = []
    for strategy in options:
        if PENDING not in strategy.ins:
            found.append(strategy)
            continue
        found_there = (placements[v.index] for v, way in zip(call.inputs, strategy.ins, strict=True) if way is PENDING)
        pending = next((placement for placement in found_there if isinstance(placement, Partial)), None)
        if pending is not None:
            fill = lambda placement, pending=pending: pending if placement is PENDING else placement  # noqa: E731
            ins, outs = tuple(map(fill, strategy.ins)), tuple(map(fill, strategy.outs))
            found.append(Strategy(ins, outs, strategy.cost, strategy.resize))
    return found


def _pinned(trace: Trace) -> set[int]:
    """Values that a write must reach where they are: arguments, and whatever has views or is one."""
    found = {value.index for value in trace.inputs} | {value.index for value, _ in trace.constants}
    for call in trace.calls:
        if call.is_view:
            found.update(value.index for value in (*call.inputs, *call.outputs))
    return found


def _last_uses(trace: Trace) -> dict[int, list[int]]:
    """After which call each value is no longer needed."""
    last: dict[int, int] = {}
    for position, call in enumerate(trace.calls):
        for value in (*call.inputs, *call.outputs):
            last[value.index] = position
    kept = {value.index for value in flat_values(trace.output)}
    uses: dict[int, list[int]] = {}
    for index, position in last.items():
        if index not in kept:
            uses.setdefault(position, []).append(index)
    return uses


def _is_sharded(strategy: Strategy) -> bool:
    return any(placement is not None for placement in (*strategy.ins, *strategy.outs))


def _pruned(states: dict[tuple, _State], beam: int) -> dict[tuple, _State]:
    if len(states) <= beam:
        return states
    best = sorted(states.items(), key=lambda item: item[1].cost)[:beam]
    return dict(best)
