"""Values that are exchanged among the same ranks at the same time: one collective takes them all, and one their
gradients. So the parts of a packed projection become heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.cause import is_moving, listeners, moved
from shardwise.comm.ranked import local_tensor, shards_of
from shardwise.redistribute.exchange import Exchange, run_exchange
from shardwise.redistribute.execute import run_path
from shardwise.redistribute.kernels import run_exchanges
from shardwise.redistribute.transitions import Move

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


def can_join(paths: Sequence[tuple[Move, ...]]) -> bool:
    """Whether several values, each along a path of its own, can travel together: all by one exchange."""
    axes = {path[0].axes if len(path) == 1 and path[0].kind == "all_to_all" else None for path in paths}
    return len(paths) > 1 and len(axes) == 1 and None not in axes


def run_together(values: Sequence[Tensor], paths: Sequence[tuple[Move, ...]]) -> list[Tensor]:
    """What `run_path` gives for each of some local values and its path, which can be joined."""
    with _disabled():
        if len({(x.dtype, x.requires_grad and _grad_enabled()) for x in values}) > 1:
            return [run_path(x, path) for x, path in zip(values, paths, strict=True)]
        if listeners and not is_moving(paths[0]):
            return moved(paths[0], values[0], partial(run_together, values, paths), *values[1:])
        held = [shards_of(x) for x in values]
        moves = [move for (move,) in paths]
        duals = [move.dual for move in moves]
        exchange = Exchange(partial(run_exchanges, moves), partial(run_exchanges, duals))
        out = run_exchange(exchange, [x for shards in held for x in shards])
        ranks = len(held[0])
        rows = [out[i : i + ranks] for i in range(0, len(out), ranks)]
        return [local_tensor(row) for row in rows]
