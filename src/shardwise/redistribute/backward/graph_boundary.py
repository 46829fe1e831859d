"""Where the graph of DTensors borders on that of plain tensors, or on one in another dtype: moves of gradients only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.redistribute.execute import recorded, second_order, transition
from shardwise.redistribute.in_flight import without_memory
from shardwise.redistribute.transitions import Move


class MoveGradient(torch.autograd.Function):
    """The same shards; their gradient is moved on its way back.

    Here a backward pass that began with plain tensors enters the graph of DTensors, which must be told if the pass will
    itself be differentiated.
    """

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, moves: Sequence[Move], *shards: Tensor) -> Any:
        ctx.moves = moves
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again = torch.is_grad_enabled()
        if again:
            second_order([node for node, _ in ctx.next_functions])
        move_on = recorded if again else transition
        shards: Sequence[Tensor] = grads
        for move in ctx.moves:
            shards = move_on(move, shards)
        return None, *shards


class CastBackward(torch.autograd.Function):
    """Moves whose backward communicates in another dtype. Where they are `begun`, the result has no data yet."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, moves: Sequence[Move], dtype: torch.dtype, begun: bool, *shards: Tensor) -> Any:
        ctx.moves, ctx.dtype, ctx.original = moves, dtype, shards[0].dtype
        if begun:
            return (without_memory(moves[-1].target.layout.held_shapes[0], shards[0]),)
        for move in moves:
            shards = tuple(transition(move, shards))
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shards: Sequence[Tensor] = [grad.to(ctx.dtype) for grad in grads]
        move_on = recorded if torch.is_grad_enabled() else transition
        for move in reversed(ctx.moves):
            shards = move_on(move.dual, shards)
        return None, None, None, *(shard.to(ctx.original) for shard in shards)
