"""`loss_parallel`: the promise that a loss over sharded classes is computed where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.dispatch.key import Uncacheable, key_of
from shardwise.dispatch.modes import implicit_replication
from shardwise.dispatch.planning.fallback import describe
from shardwise.dispatch.planning.lower import Lowered, LoweredCall, lower
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors, trace_call
from shardwise.errors import PlacementError
from shardwise.layout import Layout
from shardwise.rules.kit.treatments import treatment_of
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass

LOSSES = frozenset({F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, Tensor.log_softmax})
"""The functions that torch's own `loss_parallel` is about."""

_WATCHED = frozenset({"cross_entropy", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward"})

MAX_KNOWN = 1024
"""Calls whose check is remembered."""


class loss_parallel(TorchFunctionMode):
    """Inside, a loss over a sharded class dim stays sharded, or raises.

    Under torch's DTensor this context switches a loss to its class-parallel implementation, which it needs for the
    backward pass too. Here `cross_entropy`, `log_softmax` and `nll_loss` are class-parallel wherever that is the
    cheapest way, so the context changes no result, and `backward()` need not be inside. What it states is the intent: a
    call that would move the logits away from their classes, because another argument lies where it costs less to
    (targets sharded along the very axis that splits the classes, say), raises `PlacementError` instead, before anything
    is communicated. Plain targets and weights are taken as replicated. It may be nested, and nothing of it outlives the
    block.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> logits = sw.distribute_tensor(torch.zeros(4, 10), mesh, [sw.Shard(1)])
    >>> with sw.parallel.loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    >>> round(loss.item(), 4)
    2.3026
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES and any(isinstance(x, DTensor) for x in flat_tensors((args, kwargs))):
            with implicit_replication():  # plain targets and weights are whole, as in torch's own context
                _check(func, args, kwargs)
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_known: dict[tuple, bool] = {}


def _check(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    try:
        key = (func, *map(key_of, args), *((name, key_of(value)) for name, value in kwargs.items()))
    except Uncacheable:
        key = None
    stays = _known.get(key) if key is not None else None
    if stays is None:
        stays = _stays(func, args, kwargs)
        if key is not None:
            while len(_known) >= MAX_KNOWN:
                del _known[next(iter(_known))]
            _known[key] = stays
    if not stays:
        raise PlacementError(
            f"inside loss_parallel(), {describe(func.__name__, args, kwargs)} would move its logits away from the axes "
            f"that split their classes. Place the targets so that these axes replicate them, as "
            f"target.redistribute(placements=[...]) does, or call it outside of loss_parallel()"
        )


def _stays(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves the classes of its logits where they lie."""
    lowered = _lowered(func, args, kwargs)
    return all(_keeps_classes(call, lowered) for call in lowered.calls if call.call.name in _WATCHED)


def _keeps_classes(call: LoweredCall, lowered: Lowered) -> bool:
    logits = call.call.inputs[0]
    if not logits.ndim:
        return True
    dim = call.call.dims()[0] if call.call.name == "_log_softmax" else min(1, logits.ndim - 1)
    return set(lowered.layouts[logits.index].splits[dim]) <= set(call.layouts.ins[0].splits[dim])


def _lowered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Lowered:
    """The call as dispatch would plan it."""
    metas: list[Tensor] = []

    def meta(x: Tensor) -> Tensor:
        with _disabled():
            metas.append(torch.empty(_layout(x).shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad))
        return metas[-1]

    tensors = flat_tensors((args, kwargs))
    mesh = next(x._layout.mesh for x in tensors if isinstance(x, DTensor))

    def _layout(x: Tensor) -> Layout:
        return x._layout if isinstance(x, DTensor) else Layout(mesh, tuple(x.shape))

    function = treatment_of(func).stand_in or func
    trace = trace_call(function, map_tensors(args, meta), map_tensors(kwargs, meta), metas, torch.device("meta"))
    return lower(trace, [_layout(x) for x in tensors])
