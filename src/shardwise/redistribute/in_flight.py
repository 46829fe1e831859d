"""Moves that are started and finished apart: the result is there at once, its data come later.

What is left to do when they come is local: only the last collective of a path is under way, those before it are waited
for. So a rank that looks at a result, or drops it, communicates nothing by that, and ranks may do so in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.cause import is_moving, listeners, moved
from shardwise.comm.port import Handle
from shardwise.redistribute.averages import finish, prepare
from shardwise.redistribute.dim_order import in_order
from shardwise.redistribute.execute import NAMES, Moved, run_path, transition
from shardwise.redistribute.kernels import start_move
from shardwise.redistribute.transitions import Move

_disabled = torch._C.DisableTorchFunctionSubclass


def start_path(x: Tensor, moves: Sequence[Move]) -> tuple[Tensor, Handle[Tensor] | None]:
    """`run_path`, of which the last collective is only started. The result has a shape and a history, but no memory:
    that is what the handle brings. None where everything is done already."""
    last = max((i for i, move in enumerate(moves) if move.communicates), default=None)
    if last is None or not moves[0].source.layout.mesh.port.overlaps or not _can_wait(moves[last:], x):
        return run_path(x, moves), None
    if listeners and not is_moving(moves):
        return moved(moves, x, partial(start_path, x, moves))
    with _disabled():
        shards: Sequence[Tensor] = (x,)
        for move in moves[:last]:
            shards = transition(move, shards)
        dtype, shards = shards[0].dtype, prepare(moves[last], shards)
        with torch.no_grad():
            given = [shard.detach() for shard in shards]
            handle = _landing(start_move(moves[last], given), given, moves[last:], dtype)
        for move in moves[last:]:
            shards = (_placed(move, shards, dtype),)
    return shards[0], handle


def _can_wait(moves: Sequence[Move], x: Tensor) -> bool:
    """Whether the graph can be recorded before the data are there: not that of extrema, products and norms."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return True
    first, *rest = moves
    return first.wire_op == "sum" and first.pending.reduce_op != "norm" and all(move.is_linear for move in rest)


def _landing(
    handle: Handle[list[Tensor]], given: Sequence[Tensor], moves: Sequence[Move], dtype: torch.dtype
) -> Handle[Tensor]:
    def land() -> Tensor:
        with _disabled(), torch.no_grad():
            shards: Sequence[Tensor] = finish(moves[0], in_order(moves[0], given, handle.wait()), dtype)
            for move in moves[1:]:
                shards = transition(move, shards)
            return shards[0]

    return Handle(land)


def _placed(move: Move, shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The result of a move without its data, part of the graph."""
    if torch.is_grad_enabled() and shards[0].requires_grad:
        return _BEGUN[move.kind].apply(move, *shards)
    return without_memory(move.target.layout.held_shapes[0], shards[0], dtype)


def without_memory(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype or like.dtype, device=like.device)


class _Begun(Moved):
    @staticmethod
    def forward(ctx: Any, move: Move, *shards: Tensor) -> Tensor:
        ctx.move = move
        return without_memory(move.target.layout.held_shapes[0], shards[0])


_BEGUN: dict[str, Any] = {kind: type(name, (_Begun,), {}) for kind, name in NAMES.items()}
