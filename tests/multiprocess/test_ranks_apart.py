"""What only processes can show: ranks that do not do exactly the same outside of Shardwise must stay together in it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from bodies import R, S, assert_close, doubles, everywhere, held
from launch import run_ranks
from shardwise.comm import as_mesh
from shardwise.errors import MeshError, ShardwiseError

pytestmark = pytest.mark.multiprocess


def line(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))


def together(rank: int, world_size: int) -> None:
    results_die_with_their_last_reference(line(world_size))
    equal_meshes_are_one(world_size)
    a_mesh_without_this_rank(rank)
    fallback_warns_everywhere(line(world_size))


def results_die_with_their_last_reference(mesh: DeviceMesh) -> None:
    """A backend's thread must not keep a result alive: what is remembered by weak references would differ by rank."""
    ours = as_mesh(mesh)
    for collective in (
        lambda x: ours.port.all_reduce([x], ours, (0,), "sum"),
        lambda x: ours.port.broadcast([x], ours, (0,), 0),
        lambda x: ours.port.reduce_scatter([[x, x]], ours, (0,), "sum"),
        lambda x: ours.port.all_gather([x], ours, (0,), [[(4,), (4,)]])[0],
        lambda x: ours.port.all_to_all([[x, x]], ours, (0,), [[(4,), (4,)]])[0],
    ):
        for _ in range(100):
            result = weakref.ref(collective(torch.ones(4))[0])
            assert result() is None


def equal_meshes_are_one(world_size: int) -> None:
    assert as_mesh(line(world_size)) is as_mesh(line(world_size))
    x = sw.distribute_tensor(torch.arange(3.0), line(world_size), [S(0)])
    assert_close(x + sw.distribute_tensor(torch.ones(3), line(world_size), [R]), torch.arange(3.0) + 1)
    other_name = DeviceMesh("cpu", list(range(world_size)), mesh_dim_names=("dp",))
    assert as_mesh(other_name) is not as_mesh(line(world_size))
    with pytest.raises(MeshError, match="one call mixes tensors on"):
        x + sw.distribute_tensor(torch.ones(3), other_name, [R])


def a_mesh_without_this_rank(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if rank == 0:
        assert_close(sw.distribute_tensor(torch.arange(3.0), mesh, [S(0)]), torch.arange(3.0))
    else:
        with pytest.raises(MeshError, match="rank 1 is not part of"):
            sw.distribute_tensor(torch.ones(3), mesh, [S(0)])


def fallback_warns_everywhere(mesh: DeviceMesh) -> None:
    whole = doubles(4, 4)
    x = sw.distribute_tensor(whole, mesh, [S(0)])
    with sw.strict(), pytest.raises(ShardwiseError):
        torch.linalg.inv(x)
    with pytest.warns(sw.errors.FallbackWarning, match="inv"):
        inverse = torch.linalg.inv(x)
    assert_close(inverse, torch.linalg.inv(whole))


def test_two_ranks_together() -> None:
    run_ranks(together, 2)


def one_rank_keeps_its_loss(rank: int, world_size: int) -> None:
    """Rank 0 keeps a loss with its graph, as for a log: what was moved for it must not be reused there alone."""
    mesh, kept = line(world_size), []
    w = sw.distribute_tensor(doubles(5, 3), mesh, [sw.Partial()]).requires_grad_()
    for _ in range(2):
        # A rank that does not communicate makes up for it below, so that the difference shows as such, not as a hang.
        with sw.debug.CommDebugMode() as comm:
            loss = w.sigmoid().sum()
        if rank == 0:
            kept.append(loss)
        del loss
        if rank == 0 and not comm.comms:
            w.detach().full_tensor()
        counts: list[Any] = [None] * world_size
        dist.all_gather_object(counts, [c.kind for c in comm.comms])
        assert counts[0] == counts[1]


# src/shardwise/dispatch/plan.py, Mover: a weak reference that still lives on one rank spares only that rank the move.
@pytest.mark.xfail(strict=True, reason="what one rank keeps alive decides whether that rank communicates")
def test_one_rank_may_keep_its_loss() -> None:
    run_ranks(one_rank_keeps_its_loss, 2, timeout=15)


def ranks_with_other_seeds(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    mesh = line(world_size)
    x = sw.ones(64, device_mesh=mesh, placements=[R])
    shards = everywhere(held(F.dropout(x, 0.5)))
    assert torch.equal(shards[0,], shards[1,]), "replicas have drawn different numbers"


# src/shardwise/dispatch/randomness.py: the seed of a draw comes from each rank's own generator.
@pytest.mark.xfail(strict=True, reason="ranks that were seeded differently draw different numbers for replicas")
def test_ranks_with_other_seeds_agree_on_replicas() -> None:
    run_ranks(ranks_with_other_seeds, 2, timeout=15)


def dims_that_differ(rank: int, world_size: int) -> None:
    with pytest.raises(ShardwiseError):
        sw.DTensor.from_local(torch.ones(2, 2) if rank else torch.ones(2), line(world_size), [S(0)], run_check=True)


# src/shardwise/tensor.py, _gather_shapes: the ranks gather `dim()` numbers each, which they do not agree on.
@pytest.mark.xfail(strict=True, reason="from_local(run_check=True) with shards of differing dims aborts the process")
def test_shards_of_differing_dims_are_refused_together() -> None:
    run_ranks(dims_that_differ, 2, timeout=10)


def placement_beyond_one_rank(rank: int, world_size: int) -> None:
    with pytest.raises(ShardwiseError):
        sw.DTensor.from_local(torch.ones(2, 2) if rank else torch.ones(2), line(world_size), [S(1)], run_check=True)


# src/shardwise/tensor.py, _from_local: the placements are checked against the own shard before the shapes are known.
@pytest.mark.xfail(strict=True, reason="from_local(run_check=True) raises on one rank alone, the others hang")
def test_a_placement_that_fits_only_some_ranks_is_refused_together() -> None:
    run_ranks(placement_beyond_one_rank, 2, timeout=5)
