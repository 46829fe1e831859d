"""DTensors on the meta device are given memory on real ranks, each its own shard's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from launch import Case


def filled_later(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, [sw.Shard(1)]))

    with torch.device("meta"):
        net = sw.distribute_module(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), mesh, shard)
    net.to_empty(device="cpu")
    assert net[0].weight.to_local().shape == (4, 3 - rank) and net[0].weight.placements == (sw.Shard(1),)
    plain = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    net.load_state_dict(plain.state_dict())
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().full_tensor(), q.detach())


@pytest.mark.parametrize("case", [Case("filled later", 2, filled_later)], ids=str)
def test_on_ranks(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
