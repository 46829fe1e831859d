"""Ranks of the simulator run one after the other between collectives, and see nothing of each other there."""

from __future__ import annotations

from typing import Any

import torch

import shardwise as sw


def test_what_was_gathered_is_not_written_to_by_the_rank_that_brought_it() -> None:
    mesh = sw.simulate((2,), ("dp",))

    def step(x: Any) -> Any:
        whole = x.redistribute(placements=[sw.Replicate()])
        x.add_(1)
        return whole * 1

    x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
    with torch.no_grad():
        found = sw.compile(step, backend="fx")(x)
    for shard in (found.to_local(), *found.to_local()._peers):
        assert torch.equal(shard.as_subclass(torch.Tensor), torch.arange(4.0))
