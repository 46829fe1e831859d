"""Averages and norms: a local step before the reduction, and one after it. Both are ordinary differentiable ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.redistribute.cost import group_size
from shardwise.redistribute.transitions import Move


def _is_norm(move: Move) -> bool:
    return move.source.at(move.axes[0]) == "P" and move.pending.reduce_op == "norm"


def prepare(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    if move.source.at(move.axes[0]) != "P":
        return shards
    if move.pending.reduce_op == "avg":
        ranks = group_size(move.source.layout.mesh, move.axes)
        return [x / ranks if x.is_floating_point() or x.is_complex() else x for x in shards]
    if move.pending.reduce_op == "norm":
        return [_power(x, _order(move)) for x in shards]
    return shards


def finish(move: Move, shards: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    if _is_norm(move):
        return [_root(x, _order(move)).to(dtype) for x in shards]
    if (
        move.source.at(move.axes[0]) == "P"
        and move.pending.reduce_op == "avg"
        and not (dtype.is_floating_point or dtype.is_complex)
    ):
        ranks = group_size(move.source.layout.mesh, move.axes)  # integers are added up, and then divided
        return [torch.div(x, ranks, rounding_mode="trunc") for x in shards]
    return shards


def _order(move: Move) -> float:
    order = move.pending.p
    assert order is not None
    return order


def _power(x: Tensor, order: float) -> Tensor:
    if order == 0 or math.isinf(order):
        return x.abs()
    if x.dtype in (torch.float16, torch.bfloat16):  # squares of what half precision holds do not fit into it
        x = x.float()
    if order == 2 and not x.is_complex():
        return x * x
    if order >= 1:
        return x.abs() ** order
    zero = x == 0  # an order below one has an infinite slope there; the norm's gradient is zero
    return torch.where(zero, 0, torch.where(zero, 1, x.abs()) ** order)


def _root(x: Tensor, order: float) -> Tensor:
    if order == 0 or math.isinf(order):
        return x
    if not x.requires_grad:
        return x.sqrt() if order == 2 else x ** (1 / order)
    zero = x == 0  # the norm's gradient is zero where the norm is, not the root's infinite slope
    root = torch.where(zero, 1, x)
    return torch.where(zero, 0, root.sqrt() if order == 2 else root ** (1 / order))
