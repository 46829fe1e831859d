"""Rules of ops that read, write or order at indices."""

from shardwise.rules.lookup import counting, indexing, kth, masked_scatter, ordering, scatter

__all__ = ["counting", "indexing", "kth", "masked_scatter", "ordering", "scatter"]
