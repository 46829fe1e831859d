"""What passes have changed, in numbers: the collectives of a program before and after each, and what they send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardwise.graph.nodes import collective_of
from shardwise.words import size


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one rank's program: how many of each kind, and the bytes that it sends, by the ring model."""

    counts: tuple[tuple[str, int], ...]
    bytes: int

    @staticmethod
    def of(graph: fx.Graph) -> Traffic:
        counts: Counter[str] = Counter()
        sent = 0
        for node in graph.nodes:
            collective = collective_of(node)
            if collective is not None and collective.ranks > 1:
                counts[collective.kind] += 1
                sent += collective.wire_bytes(bytes_of(node.args[0]))
        return Traffic(tuple(sorted(counts.items())), sent)

    @property
    def collectives(self) -> int:
        return sum(count for _, count in self.counts)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts)
        return f"{kinds}, {size(self.bytes)}" if kinds else "nothing"


def bytes_of(brought: Any) -> int:
    """The bytes of what a rank brings: a tensor, or a list of them."""
    found: list[int] = []
    fx.map_arg(brought, lambda node: found.append(node.meta["facts"].bytes))
    return sum(found)


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did to the program of the first rank held here; `notes` say it in words.

    `left_out` says that the ranks would have differed in what they communicate after it, so that none of them took it.
    """

    name: str
    before: Traffic
    after: Traffic
    notes: tuple[str, ...] = ()
    left_out: bool = False

    def __str__(self) -> str:
        """
        >>> from shardwise.graph.passes import PassReport, Traffic
        >>> before, after = Traffic((("all_reduce", 40),), 711_396), Traffic((("all_reduce", 4),), 711_372)
        >>> print(PassReport("bucket", before, after, ("37 reductions of gradients in 1",)))
        bucket: 37 reductions of gradients in 1; 40 all_reduce, 711.4 kB → 4 all_reduce, 711.4 kB
        >>> print(PassReport("merge", after, after))
        merge: nothing to do
        >>> print(PassReport("scatter", after, after, left_out=True))
        scatter: left out, since the ranks would not communicate alike
        """
        if self.left_out:
            return f"{self.name}: left out, since the ranks would not communicate alike"
        sent = [] if self.before == self.after else [f"{self.before} → {self.after}"]
        return f"{self.name}: {'; '.join([*self.notes, *sent]) or 'nothing to do'}"
