"""Planning work grows with what there is to plan, and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from meshes import PAIR, data
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.models.sources import resolved

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


def test_checkpoints_of_many_tensors_are_linear(tmp_path: Path) -> None:
    def work(many: int) -> list[int]:
        net, path = nn.ParameterDict(), tmp_path / str(many)
        for i in range(many):
            net[f"p{i}"] = nn.Parameter(sw.distribute_tensor(data(2), PAIR, [S(0)]))
        keys = {f"p{i}": f"p{many - i - 1}" for i in range(many)}
        ways: list[Callable[[], object]] = [
            lambda: checkpoint.save(net, path / "one"),
            lambda: checkpoint.save(net, path / "many", max_shard_size=16 * 20),
            lambda: checkpoint.load(net, path / "one", keys=keys, verify=True),
            lambda: resolved([*keys], keys),
            lambda: checkpoint.load(net, path / "many"),
            lambda: checkpoint.save_step(path / "steps", step=1, background=False, net=net),
            lambda: checkpoint.load_latest(path / "steps", net=net),
        ]
        return [_count_calls(way) for way in ways]

    work(2)  # what is done once
    for few, many in zip(work(40), work(400), strict=True):
        assert many < 15 * few


def _count_calls(run: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
