"""Losses and look-ups that models end and begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.notation import Factor, Factors, dims_of, factor_rule
from shardwise.rules.pointwise import broadcast
from shardwise.rules.reductions import PROGRAM_COST, wide
from shardwise.rules.registry import register
from shardwise.rules.types import SUM, Call, Collectives, Local, Rule, Strategy

NONE, MEAN = 0, 1  # torch's reduction enum; 2 is the sum


# Element-wise losses with a reduction


def _pointwise_loss(call: Call) -> Factors:
    shape = torch.broadcast_shapes(*(value.shape for value in call.inputs))
    names = dims_of(len(shape))
    ins = [[names[d] if isinstance(d, int) else None for d in broadcast(value.shape, shape)] for value in call.inputs]
    return Factors(ins, [names if call["reduction"] == NONE else ()])


def _pointwise_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """A mean over shards is the sum over each shard, divided by the global number of elements."""
    if call["reduction"] != MEAN or not any(any(layout.splits) for layout in ins):
        return None
    args, kwargs = call.replace(reduction=NONE)
    count = torch.broadcast_shapes(*(value.shape for value in call.inputs)).numel()
    return Local(_scaled, [call.op, count, *args], kwargs)


def _scaled(loss: Any, count: int, *args: Any, **kwargs: Any) -> Tensor:
    terms = loss(*args, **kwargs)
    return (wide(terms).sum() / count).to(terms.dtype)


register(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"),
    rule=factor_rule(_pointwise_loss, _pointwise_loss_local),
)


# Negative log likelihood, with the batch or the classes sharded


def _class_dim(call: Call) -> int:
    return 1 if call.inputs[0].ndim > 1 else 0


def _nll(call: Call) -> list[Strategy]:
    x, classes = call.inputs[0], _class_dim(call)
    num_weights = len(call.inputs) - 2
    found = [Strategy((None,) * len(call.inputs), (None, None))]
    for dim in range(x.ndim):
        if dim == classes:
            found.append(Strategy((dim, None, *([0] * num_weights)), (None, None), 2 * PROGRAM_COST))
            continue
        target = dim if dim < classes else dim - 1
        loss = target if call["reduction"] == NONE else SUM
        found.append(Strategy((dim, target, *([None] * num_weights)), (loss, None), PROGRAM_COST))
    return found


def _nll_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return None
    classes = _class_dim(call)
    batch_axes = tuple(axis for dim, axes in enumerate(ins[0].splits) if dim != classes for axis in axes)
    args = [call["self"], call["target"], call["weight"], call["reduction"], call["ignore_index"], classes]
    return Local(_sharded_nll, args, groups=(batch_axes, ins[0].splits[classes]))


def _sharded_nll(
    batch: Collectives,
    shards: Collectives,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """Each rank looks up the targets that fall into its classes; weights are summed over batch and classes."""
    losses, weights = batch.map(_local_nll, x, target, weight, ignore, classes, shards.offset(0, classes))
    if reduction == NONE:
        return shards.psum(losses), x.new_zeros(())
    total = shards.reduce(batch.reduce(wide(weights).sum(), "sum"), "sum")
    loss = shards.psum(wide(losses).sum())
    loss = loss / total if reduction == MEAN else loss
    return loss.to(x.dtype), total.to(x.dtype)


def _local_nll(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore: int, classes: int, offset: int
) -> tuple[Tensor, Tensor]:
    """The loss terms, and their weights, of the targets whose class is held here; zero elsewhere."""
    index = target - offset
    mine = (index >= 0) & (index < x.shape[classes]) & (target != ignore)
    if not x.shape[classes]:  # no classes here: zeros that are still part of the graph
        nothing = x.sum(classes)
        return nothing, nothing.detach()
    index = index.clamp(0, x.shape[classes] - 1)
    weights = mine.to(x.dtype) if weight is None else torch.where(mine, weight.detach()[index], 0)
    picked = x.gather(classes, index.unsqueeze(classes)).squeeze(classes)
    return -torch.where(mine, picked, 0) * weights, weights


register("nll_loss_forward", "nll_loss2d_forward", rule=Rule(_nll, _nll_local))


# Embedding with a table that is whole, or split by columns


def _embedding(call: Call) -> Factors:
    rows: Sequence[Factor] = dims_of(call.inputs[1].ndim, "index")
    if call["scale_grad_by_freq"]:  # the gradient counts how often each index occurs, so it must see them all
        rows = [None] * len(rows)
    return Factors([[None, "column"], rows], [[*rows, "column"]])


register("embedding", rule=factor_rule(_embedding))
