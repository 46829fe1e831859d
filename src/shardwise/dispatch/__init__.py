"""Dispatch: one call, from its key to its plan to its result."""

from shardwise.dispatch import (
    assignment,
    autocasting,
    autograd,
    conjugates,
    counts,
    distinct,
    entries,
    functions,
    lengths,
    making,
    numbers,
    packed,
    ragged,
    straight,
    transforms,
    zeroing,
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
    "counts",
    "dispatch",
    "distinct",
    "entries",
    "functions",
    "implicit_replication",
    "lengths",
    "make_plan",
    "making",
    "numbers",
    "packed",
    "ragged",
    "straight",
    "strict",
    "transforms",
    "zeroing",
]
