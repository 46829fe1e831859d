"""What it costs to bring values from one placement to another along one axis: the prices by which ways are chosen."""

from __future__ import annotations

from shardwise.dispatch.trace import Trace
from shardwise.layout import Partial
from shardwise.redistribute import TABLE, transition_cost
from shardwise.rules import AxisPlacement, Value

BACKWARD = 1e-6
"""The weight of a gradient's journey against the value's own. It decides only between ways that are otherwise alike: a
weight's gradient is larger than a batch, and gathering the batch would undo what the user chose."""

DEFERRAL = 0.1
"""What leaving a reduction pending is worth, of its price: linear ops pass it on, and a shard of it may be all that is
wanted. Making a whole value pending costs twice that, so that a sum is not deferred by splitting what is whole."""

IMPOSSIBLE = float("inf")

_UNIT = 2**40
"""Prices are added as whole numbers of such parts, which add up to the same in whatever order."""


def kind_between(source: AxisPlacement, target: AxisPlacement) -> str:
    """The kind of transition between two placements along one axis."""
    return "nothing" if source == target else TABLE.get((_type(source), _type(target)), "impossible")


def _type(placement: AxisPlacement) -> str:
    return "R" if placement is None else "S" if isinstance(placement, int) else "P"


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
    kind = kind_between(source, target)
    if kind == "impossible":  # two reductions: whole in between
        return move_cost(value, source, None, ranks) + move_cost(value, None, target, ranks)
    if isinstance(target, Partial) and not _can_begin(target, kind):
        return IMPOSSIBLE
    return kind_cost(kind, value.numel, ranks, has_gradient=value.dtype.is_floating_point)


def kind_cost(kind: str, numel: int, ranks: int, *, has_gradient: bool) -> float:
    """The price of one kind of transition of a value of so many elements."""
    cost = transition_cost(kind, numel, ranks)
    if kind in ("slice", "reduce_scatter"):  # a call does not shard what was not: that would be paid for later
        cost += (0.5 if kind == "slice" else 1.0) * transition_cost("all_gather", numel, ranks)
    if kind == "mask":
        cost += 2 * DEFERRAL * transition_cost("all_reduce", numel, ranks)
    if has_gradient:
        cost += BACKWARD * transition_cost(_DUAL_KIND[kind], numel, ranks)
    return cost


def _can_begin(pending: Partial, kind: str) -> bool:
    """Whether there is a way to make a value pending that is not: a sum of anything; an average or an extremum of equal
    terms. A norm has no sign."""
    return kind == "nothing" or pending.reduce_op == "sum" or (kind == "mask" and pending.reduce_op in BEGINNING)


BEGINNING = ("avg", "max", "min")


# Within a search placements are numbers, which are quick to compare: a dim, or one of these

WHOLE = -1
PENDING = -2  # and below: one for each reduction


class Row(dict[int, float]):
    """The prices of bringing a value to one placement, by where it is; worked out when asked for."""

    __slots__ = ("prices", "size", "target")

    def __init__(self, prices: Prices, size: tuple[int, bool], target: int) -> None:
        self.prices, self.size, self.target = prices, size, target
        self[target] = 0

    def __missing__(self, source: int) -> float:
        price = self[source] = self.prices.between(self.size, source, self.target)
        return price


class Impossible(Row):
    """The same for a value that must not be moved."""

    def __init__(self, target: int) -> None:
        self[target] = 0

    def __missing__(self, source: int) -> float:
        return IMPOSSIBLE


class Reachable(Row):
    """The same for a value that must come from `only` one placement, or, if that is None, from any not pending."""

    __slots__ = ("only", "row")

    def __init__(self, row: Row, only: int | None) -> None:
        self.row, self.only = row, only

    def __missing__(self, source: int) -> float:
        good = source > PENDING if self.only is None else source == self.only
        return self.row[source] if good else IMPOSSIBLE


class Prices:
    """The prices of moves in one trace along one axis, in whole units, and the numbers of placements."""

    __slots__ = ("_kinds", "_numbers", "_reductions", "_rows", "_sizes", "ranks", "returned", "values")

    def __init__(self, trace: Trace, ranks: int) -> None:
        self.values = trace.values
        self.returned = trace.returned
        self.ranks = ranks
        self._kinds: dict[tuple, float] = {}
        self._rows: dict[tuple, Row] = {}
        self._numbers: dict[AxisPlacement, int] = {None: WHOLE}
        self._reductions: list[Partial] = []
        self._sizes: dict[int, tuple[int, bool]] = {}

    def number(self, placement: AxisPlacement) -> int:
        if placement.__class__ is int:
            return placement
        found = self._numbers.get(placement)
        if found is None:
            found = self._numbers[placement] = PENDING - len(self._reductions)
            self._reductions.append(placement)
        return found

    def reduction(self, number: int) -> Partial:
        return self._reductions[PENDING - number]

    def row(self, index: int, target: int) -> Row:
        """The prices of bringing a value to a placement, from wherever it is."""
        size = self._size(index)
        found = self._rows.get((size, target))
        if found is None:
            found = self._rows[size, target] = Row(self, size, target)
        return found

    def between(self, size: tuple[int, bool], source: int, target: int) -> float:
        """The price of bringing a value of some size from one placement to another: `move_cost`, by numbers."""
        if source == target:
            return 0
        if target <= PENDING:
            if source <= PENDING:
                return self.between(size, source, WHOLE) + self.between(size, WHOLE, target)
            kind = "mask" if source == WHOLE else "pad"
            return self._of_kind(size, kind) if _can_begin(self.reduction(target), kind) else IMPOSSIBLE
        before = "R" if source == WHOLE else "S" if source >= 0 else "P"
        return self._of_kind(size, TABLE[before, "R" if target == WHOLE else "S"])

    def _of_kind(self, size: tuple[int, bool], kind: str) -> float:
        price = self._kinds.get((size, kind))
        if price is None:
            numel, has_gradient = size
            price = units(kind_cost(kind, numel, self.ranks, has_gradient=has_gradient))
            self._kinds[size, kind] = price
        return price

    def _size(self, index: int) -> tuple[int, bool]:
        found = self._sizes.get(index)
        if found is None:
            value = self.values[index]
            found = self._sizes[index] = value.numel, value.dtype.is_floating_point
        return found

    def vary(self, index: int) -> float:
        """The price of the gradient of a whole value that is used as varying."""
        numel, has_gradient = size = self._size(index)
        price = self._kinds.get((size, "vary"))
        if price is None:
            cost = BACKWARD * transition_cost("all_reduce", numel, self.ranks) if has_gradient else 0.0
            price = self._kinds[size, "vary"] = units(cost)
        return price

    def debt(self, index: int, number: int) -> float:
        """Pending results are paid for later."""
        if number > PENDING or index not in self.returned:
            return 0
        cost = transition_cost("all_reduce", self.values[index].numel, self.ranks)
        return self.returned[index] * units((1 - DEFERRAL) * cost)


def units(cost: float) -> float:
    return round(cost * _UNIT) if cost < IMPOSSIBLE else IMPOSSIBLE
