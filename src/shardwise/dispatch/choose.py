"""Choosing: along each mesh axis, the cheapest way to run a traced call. Axes are chosen independently."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.dispatch.prices import IMPOSSIBLE, Prices
from shardwise.dispatch.search import Options, Search
from shardwise.dispatch.trace import Trace
from shardwise.layout import Layout
from shardwise.rules import AxisPlacement, Call, Strategy, refuse, replicated, rule_for

NARROW, WIDE = 8, 64
"""Ways kept per table of a search. Where a narrow search left out some that may have been as cheap as what it found, a
wide one follows, which need not look at anything dearer."""


def strategies_of(call: Call) -> list[Strategy]:
    """The strategies of a call by its rule; without one, everything is replicated. Raises what torch would."""
    refuse(call)
    rule = rule_for(call.op)
    return [replicated(call)] if rule is None else rule.strategies(call)


def choose_axis(
    trace: Trace,
    axis: int,
    layouts: Sequence[Layout],
    options: Sequence[list[Strategy]],
    banned: set[tuple[int, int, Strategy]],
) -> list[Strategy]:
    """The cheapest strategy of every call along one axis, given the layouts of the trace's inputs. Among equals the
    first call has the first of its strategies that it can have, then the second call, and so on."""
    start = {value.index: placement_of(layout, axis) for value, layout in zip(trace.inputs, layouts, strict=True)}
    start.update((value.index, None) for value, _ in trace.constants)
    banned_here = {(position, way) for position, at, way in banned if at == axis}
    if all(placement is None for placement in start.values()):
        whole = [ways[0] for ways in options]
        if not any(_is_sharded(way) or (position, way) in banned_here for position, way in enumerate(whole)):
            return whole  # nothing lies otherwise than whole: nothing costs nothing
    every = _options(trace, layouts[0].mesh.shape[axis], options, banned_here)
    search = Search(every, start, width=NARROW)
    chosen = search.run()
    limit = IMPOSSIBLE if chosen is None else search.price
    if search.left_out <= limit and search.left_out < IMPOSSIBLE:
        search = Search(every, start, width=WIDE, limit=limit)
        chosen = search.run() or chosen
    if chosen is None:
        raise NoStrategyError(trace.calls[len(search.options) - 1])
    return chosen


def _options(trace: Trace, ranks: int, options: Sequence[list[Strategy]], banned: set[tuple[int, Strategy]]) -> Options:
    """What a search needs to know: the same along all axes of so many ranks."""
    found = trace.searched.get(ranks)
    if found is None or found.strategies is not options or banned:
        found = Options(trace, options, Prices(trace, ranks), banned)
        if not banned:
            trace.searched[ranks] = found
    return found


class NoStrategyError(Exception):
    """No strategy of a call can be reached, because what it writes to cannot be moved."""

    def __init__(self, call: Call) -> None:
        super().__init__(str(call))
        self.call = call


def placement_of(layout: Layout, axis: int) -> AxisPlacement:
    return layout.pending[axis] or layout.axis_dim(axis)


def _is_sharded(strategy: Strategy) -> bool:
    return any(placement is not None for placement in (*strategy.ins, *strategy.outs))
