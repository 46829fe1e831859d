"""One call: key → cached plan → run. On a miss: trace → choose → lower → build."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.build import build
from shardwise.dispatch.fallback import Gathered, report
from shardwise.dispatch.key import Uncacheable, key_of, variant_key
from shardwise.dispatch.lists import plan_list_call
from shardwise.dispatch.lower import Lowered, lower
from shardwise.dispatch.plan import Plan
from shardwise.dispatch.special import SPECIAL
from shardwise.dispatch.trace import flat_tensors, map_tensors, trace_call
from shardwise.errors import MeshError
from shardwise.layout import Layout
from shardwise.rules import flat_values
from shardwise.rules.foreach import is_list_op
from shardwise.tensor import DTensor

MAX_PLANS = 16384
"""Plans kept; beyond that the oldest go."""

_disabled = torch._C.DisableTorchFunctionSubclass
_plans: dict[tuple, Plan] = {}
_calls = itertools.count()
_call = _calls.__next__


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How the plan cache is doing."""

    hits: int
    misses: int
    size: int
    max_size: int


_counted = {"calls": 0, "misses": 0}


def cache_info() -> CacheInfo:
    """Hits, misses and size of the plan cache."""
    # A counter's only way to say where it stands is its repr.
    calls = int(repr(_calls)[6:-1])
    return CacheInfo(calls - _counted["misses"], _counted["misses"], len(_plans), MAX_PLANS)


def clear_cache() -> None:
    """Forget all plans. The counts go on."""
    _plans.clear()


def dispatch(
    cls: type, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run a torch function on DTensors."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs or {})
    key = [func]
    append = key.append
    for arg in args:
        kind = arg.__class__
        if kind is DTensor:
            append(arg._layout)
        elif kind is int:
            append(arg)
        elif kind is float:
            append(float)
        else:
            try:
                append(key_of(arg))
            except Uncacheable:
                return make_plan(func, args, kwargs or {})(args, kwargs)
    if kwargs:
        for name, arg in kwargs.items():
            append(name)
            try:
                append(key_of(arg))
            except Uncacheable:
                return make_plan(func, args, kwargs)(args, kwargs)
    _call()
    plan = _plans.get(tuple(key))
    if plan is None:
        plan = _remember(tuple(key), func, args, kwargs or {})
    return plan(args, kwargs)


def _remember(key: tuple, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    _counted["misses"] += 1
    plan = make_plan(func, args, kwargs)
    while len(_plans) >= MAX_PLANS:
        del _plans[next(iter(_plans))]
    _plans[key] = plan
    return plan


def make_plan(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Plan one call."""
    tensors = flat_tensors((args, kwargs))
    mesh = _common_mesh(tensors)
    layouts = [x._layout if isinstance(x, DTensor) else Layout(mesh, tuple(x.shape)) for x in tensors]
    if is_list_op(func):
        return plan_list_call(func, args, kwargs)
    plan, invariant = _plan(func, args, kwargs, layouts)
    return plan if invariant else Variants(func, layouts, variant_key_now(args, kwargs), plan)


def variant_key_now(args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    with _disabled():
        return variant_key(args, kwargs)


class Variants:
    """Plans of one key that depend on dtypes or on the values of floats as well."""

    __slots__ = ("func", "layouts", "plans")

    def __init__(self, func: Callable, layouts: list[Layout], key: tuple, plan: Plan) -> None:
        self.func = func
        self.layouts = layouts
        self.plans = {key: plan}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        key = variant_key_now(args, kwargs)
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= 64:
                del self.plans[next(iter(self.plans))]
            _counted["misses"] += 1
            plan = self.plans[key] = _plan(self.func, args, kwargs or {}, self.layouts)[0]
        return plan(args, kwargs)


def _common_mesh(tensors: Sequence[Tensor]) -> Any:
    meshes = list(dict.fromkeys(x._layout.mesh for x in tensors if isinstance(x, DTensor)))
    if len(meshes) > 1:
        raise MeshError(
            f"one call mixes tensors on {meshes[0]} and on {meshes[1]}; bring them to one mesh first "
            f"(full_tensor() and distribute_tensor)"
        )
    return meshes[0]


def _plan(func: Callable, args: tuple, kwargs: dict[str, Any], layouts: list[Layout]) -> tuple[Plan, bool]:
    """A plan, and whether it holds for all dtypes and floats."""
    metas: list[Tensor] = []
    made: dict[int, Tensor] = {}

    def meta(x: Tensor) -> Tensor:
        if id(x) not in made:
            shape = x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)
            with _disabled():
                made[id(x)] = torch.empty(shape, dtype=x.dtype, device="meta")
        metas.append(made[id(x)])
        return made[id(x)]

    meta_args, meta_kwargs = map_tensors(args, meta), map_tensors(kwargs, meta)
    try:
        trace = trace_call(func, meta_args, meta_kwargs, metas, _device(args, kwargs))
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return Gathered(func, layouts[0].mesh), True
        raise
    if not _covered(trace.output):
        return Gathered(func, layouts[0].mesh), True
    lowered = lower(trace, layouts)
    plan = build(func, lowered, args, kwargs)
    gathering = [call for call in lowered.calls if call.gathers]
    if gathering:
        plan = Reported(plan, gathering[0].call.op._schema.name.replace("::", "."), (func, *layouts))
    return plan, _is_invariant(lowered, args, kwargs)


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    with _disabled():
        return next(x.device for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor))


def _covered(output: Any) -> bool:
    """Whether a traced call returned something made of tensors, not a number read off a meta tensor."""
    return bool(flat_values(output)) or output is None


def _is_invariant(lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    if any(layout.has_pending for layout in lowered.layouts.values()):
        return False
    if any(call.local is not None and not call.local.resized for call in lowered.calls):
        return False
    if not all(call.local is None or len(lowered.calls) == 1 for call in lowered.calls):
        return False
    floats = [value for value in variant_key_now(args, kwargs) if isinstance(value, (float, complex))]
    if not floats and len(lowered.calls) <= 1:
        return True
    return len(lowered.calls) == 1 and torch.Tag.pointwise in lowered.calls[0].call.op.tags


class Reported:
    """A plan in which something without a rule is gathered."""

    __slots__ = ("key", "name", "plan")

    def __init__(self, plan: Plan, name: str, key: tuple) -> None:
        self.plan, self.name, self.key = plan, name, key

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        report(self.name, self.key, args, kwargs or {})
        return self.plan(args, kwargs)


DTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment]
