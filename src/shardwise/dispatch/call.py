"""One call: key → cached plan → run. On a miss: trace → choose → lower → build."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import noters
from shardwise.comm.cause import watchers, without_plan
from shardwise.dispatch.functions.foreach import has_plain_elements
from shardwise.dispatch.interop.mixing import mixed, takes_replicated
from shardwise.dispatch.key import PlainTensor, Uncacheable, as_planned, key_of, long_key
from shardwise.dispatch.modes import implicit_replication, unseen
from shardwise.dispatch.plan import Direct, Plan, wrap_fresh
from shardwise.dispatch.planning.first_call import make_plan, misses
from shardwise.dispatch.positional import by_position
from shardwise.dispatch.watch import watched
from shardwise.rules.kit.treatments import handlers
from shardwise.tensor import DTensor

MAX_PLANS = 16384
"""Plans kept; beyond that the oldest go."""

_disabled = torch._C.DisableTorchFunctionSubclass
# (function, types, args, kwargs): the same as a call inside `_disabled`, at less than half the price
_on_shard = torch._C._disabled_torch_function_impl
_plans: dict[tuple, Plan] = {}
_planned = _plans.get
_special = handlers.get
_calls = itertools.count()
_call = _calls.__next__


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How the plan cache is doing."""

    hits: int
    misses: int
    size: int
    max_size: int


def cache_info() -> CacheInfo:
    """Hits, misses and size of the plan cache."""
    # A counter's only way to say where it stands is its repr.
    calls = int(repr(_calls)[6:-1])
    return CacheInfo(calls - misses.count, misses.count, len(_plans), MAX_PLANS)


def clear_cache() -> None:
    """Forget all plans. The counts go on."""
    _plans.clear()


def dispatch(
    cls: type, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run a torch function on DTensors."""
    if not args and kwargs:
        args, kwargs = by_position(func, kwargs)
    special = _special(func)
    if special is not None:
        if watchers:
            out = without_plan(func, partial(special, func, args, kwargs or {}))
        else:
            out = special(func, args, kwargs or {})
        if out is not NotImplemented:
            return out
    count = 0 if kwargs else len(args)
    try:
        if count == 2:  # unrolled: most calls have up to three arguments
            x, y = args
            key: tuple = (
                func,
                x._layout if x.__class__ is DTensor else key_of(x),
                y._layout if y.__class__ is DTensor else y if y.__class__ is int else key_of(y),
            )
        elif count == 1:
            (x,) = args
            key = (func, x._layout if x.__class__ is DTensor else key_of(x))
        elif count == 3:
            x, y, z = args
            key = (
                func,
                x._layout if x.__class__ is DTensor else key_of(x),
                y._layout if y.__class__ is DTensor else y if y.__class__ is int else key_of(y),
                z._layout if z.__class__ is DTensor else z if z.__class__ is int else key_of(z),
            )
        else:
            key = long_key(func, args, kwargs)
    except (Uncacheable, PlainTensor) as reason:
        return _without_key(reason, func, args, kwargs)
    _call()
    plan = _planned(key)
    if plan.__class__ is Direct and not (watchers and plan.labels):
        out = _on_shard(plan.function, (), args, kwargs) if kwargs else _on_shard(plan.function, (), args)
        if out.__class__ is Tensor:
            out.__class__ = DTensor
            out.__dict__["_layout"] = plan.layout
            return out
        return wrap_fresh(out, plan.layout)
    if plan is None:
        plan = _remember(key, func, args, kwargs or {})
    if watchers:
        return watched(plan, func, args, kwargs)
    return plan(args, kwargs)


def _without_key(reason: Exception, func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A call with arguments that cannot be part of a key: planned each time, or with plain tensors as replicated."""
    if isinstance(reason, Uncacheable) or has_plain_elements(func, args, kwargs):
        plan = unseen(make_plan, func, args, kwargs or {})
        return watched(plan, func, args, kwargs) if watchers else plan(args, kwargs)
    if not takes_replicated(func, args, kwargs):
        raise mixed(func, args, kwargs) from None
    with implicit_replication():
        return dispatch(DTensor, func, (), args, kwargs)


def _remember(key: tuple, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    misses.count += 1
    if noters:
        args, kwargs = as_planned((args, kwargs))
    plan: Any = unseen(make_plan, func, args, kwargs)
    if not isinstance(plan, (Direct, FunctionType)):
        plan = plan.__call__  # bound: a call of an object that is not a function takes a detour
    while len(_plans) >= MAX_PLANS:
        del _plans[next(iter(_plans))]
    _plans[key] = plan
    return plan


DTensor.__torch_function__ = MethodType(dispatch, DTensor)  # type: ignore[method-assign]  # bound once, not per look-up
