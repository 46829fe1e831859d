"""Names that may still change."""

from shardwise.dispatch import implicit_replication

__all__ = ["implicit_replication"]
