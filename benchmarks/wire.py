"""What a program puts on the wire: collectives, the bytes a ring moves for them, and which of them are small."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from shardwise.comm.ring import ring_bytes_of

NUMBERS_PER_ROW = 8
FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective, as one rank sees it; `bytes` is what it contributes."""

    kind: str
    bytes: int
    ranks: int

    @property
    def whole(self) -> int:
        """Bytes of the tensor that the group reduces, gathers or exchanges."""
        return self.bytes * self.ranks if self.kind in ("all_gather", "all_to_all") else self.bytes


def ring_bytes(comm: Collective) -> float:
    """What each rank of a ring sends."""
    return ring_bytes_of(comm.kind, comm.bytes, comm.ranks)


def all_reduce(numbers: int, ranks: int, *, itemsize: int = FLOAT_BYTES) -> Collective:
    return Collective("all_reduce", numbers * itemsize, ranks)


def all_gather(numbers: int, ranks: int, *, itemsize: int = FLOAT_BYTES) -> Collective:
    """To a tensor of so many numbers."""
    return Collective("all_gather", numbers * itemsize // ranks, ranks)


def reduce_scatter(numbers: int, ranks: int, *, itemsize: int = FLOAT_BYTES) -> Collective:
    """Of a tensor of so many numbers."""
    return Collective("reduce_scatter", numbers * itemsize, ranks)


def all_to_all(numbers: int, ranks: int, *, itemsize: int = FLOAT_BYTES) -> Collective:
    """Of a tensor of so many numbers, split before and after."""
    return Collective("all_to_all", numbers * itemsize // ranks, ranks)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The collectives of one training step, or of one call where there is no backward pass."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()

    def __add__(self, other: Schedule) -> Schedule:
        return Schedule(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Schedule:
        return Schedule(self.forward * times, self.backward * times)


@dataclasses.dataclass(frozen=True)
class Small:
    """Which collectives are small, and so listed apart: at most `NUMBERS_PER_ROW` float32 numbers for each row (token)
    that a rank computes, or, in the backward pass, the gradient of a vector as long as a row is wide (a norm's weight,
    a bias). What counts is the tensor that the group works on, not one rank's part of it; so one to which this rank
    brings nothing, and of whose size it knows nothing, is not small."""

    rows: int
    width: int

    def __call__(self, comm: Collective, *, backward: bool) -> bool:
        limit = NUMBERS_PER_ROW * self.rows
        return 0 < comm.whole <= FLOAT_BYTES * (max(limit, self.width) if backward else limit)


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many collectives of each kind, and the bytes of all of them."""

    counts: dict[str, int]
    bytes: float

    @staticmethod
    def of(comms: Iterable[Collective]) -> Tally:
        comms = list(comms)
        return Tally(dict(sorted(Counter(comm.kind for comm in comms).items())), sum(map(ring_bytes, comms)))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return " ".join(f"{kind} {count}" for kind, count in self.counts.items()) or "-"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ours against a person's, for one direction: the large collectives judged, the small ones listed."""

    person: Tally
    ours: Tally
    person_small: Tally
    ours_small: Tally

    @property
    def of_bytes(self) -> float:
        return ratio(self.ours.bytes, self.person.bytes)

    @property
    def of_collectives(self) -> float:
        return ratio(self.ours.total, self.person.total)

    @property
    def is_met(self) -> bool:
        return self.of_bytes <= 1.0 and self.of_collectives <= 1.0


def ratio(ours: float, theirs: float) -> float:
    """
    >>> ratio(3, 2), ratio(0, 0), ratio(1, 0)
    (1.5, 1.0, inf)
    """
    if theirs:
        return ours / theirs
    return float("inf") if ours else 1.0


def compare(
    person: tuple[Collective, ...], ours: tuple[Collective, ...], small: Small, *, backward: bool
) -> Comparison:
    def tally(comms: tuple[Collective, ...], *, apart: bool) -> Tally:
        return Tally.of(comm for comm in comms if small(comm, backward=backward) == apart)

    return Comparison(
        tally(person, apart=False), tally(ours, apart=False), tally(person, apart=True), tally(ours, apart=True)
    )
