"""Dispatch: one call, from its key to its plan to its result."""

from shardwise.dispatch import (
    assignment,
    autocasting,
    autograd,
    compiled,
    conjugates,
    exports,
    functions,
    initialising,
    lengths,
    numbers,
    ragged,
    reshaping,
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
    "compiled",
    "conjugates",
    "dispatch",
    "exports",
    "functions",
    "implicit_replication",
    "initialising",
    "lengths",
    "make_plan",
    "numbers",
    "ragged",
    "reshaping",
    "straight",
    "strict",
    "transforms",
    "zeroing",
]

compiled.mark_entry_points()
