"""The search for the cheapest strategies of a trace along one axis: dynamic programming over its line of calls.

Along an axis every value has one placement, every call a list of strategies, and the price of a strategy is what its
inputs must be moved. The state of the search is where the values lie that are still needed. Values that have nothing to
do with each other are kept apart: a table lists the ways in which some values may lie *together*, with the price of
each, and only a call that takes values of several tables joins them. Until then prices add up, and ways do not
multiply. A value that can lie in one way only is in no table, and one that is not needed any more leaves its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter

from shardwise.dispatch.prices import IMPOSSIBLE, PENDING, WHOLE, Impossible, Prices, Reachable, Row, units
from shardwise.dispatch.trace import Trace
from shardwise.layout import Partial
from shardwise.rules import PENDING as ANY_REDUCTION
from shardwise.rules import AxisPlacement, Strategy

Lying = tuple[int, ...]
"""Placements, as numbers."""

Ways = dict[Lying, tuple[float, int]]
"""How some values lie, and what that takes at best: its price, and the strategies chosen for it as digits of a number,
the first call's first. So of two choices of one price the lesser is the one that comes first."""

_DIGIT = 16  # bits


@dataclass(slots=True)
class _Table:
    """The ways in which some values may lie together."""

    values: tuple[int, ...]
    ways: Ways


@dataclass(slots=True)
class _Part:
    """A table as a call sees it: for each way in which the call's inputs among its values may lie, how the values lie
    that are needed afterwards. `inputs` are positions of inputs, and where they stand among the sources."""

    inputs: list[tuple[int, int]]
    sources: dict[Lying, Ways]
    needed: list[int]


@dataclass(slots=True)
class _Option:
    """A strategy with nothing left to be filled in: what it takes to bring each input to where it wants it, from each
    place, where those outputs lie then that are needed afterwards, and what it costs beyond moving inputs."""

    strategy: Strategy
    moves: list[Row]
    lying: Lying
    price: float


class _Step:
    """What one call means to any search: which values it makes, which are kept for later calls, which are not used
    again, and, of each input, whether it must stay where it is."""

    __slots__ = ("call", "due", "ended", "inputs", "kept", "made", "stays")

    def __init__(self, trace: Trace, position: int) -> None:
        self.call = call = trace.calls[position]
        self.inputs = [value.index for value in call.inputs]
        self.ended = trace.last_uses.get(position, frozenset())
        self.made = {value.index: i for i, value in enumerate(call.outputs)}  # what is written to is made anew
        self.kept = [index for index in self.made if index not in self.ended]
        self.due = [index for index in self.made if index in self.ended and index in trace.returned]
        # What others see being written to stays where it is; and of a view of a moved copy, what is written to it, or
        # to its base, would be lost.
        self.stays = {at for at in call.mutated if self.inputs[at] in trace.pinned}
        if call.is_view and self.inputs and self.inputs[0] in trace.written_families:
            self.stays.add(0)


class Options:
    """The strategies of all calls as searches see them: the same in each, unless a reduction is to be filled in."""

    def __init__(
        self,
        trace: Trace,
        strategies: Sequence[list[Strategy]],
        prices: Prices,
        banned: Set[tuple[int, Strategy]] = frozenset(),
    ) -> None:
        self.trace = trace
        self.strategies = strategies
        self.prices = prices
        self.banned = banned
        self._steps: dict[int, _Step] = {}
        self._known: dict[int, list[_Option]] = {}

    def step(self, position: int) -> _Step:
        found = self._steps.get(position)
        if found is None:
            found = self._steps[position] = _Step(self.trace, position)
        return found

    def of(self, position: int, possible: Callable[[int], list[int]]) -> list[_Option]:
        """The options of a call, given where values may lie. Strategies for whatever reduction is pending are for the
        first one among such inputs, so those before it are not pending."""
        found = self._known.get(position)
        if found is not None:
            return found
        found = []
        depends = False
        step = self.step(position)
        for strategy in self.strategies[position]:
            if ANY_REDUCTION not in strategy.ins:
                self._add(found, position, strategy, {})
                continue
            depends = True
            only: dict[int, int | None] = {}
            for at, index in enumerate(step.inputs):
                if strategy.ins[at] is ANY_REDUCTION:
                    numbers = possible(index)
                    for number in numbers:
                        if number <= PENDING:
                            filled = _filled(strategy, self.prices.reduction(number))
                            self._add(found, position, filled, {**only, at: number})
                    if all(number <= PENDING for number in numbers):
                        break
                    only[at] = None
        if not depends:
            self._known[position] = found
        return found

    def _add(self, found: list[_Option], position: int, strategy: Strategy, only: dict[int, int | None]) -> None:
        """Add a strategy that is not out of the question. `only` says of some inputs where they must come from: from
        one placement, or, if that is None, from any that is not pending."""
        step, prices = self.step(position), self.prices
        number = prices.number
        ins, outs = [number(p) for p in strategy.ins], [number(p) for p in strategy.outs]
        for at in step.call.mutated:
            if outs and ins[at] not in outs:
                return
        if self.banned and (position, strategy) in self.banned:
            return
        price = units(strategy.cost) if strategy.cost else 0
        if outs.count(WHOLE) < len(outs):  # then whole inputs are used as varying
            for index, placement in zip(step.inputs, ins, strict=True):
                if placement == WHOLE:
                    price += prices.vary(index)
        for index in step.due:
            price += prices.debt(index, outs[step.made[index]])
        moves = [prices.row(index, wanted) for index, wanted in zip(step.inputs, ins, strict=True)]
        for at in step.stays:
            moves[at] = Impossible(ins[at])
        for at, source in only.items():
            moves[at] = Reachable(moves[at], source)
        found.append(_Option(strategy, moves, tuple([outs[step.made[index]] for index in step.kept]), price))


def _filled(strategy: Strategy, pending: Partial) -> Strategy:
    ins = tuple(pending if placement is ANY_REDUCTION else placement for placement in strategy.ins)
    outs = tuple(pending if placement is ANY_REDUCTION else placement for placement in strategy.outs)
    return Strategy(ins, outs, strategy.cost, strategy.resize)


class Search:
    """One search. No table has more than `width` ways, and nothing is dearer than `limit`."""

    def __init__(
        self, every: Options, start: dict[int, AxisPlacement], *, width: int, limit: float = IMPOSSIBLE
    ) -> None:
        self.every = every
        self.trace = every.trace
        self.prices = prices = every.prices
        self.width = width
        self.limit = limit
        self.left_out: float = IMPOSSIBLE  # the price of the cheapest way that was left out
        self.settled = {index: prices.number(placement) for index, placement in start.items()}  # lie in one way only
        self.tables: dict[int, _Table] = {}  # of all other values
        self.price: float = 0  # of all that must be paid in any case; ways in tables cost what they say beyond it
        self.choice = 0  # of the calls that nothing depends on any more
        self.options: list[list[_Option]] = []

    def run(self) -> list[Strategy] | None:
        """The strategies of all calls; None if there are none for the last call that was looked at."""
        shift = _DIGIT * len(self.trace.calls)
        for position in range(len(self.trace.calls)):
            shift -= _DIGIT
            self.options.append(self.every.of(position, self._possible))
            if not self._step(self.every.step(position), self.options[-1], shift):
                return None
        mask, choice, chosen = (1 << _DIGIT) - 1, self.choice, []
        for options in reversed(self.options):  # nothing is needed any more, so there are no tables left
            chosen.append(options[choice & mask].strategy)
            choice >>= _DIGIT
        return chosen[::-1]

    def _step(self, step: _Step, options: list[_Option], shift: int) -> bool:
        """Let one more call run in every way it can, if there is one."""
        parts = self._parts(step) if self.tables else []
        settled = [(at, self.settled[index]) for at, index in enumerate(step.inputs) if index in self.settled]
        found: Ways = {}
        seen: set[Lying] = set()
        for digit, option in enumerate(options):
            price, moves, lying = option.price, option.moves, option.lying
            for at, source in settled:
                price += moves[at][source]
            room = self.limit - self.price - price
            if room < 0 or price >= IMPOSSIBLE:
                continue
            ways: Ways = {(): (0, 0)}
            for part in parts:
                moved = _moved(part, moves, room)
                ways = _together(ways, moved, room, self.width + 1) if part is not parts[0] else moved
            choice = digit << shift
            ours = {key + lying: (price + more, choice + further) for key, (more, further) in ways.items()}
            if lying in seen:
                ours = {key: way for key, way in ours.items() if key not in found or way < found[key]}
            seen.add(lying)
            found.update(ours)
        if not found:
            return False
        found = self._pruned(found)
        for index in (*step.made, *step.ended):
            self.settled.pop(index, None)
            self.tables.pop(index, None)
        self._go_on([*(index for part in parts for index in part.needed), *step.kept], found)
        return True

    def _pruned(self, ways: Ways) -> Ways:
        """The ways worth going on with."""
        if len(ways) <= self.width:
            return ways
        by_price = sorted(ways.items(), key=itemgetter(1))
        self.left_out = min(self.left_out, self.price + by_price[self.width][1][0])
        return dict(by_price[: self.width])

    def _go_on(self, values: list[int], ways: Ways) -> None:
        """Remember how values may lie, those apart that lie in one way only."""
        columns = list(zip(*ways, strict=True))
        various = [i for i, column in enumerate(columns) if column.count(column[0]) < len(column)]
        for index, column in zip(values, columns, strict=True):
            self.settled[index] = column[0]
        least = min(ways.values())[0]
        self.price += least
        if len(ways) == 1:
            ((_, choice),) = ways.values()
            self.choice += choice
        for index in values:
            self.tables.pop(index, None)
        if various:
            keys = zip(*(columns[i] for i in various), strict=True)
            rows = {key: (price - least, choice) for key, (price, choice) in zip(keys, ways.values(), strict=True)}
            table = _Table(tuple([values[i] for i in various]), rows)
            for index in table.values:
                self.tables[index] = table
                del self.settled[index]

    def _parts(self, step: _Step) -> list[_Part]:
        """The tables that a call has inputs in, as it sees them."""
        tables = {id(t): t for index in step.inputs if (t := self.tables.get(index)) is not None}
        parts = []
        for table in tables.values():
            columns = dict(zip(table.values, zip(*table.ways, strict=True), strict=True))
            here = list(dict.fromkeys([index for index in step.inputs if index in columns]))
            inputs = [(at, here.index(index)) for at, index in enumerate(step.inputs) if index in columns]
            gone = [index for index in here if index in step.ended and index not in step.made]
            needed = [index for index in table.values if index not in step.ended and index not in step.made]
            sources = zip(*[columns[index] for index in here], strict=True)
            lying = zip(*[columns[index] for index in needed], strict=True) if needed else [()] * len(table.ways)
            due = [index for index in gone if index in self.trace.returned]
            debts = [[self.prices.debt(index, number) for number in columns[index]] for index in due]
            part = _Part(inputs, {}, needed)
            for row, (source, key, way) in enumerate(zip(sources, lying, table.ways.values(), strict=True)):
                if debts:
                    way = (way[0] + sum(debt[row] for debt in debts), way[1])
                ways = part.sources.get(source)
                if ways is None:
                    part.sources[source] = {key: way}
                elif key not in ways or way < ways[key]:
                    ways[key] = way
            parts.append(part)
        return parts

    def _possible(self, index: int) -> list[int]:
        """Where a value may lie."""
        table = self.tables.get(index)
        if table is None:
            return [self.settled[index]]
        column = table.values.index(index)
        return list(dict.fromkeys(key[column] for key in table.ways))


def _moved(part: _Part, moves: list[Row], room: float) -> Ways:
    """How the values of a part lie that are needed after a call, with what it takes to bring its inputs there."""
    found: Ways = {}
    for source, ways in part.sources.items():
        moving: float = 0
        for at, i in part.inputs:
            moving += moves[at][source[i]]
        if moving > room or moving >= IMPOSSIBLE:
            continue
        for key, (price, choice) in ways.items():
            price += moving
            known = found.get(key)
            if known is None or price < known[0] or (price == known[0] and choice < known[1]):
                found[key] = price, choice
    return found


def _together(some: Ways, others: Ways, room: float, count: int) -> Ways:
    """The ways of values that have nothing to do with each other, as far as there is room for both: the best `count`,
    and perhaps more. Where i others and j others are better, so are i times j pairs of them."""
    if len(some) * len(others) > count:
        some = dict(sorted(some.items(), key=itemgetter(1)))
        others = dict(sorted(others.items(), key=itemgetter(1)))
    found: Ways = {}
    listed = list(others.items())
    for i, (key, (price, choice)) in enumerate(some.items(), 1):
        for more_key, (more, further) in listed[: count // i]:
            if price + more <= room:
                found[key + more_key] = price + more, choice + further
    return found
