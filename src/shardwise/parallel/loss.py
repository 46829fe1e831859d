"""`loss_parallel`: the promise that a loss over sharded classes is computed on their shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.dispatch.modes import checked, implicit_replication
from shardwise.dispatch.planning.fallback import describe
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.dispatch.watch import Label, SeenCall
from shardwise.errors import PlacementError
from shardwise.rules.losses.class_losses import cross_entropy
from shardwise.rules.losses.linear_cross_entropy import linear_cross_entropy

LOSSES = frozenset(
    {
        *(F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
        *(cross_entropy, linear_cross_entropy),
    }
)
"""The functions that torch's own `loss_parallel` is about, and ours."""

_WATCHED = frozenset({"cross_entropy", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward"})
"""The ops that these are made of whose first operand has the classes."""


class loss_parallel(TorchFunctionMode):
    """Inside, a loss over a sharded class dim stays sharded, or raises.

    Under torch's DTensor this context switches a loss to its class-parallel implementation, which it needs for the
    backward pass too. Here `cross_entropy`, `log_softmax` and `nll_loss` are class-parallel wherever that is the
    cheapest way, so the context changes no result, and `backward()` need not be inside. What it states is the intent: a
    call that would move the logits away from their classes, because of the layout of another argument
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
        if func not in LOSSES or all(type(x) is Tensor for x in flat_tensors((args, kwargs))):
            return func(*args, **kwargs)  # others are DTensors, or `fuse_loss`'s logits, which may become some
        with implicit_replication(), checked(_refuse_moved_classes):  # plain targets are whole, as in torch's context
            return func(*args, **kwargs)


def _refuse_moved_classes(call: SeenCall, label: Label) -> None:
    """Raise if what a loss moves are the classes of its logits."""
    name = "" if label.op is None else label.op._schema.name.split("::")[1]
    if name not in _WATCHED or label.at != 0:
        return
    before, after = label.moves[0].source.layout.splits, label.moves[-1].target.layout.splits
    dims = range(len(before)) if name == "_log_softmax" else [min(1, len(before) - 1)]
    if not all(set(before[dim]) <= set(after[dim]) for dim in dims):
        loss = describe(call.func.__name__, call.args, call.kwargs)
        raise PlacementError(
            f"inside loss_parallel(), {loss} would move its logits away from the axes that split their classes. Place "
            f"the targets so that these axes replicate them, as "
            f"target.redistribute(placements=[...]) does, or call it outside of loss_parallel()"
        )
