"""Dispatch: one call, from its key to its plan to its result.

`planning` makes the plan of a call that was never seen; `functions` answers for calls that are no computations;
`aliasing` knows what shares memory with what; `interop` meets autograd and the rest of torch.
"""

from shardwise.dispatch import fast_entry
from shardwise.dispatch.call import CacheInfo, cache_info, clear_cache, dispatch, make_plan
from shardwise.dispatch.functions import (
    assignment,
    conjugates,
    exports,
    init,
    inplace_shapes,
    lengths,
    norm_stacking,
    ragged,
    zero_grad,
)
from shardwise.dispatch.interop import autograd, autograd_function, compiled, transforms
from shardwise.dispatch.modes import implicit_replication, strict
from shardwise.dispatch.planning import autocast

__all__ = [
    "CacheInfo",
    "assignment",
    "autocast",
    "autograd",
    "autograd_function",
    "cache_info",
    "clear_cache",
    "compiled",
    "conjugates",
    "dispatch",
    "exports",
    "fast_entry",
    "implicit_replication",
    "init",
    "inplace_shapes",
    "lengths",
    "make_plan",
    "norm_stacking",
    "ragged",
    "strict",
    "transforms",
    "zero_grad",
]

compiled.mark_entry_points()
