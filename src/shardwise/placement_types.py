"""Placements, where torch's programs import them from."""

from shardwise.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
