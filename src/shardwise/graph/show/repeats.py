"""Lines that come again and again, layer after layer, are shown once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.graph.show.lines import OpLine

WORTH_IT = 4
"""Lines that folding must save."""
LONGEST = 4000
"""Lines of a layer, at most."""

_BASE, _MODULUS = 1_000_003, 2**61 - 1


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many times the same; `body` is the first of them, folded in turn."""

    count: int
    body: tuple[OpLine | Repeat, ...]
    last: int
    """The number of the last line of the last one."""


def folded(lines: Sequence[OpLine]) -> list[OpLine | Repeat]:
    """Lines, with what is repeated in the place of its repetitions."""
    return list(_Folding(lines).run(0, len(lines)))


class _Folding:
    """Looks for runs of equal blocks, the longest first; whether two stretches are equal is one comparison."""

    def __init__(self, lines: Sequence[OpLine]) -> None:
        self.lines = lines
        kinds: dict[tuple, int] = {}
        self.kinds = [kinds.setdefault(line.structure, len(kinds) + 1) for line in lines]
        self._sums, self._powers = [0], [1]
        for kind in self.kinds:
            self._sums.append((self._sums[-1] * _BASE + kind) % _MODULUS)
            self._powers.append(self._powers[-1] * _BASE % _MODULUS)
        self._next = self._next_alike()

    def _next_alike(self) -> list[int]:
        """Where a line of the same structure comes next."""
        last: dict[int, int] = {}
        found = [len(self.kinds)] * len(self.kinds)
        for at in reversed(range(len(self.kinds))):
            found[at] = last.get(self.kinds[at], len(self.kinds))
            last[self.kinds[at]] = at
        return found

    def run(self, start: int, stop: int) -> Iterator[OpLine | Repeat]:
        at = start
        while at < stop:
            period, count = self._best(at, stop)
            if count > 1:
                first, at = at, at + period * count
                yield Repeat(count, tuple(self.run(first, first + period)), self.lines[at - 1].number)
            else:
                yield self.lines[at]
                at += 1

    def _best(self, at: int, stop: int) -> tuple[int, int]:
        """The block from here on whose repetitions cover most."""
        best, saved = (1, 1), WORTH_IT - 1
        following = self._next[at]
        while following < stop and 2 * (following - at) <= stop - at and following - at <= LONGEST:
            period = following - at
            count = self._count(at, period, stop)
            if (count - 1) * period > saved:
                best, saved = (period, count), (count - 1) * period
            following = self._next[following]
        return best

    def _count(self, at: int, period: int, stop: int) -> int:
        """How often the block of so many lines is repeated, the first time counted."""
        count = 1
        while at + (count + 1) * period <= stop and self._hash(at, period) == self._hash(at + count * period, period):
            count += 1
        while count > 1 and not self._is_wired_alike(at, period, count):
            count -= 1
        return count

    def _hash(self, at: int, length: int) -> int:
        return (self._sums[at + length] - self._sums[at] * self._powers[length]) % _MODULUS

    def _is_wired_alike(self, at: int, period: int, count: int) -> bool:
        """Whether each block reads what the others read: the same value, or one that is as far on for each block as for
        the one before. What the first block reads from before itself may be something else."""
        first = self.lines[at].number
        for line in range(at, at + period):
            blocks = [self.lines[line + period * number].reads for number in range(count)]
            for read in zip(*blocks, strict=True):
                is_inside = read[0] >= first
                compared = read if is_inside else read[1:]
                steps = {b - a for a, b in pairwise(compared)}
                if len(steps) > 1 or (is_inside and steps != {period}):
                    return False
        return True
