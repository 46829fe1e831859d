"""Planning work grows with what there is to plan, and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from meshes import PAIR, data

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def test_stacking_many_is_linear() -> None:
    """Planning work is counted in calls, not in time: ten times the tensors, at most about ten times the work."""
    rows = [sw.distribute_tensor(data(4), PAIR, [S(0)]) for _ in range(1000)]
    assert torch.equal(torch.stack(rows).full_tensor(), torch.stack([row.full_tensor() for row in rows]))
    for join in (torch.stack, lambda x: torch.stack(x, 1), lambda x: torch.stack(x).sum(0)):
        work = []
        for many in (100, 1000):
            sw.clear_cache()
            work.append(_count_calls(lambda join=join, many=many: join(rows[:many])))
        assert work[1] < 15 * work[0]


def _count_calls(run: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
