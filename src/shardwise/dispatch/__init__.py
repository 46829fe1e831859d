"""Dispatch: one call, from its key to its plan to its result.

`planning` makes the plan of a call that was never seen; `functions` answers for calls that are no computations;
`aliasing` knows what shares memory with what; `interop` meets autograd and the rest of torch.
"""

from shardwise.dispatch import fast_entry  # noqa: F401  # this and the next say how functions are treated
from shardwise.dispatch.call import CacheInfo, cache_info, clear_cache, dispatch, make_plan
from shardwise.dispatch.functions import (  # noqa: F401
    assignment,
    contiguous_inputs,
    exports,
    inplace,
    norm_stacking,
    ragged,
)
from shardwise.dispatch.interop import autograd, autograd_function, compiled, transforms  # noqa: F401
from shardwise.dispatch.modes import implicit_replication, strict
from shardwise.dispatch.planning import autocast  # noqa: F401

__all__ = ["CacheInfo", "cache_info", "clear_cache", "dispatch", "implicit_replication", "make_plan", "strict"]

compiled.mark_entry_points()
