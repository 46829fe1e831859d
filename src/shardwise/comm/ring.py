"""The ring model: what one rank sends when the ranks of a group pass data round a ring."""

from __future__ import annotations


def ring_bytes(kind: str, size: float, ranks: int) -> float:
    """The bytes that each rank sends for a collective on a value of `size` bytes, were it replicated.

    >>> ring_bytes("all_reduce", 1000, 4), ring_bytes("all_gather", 1000, 4), ring_bytes("all_to_all", 1000, 4)
    (1500.0, 750.0, 187.5)
    """
    share = size * (ranks - 1) / ranks
    match kind:
        case "all_reduce":
            return 2 * share
        case "all_gather" | "reduce_scatter" | "broadcast":
            return share
        case "all_to_all":
            return share / ranks
    raise AssertionError(kind)


OF_GLOBAL_SIZE = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
"""The collectives to which every rank brings a value of the global size; to the others each brings its shard."""


def ring_bytes_of(kind: str, brought: int, ranks: int) -> float:
    """The same, from the bytes that this rank brings."""
    return ring_bytes(kind, brought if kind in OF_GLOBAL_SIZE else brought * ranks, ranks)
