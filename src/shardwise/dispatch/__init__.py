"""Dispatch: one call, from its key to its plan to its result."""

from shardwise.dispatch import (
    assignment,
    autocasting,
    autograd,
    conjugates,
    entries,
    functions,
    making,
    numbers,
    transforms,
)
from shardwise.dispatch.call import CacheInfo, cache_info, clear_cache, dispatch, make_plan
from shardwise.dispatch.modes import implicit_replication, strict

__all__ = [
    "CacheInfo",
    "assignment",
    "autocasting",
    "autograd",
    "cache_info",
    "clear_cache",
    "conjugates",
    "dispatch",
    "entries",
    "functions",
    "implicit_replication",
    "make_plan",
    "making",
    "numbers",
    "strict",
    "transforms",
]
