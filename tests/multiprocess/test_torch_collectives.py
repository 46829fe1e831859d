"""torch.distributed's functions refuse a DTensor wherever it stands among their arguments, but for two places."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from launch import Case
from shardwise.errors import MixedTensorError

REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "all_reduce": lambda d, x: dist.all_reduce(d),
    "broadcast": lambda d, x: dist.broadcast(d, 0),
    "reduce": lambda d, x: dist.reduce(d, 0),
    "send": lambda d, x: dist.send(d, 1 - dist.get_rank()),
    "recv": lambda d, x: dist.recv(d, 1 - dist.get_rank()),
    "isend": lambda d, x: dist.batch_isend_irecv([dist.P2POp(dist.isend, d, 1 - dist.get_rank())]),
    "all_gather": lambda d, x: dist.all_gather([x, x], d),
    "all_gather into": lambda d, x: dist.all_gather([x, d], x),
    "all_gather_into_tensor": lambda d, x: dist.all_gather_into_tensor(x, d),
    "gather": lambda d, x: dist.gather(d, [x, x] if dist.get_rank() == 0 else None, 0),
    "gather into": lambda d, x: dist.gather(x, [x, d], 0),
    "scatter": lambda d, x: dist.scatter(d, [x, x] if dist.get_rank() == 0 else None, 0),
    "scatter from": lambda d, x: dist.scatter(x, [x, d], 0),
    "reduce_scatter": lambda d, x: dist.reduce_scatter(d, [x, x]),
    "reduce_scatter from": lambda d, x: dist.reduce_scatter(x, [x, d]),
    "reduce_scatter_tensor": lambda d, x: dist.reduce_scatter_tensor(x, d),
    "all_to_all_single": lambda d, x: dist.all_to_all_single(x, d),
    "all_to_all_single into": lambda d, x: dist.all_to_all_single(d, x),
    "all_to_all": lambda d, x: dist.all_to_all([x, x], [x, d]),
    "all_to_all into": lambda d, x: dist.all_to_all([x, d], [x, x]),
    "all_reduce_coalesced": lambda d, x: dist.all_reduce_coalesced([x, d]),
}

WRITES_TO_THE_SHARD: dict[str, Callable[[Any], Any]] = {
    "all_gather_into_tensor": lambda d: dist.all_gather_into_tensor(d, torch.zeros(2)),
    "reduce_scatter_tensor": lambda d: dist.reduce_scatter_tensor(d, torch.zeros(8)),
}


def collectives(rank: int, size: int) -> None:
    mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))
    d = sw.distribute_tensor(torch.ones(8), mesh, [sw.Shard(0)])
    for name, call in REFUSED.items():
        plain = torch.zeros(4)
        with pytest.raises(MixedTensorError):
            call(d, plain)
        assert not plain.any(), name
    assert torch.equal(d.to_local(), torch.ones(4))
    for name, write in WRITES_TO_THE_SHARD.items():  # should this fail, torch asks, and README's limit is gone
        written = d.clone()
        with pytest.raises(MixedTensorError), sw.debug.watch_reads():
            write(written)
        assert written.to_local().all(), name
        write(written)
        assert not written.to_local().any(), name


def without_deprecations(rank: int, size: int) -> None:
    with warnings.catch_warnings(action="ignore"):
        collectives(rank, size)


@pytest.mark.parametrize("case", [Case("torch's collectives", 2, without_deprecations)], ids=str)
def test_on_ranks(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
