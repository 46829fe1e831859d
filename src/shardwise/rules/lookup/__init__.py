"""Rules of ops that read, write or order at indices."""

from shardwise.rules.lookup import indexing, masked_scatter, ordering, scatter

__all__ = ["indexing", "masked_scatter", "ordering", "scatter"]
