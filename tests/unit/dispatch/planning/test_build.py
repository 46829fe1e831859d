"""Plans as they are built for one rank of a process group, where the simplest ones have no steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sweep import normal
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of four ranks, as rank 1. Nothing that these tests do communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, (3, 2), (2, 2), (1, 1), (1, 2)),
        lambda x: F.adaptive_max_pool2d(x, (3, 3)),
        lambda x: F.max_pool1d(x.flatten(2), 2),
        lambda x: torch.sort(x, 1)[0],
        lambda x: x.view(8, 3, 42),
    ],
    ids=("max_pool2d", "adaptive_max_pool2d", "max_pool1d", "sort", "view"),
)
def test_one_op_on_one_shard_gives_the_shard_of_the_result(function: Callable[[Tensor], Tensor], mesh: object) -> None:
    """Also where the op has several results, of which the function returns one."""
    x = normal(8, 3, 6, 7)
    found = function(sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
    torch.testing.assert_close(found.to_local(), function(x)[2:4], rtol=0, atol=0)
