"""Parallel modules."""

from shardwise.parallel.modules import distribute_module

__all__ = ["distribute_module"]
