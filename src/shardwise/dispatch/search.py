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

from shardwise.dispatch.prices import IMPOSSIBLE, PENDING, WHOLE, Prices, units
from shardwise.dispatch.trace import Trace
from shardwise.layout import Partial
from shardwise.rules import PENDING as ANY_REDUCTION
from shardwise.rules import AxisPlacement, Call, Strategy

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
    """A strategy with nothing left to be filled in, and what it costs beyond moving inputs. `only` says of some inputs
    where they must come from: from one placement, or, if that is None, from any that is not pending."""

    strategy: Strategy
    ins: Lying
    outs: Lying
    price: float
    only: dict[int, int | None]


class Options:
    """The strategies of all calls as searches see them: the same in each, unless a reduction is to be filled in."""

    def __init__(
        self, strategies: Sequence[list[Strategy]], prices: Prices, banned: Set[tuple[int, Strategy]] = frozenset()
    ) -> None:
        self.strategies = strategies
        self.prices = prices
        self.banned = banned
        self._known: dict[int, list[_Option]] = {}

    def of(self, position: int, call: Call, possible: Callable[[int], list[int]]) -> list[_Option]:
        """The options of a call, given where values may lie. Strategies for whatever reduction is pending are for the
        first one among such inputs, so those before it are not pending."""
        found = self._known.get(position)
        if found is not None:
            return found
        found = []
        depends = False
        for strategy in self.strategies[position]:
            if ANY_REDUCTION not in strategy.ins:
                found.append(self._option(call, strategy, {}))
                continue
            depends = True
            only: dict[int, int | None] = {}
            for at, value in enumerate(call.inputs):
                if strategy.ins[at] is ANY_REDUCTION:
                    numbers = possible(value.index)
                    for number in numbers:
                        if number <= PENDING:
                            filled = _filled(strategy, self.prices.reduction(number))
                            found.append(self._option(call, filled, {**only, at: number}))
                    if all(number <= PENDING for number in numbers):
                        break
                    only[at] = None
        for at in call.mutated:
            found = [option for option in found if not option.outs or option.ins[at] in option.outs]
        if self.banned:
            found = [option for option in found if (position, option.strategy) not in self.banned]
        if not depends:
            self._known[position] = found
        return found

    def _option(self, call: Call, strategy: Strategy, only: dict[int, int | None]) -> _Option:
        number = self.prices.number
        ins, outs = tuple([number(p) for p in strategy.ins]), tuple([number(p) for p in strategy.outs])
        price = units(strategy.cost) if strategy.cost else 0
        if outs.count(WHOLE) < len(outs):  # then whole inputs are used as varying
            for value, placement in zip(call.inputs, ins, strict=True):
                if placement == WHOLE:
                    price += self.prices.vary(value.index)
        return _Option(strategy, ins, outs, price, only)


def _filled(strategy: Strategy, pending: Partial) -> Strategy:
    ins = tuple(pending if placement is ANY_REDUCTION else placement for placement in strategy.ins)
    outs = tuple(pending if placement is ANY_REDUCTION else placement for placement in strategy.outs)
    return Strategy(ins, outs, strategy.cost, strategy.resize)


class Search:
    """One search. No table has more than `width` ways, and nothing is dearer than `limit`."""

    def __init__(
        self,
        trace: Trace,
        every: Options,
        start: dict[int, AxisPlacement],
        *,
        width: int,
        limit: float = IMPOSSIBLE,
    ) -> None:
        self.trace = trace
        self.every = every
        self.prices = prices = every.prices
        self.width = width
        self.limit = limit
        self.is_exact = True  # no way was left out that may have been cheaper
        self.settled = {index: prices.number(placement) for index, placement in start.items()}  # lie in one way only
        self.tables: dict[int, _Table] = {}  # of all other values
        self.price: float = 0  # of all that must be paid in any case; ways in tables cost what they say beyond it
        self.choice = 0  # of the calls that nothing depends on any more
        self.options: list[list[_Option]] = []

    def run(self) -> list[Strategy] | None:
        """The strategies of all calls; None if there are none for the last call that was looked at."""
        for position, call in enumerate(self.trace.calls):
            self.options.append(self.every.of(position, call, self._possible))
            ended = self.trace.last_uses.get(position, frozenset())
            if not self._step(call, ended, _DIGIT * (len(self.trace.calls) - 1 - position)):
                return None
        mask, choice, chosen = (1 << _DIGIT) - 1, self.choice, []
        for options in reversed(self.options):  # nothing is needed any more, so there are no tables left
            chosen.append(options[choice & mask].strategy)
            choice >>= _DIGIT
        return chosen[::-1]

    def _step(self, call: Call, ended: frozenset[int], shift: int) -> bool:
        """Let one more call run in every way it can, if there is one. Values that have `ended` are not used again."""
        made = {value.index: i for i, value in enumerate(call.outputs)}  # what is written to is made anew
        kept = [(index, i) for index, i in made.items() if index not in ended]
        due = [(index, i) for index, i in made.items() if index in ended and index in self.trace.returned]
        parts = self._parts(call, ended, made) if self.tables else []
        settled = [(at, self.settled[v.index]) for at, v in enumerate(call.inputs) if v.index in self.settled]
        found: Ways = {}
        for digit, option in enumerate(self.options[-1]):
            price = option.price
            for at, source in settled:
                if option.only or source != option.ins[at]:
                    price += self._move(call, option, at, source)
            for index, i in due:
                price += self.prices.debt(index, option.outs[i])
            if price >= IMPOSSIBLE:
                continue
            ways: Ways = {(): (price, digit << shift)}
            for part in parts:
                ways = _together(ways, self._moved(part, call, option))
            lying = tuple([option.outs[i] for _, i in kept])
            for key, way in ways.items():
                key += lying
                known = found.get(key)
                if known is None or way < known:
                    found[key] = way
        found = self._pruned(found)
        if found:
            for index in (*made, *ended):
                self.settled.pop(index, None)
                self.tables.pop(index, None)
            self._go_on([*(index for part in parts for index in part.needed), *(index for index, _ in kept)], found)
        return bool(found)

    def _pruned(self, ways: Ways) -> Ways:
        """The ways worth going on with."""
        if self.limit < IMPOSSIBLE:
            room = self.limit - self.price
            ways = {key: way for key, way in ways.items() if way[0] <= room}
        if len(ways) <= self.width:
            return ways
        self.is_exact = False
        return dict(sorted(ways.items(), key=lambda item: item[1])[: self.width])

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

    def _parts(self, call: Call, ended: frozenset[int], made: dict[int, int]) -> list[_Part]:
        """The tables that a call has inputs in, as it sees them."""
        tables = {id(t): t for value in call.inputs if (t := self.tables.get(value.index)) is not None}
        parts = []
        for table in tables.values():
            columns = dict(zip(table.values, zip(*table.ways, strict=True), strict=True))
            here = list(dict.fromkeys(value.index for value in call.inputs if value.index in columns))
            inputs = [(at, here.index(v.index)) for at, v in enumerate(call.inputs) if v.index in columns]
            needed = [index for index in table.values if index not in ended and index not in made]
            due = [index for index in here if index in ended and index not in made and index in self.trace.returned]
            sources = zip(*(columns[index] for index in here), strict=True)
            lying = zip(*(columns[index] for index in needed), strict=True) if needed else [()] * len(table.ways)
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

    def _moved(self, part: _Part, call: Call, option: _Option) -> Ways:
        """How the values of a part lie that are needed after a call, with what it takes to bring its inputs there."""
        found: Ways = {}
        for source, ways in part.sources.items():
            moving: float = 0
            for at, i in part.inputs:
                if option.only or source[i] != option.ins[at]:
                    moving += self._move(call, option, at, source[i])
            if moving >= IMPOSSIBLE:
                continue
            for key, (price, choice) in ways.items():
                way = (price + moving, choice)
                known = found.get(key)
                if known is None or way < known:
                    found[key] = way
        return found

    def _move(self, call: Call, option: _Option, at: int, source: int) -> float:
        """What it takes to bring an input to where a strategy wants it."""
        wanted = option.ins[at]
        if option.only and at in option.only:
            only = option.only[at]
            if source <= PENDING if only is None else source != only:
                return IMPOSSIBLE
        if source == wanted:
            return 0
        index = call.inputs[at].index
        if at in call.mutated and index in self.trace.pinned:
            return IMPOSSIBLE  # what others see being written to stays where it is
        if at == 0 and call.is_view and index in self.trace.written_families:
            return IMPOSSIBLE  # a view of a moved copy: what is written to it, or to its base, would be lost
        return self.prices.move(index, source, wanted)

    def _possible(self, index: int) -> list[int]:
        """Where a value may lie."""
        table = self.tables.get(index)
        if table is None:
            return [self.settled[index]]
        column = table.values.index(index)
        return list(dict.fromkeys(key[column] for key in table.ways))


def _together(some: Ways, others: Ways) -> Ways:
    """The ways of values that have nothing to do with each other."""
    return {
        a + b: (price + more, choice + further)
        for a, (price, choice) in some.items()
        for b, (more, further) in others.items()
    }
