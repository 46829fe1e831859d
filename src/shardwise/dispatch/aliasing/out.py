"""`out=`: the results of the call without it, copied to where the user wants them, whatever the layout there.

Torch writes over whatever is there, so a result is brought into the layout of its target, pending ones included. A
target is never resized: one of another shape, or of a dtype that torch would not convert to, is refused before anything
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.inplace_via_copy import overwrite
from shardwise.dispatch.plan import Plan, has_terms, reduced_first
from shardwise.dispatch.planning.ask_torch import meta
from shardwise.dispatch.planning.randomness import check_in_step
from shardwise.dispatch.planning.trace import flat_tensors, trace_call
from shardwise.errors import InPlaceError
from shardwise.rules import Value
from shardwise.tensor import DTensor, distribute_tensor

_disabled = torch._C.DisableTorchFunctionSubclass

COMPUTED_AS_OUT = frozenset({"sum", "nansum", "prod", "cumsum", "cumprod", "mean", "nanmean"})
"""Functions that compute in the dtype of `out`, unless they are given another: the rest compute first and convert."""

RETURNING_NOTHING = frozenset({"split_copy", "split_with_sizes_copy", "unbind_copy"})
"""Functions that return nothing when they are given `out`."""

DRAWING = frozenset({"rand", "randn", "randint", "randperm", "normal"})
"""Factories of random numbers, for which all ranks' generators must agree."""


def plan_out(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan | None:
    """The plan of a call with `out=` DTensors; None for other calls, and for those that need none of their own."""
    targets = flat_tensors(kwargs.get("out"))
    if not targets or not all(isinstance(x, DTensor) for x in targets) or isinstance(func, torch._ops.OpOverload):
        return None
    tensors: Any = flat_tensors((args, kwargs))
    written = {id(x) for x in targets}
    if terms := [at for at, x in enumerate(tensors) if id(x) in written and has_terms(x._layout)]:
        return reduced_first(func, terms)
    if len(targets) == 1 and _runs_on_shards(func, tensors):
        return None
    _foresee(func, args, _without_out(kwargs), targets)
    return partial(_into_out, func)


def _without_out(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "out"}


def _runs_on_shards(func: Callable, tensors: Sequence[Any]) -> bool:
    """Whether a call is element-wise on tensors of one layout: then it runs on the shards, `out=` included."""
    layouts = {x._layout if isinstance(x, DTensor) else None for x in tensors}
    if len(layouts) > 1 or any(layout is None or layout.has_pending for layout in layouts):
        return False
    op = getattr(getattr(torch.ops.aten, func.__name__, None), "out", None)
    return op is not None and torch.Tag.pointwise in op.tags


def _foresee(func: Callable, args: tuple, kwargs: dict[str, Any], targets: Sequence[Any]) -> None:
    """Refuse targets before anything runs, where a trace tells shapes: functions may write to other arguments too."""
    if not flat_tensors((args, kwargs)):
        return  # a factory, which may draw numbers: it is looked at what it makes
    metas = [meta(x) for x in flat_tensors((args, kwargs))]
    try:
        with torch.no_grad():
            results = trace_call(func, args, kwargs, metas, torch.device("cpu")).results
    except Exception:  # no kernel for meta tensors, or bad arguments: the call itself says so
        return
    for target, result in zip(targets, results):
        _check_fits(func.__name__, target, result)


def _into_out(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The call without `out=`, and its results copied there. Whatever is refused is refused before that."""
    given, out, name = _without_out(kwargs), kwargs["out"], func.__name__
    targets: Any = flat_tensors(out)
    if torch.is_grad_enabled() and any(x.requires_grad for x in flat_tensors((args, kwargs))):
        raise RuntimeError(f"{name}(): out= is not differentiable, and an argument requires grad; use torch.no_grad()")
    if name in COMPUTED_AS_OUT and given.get("dtype") is None:
        given["dtype"] = targets[0].dtype
    results = func(*args, **given) if flat_tensors((args, given)) else _made(func, args, given, out)
    pairs = list(zip(targets, flat_tensors(results), strict=True))
    for target, result in pairs:
        _check_fits(name, target, result)
    with torch.no_grad():
        for target, result in pairs:
            overwrite(target, result)
    if given.get("requires_grad"):
        out.requires_grad_()
    if isinstance(out, Tensor):
        return out
    return None if name in RETURNING_NOTHING else _named(results)(targets)


def _named(results: Any) -> Any:
    """The type that torch returns targets in: a tuple, with the names of the results if they have any."""
    return getattr(torch.return_types, f"{type(results).__name__}_out", tuple)


def _check_fits(name: str, target: Any, result: Tensor | Value) -> None:
    if target.shape != result.shape or not torch.can_cast(result.dtype, target.dtype):
        raise InPlaceError(
            f"{name} cannot write a result of shape {list(result.shape)} and {result.dtype} to out= of shape "
            f"{list(target.shape)} and {target.dtype}; DTensors are not resized. Nothing was written; give out= a "
            f"tensor that fits, or call {name} without out="
        )


def _made(func: Callable, args: tuple, kwargs: dict[str, Any], target: Any) -> DTensor:
    """What a factory makes of numbers alone, or draws, alike on all ranks."""
    if func.__name__ in DRAWING and kwargs.get("generator") is None:
        check_in_step(target._layout.mesh)
    with _disabled():
        made = torch.empty(target._layout.shape, dtype=target.dtype, device=target.device)
    return distribute_tensor(func(*args, **kwargs, out=made), target._layout.mesh, src_data_rank=None)
