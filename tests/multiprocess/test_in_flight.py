"""On real ranks: moves under way, and what is recorded, which is what the simulator and a mesh without data record."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from launch import Case

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from recorded import PROGRAMS, recorded

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
WAYS: list[Any] = [[R, R], [S(0), R], [S(1), S(0)], [S(0), S(0)], {0: ("tp", "dp")}]
AXES = ("dp", "tp")


def mesh_of(size: int) -> Any:
    return sw.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=AXES)


def moves_under_way(rank: int, size: int) -> None:
    """All moves at once; the ranks look at them in different orders, and drop some without looking."""
    mesh, whole = mesh_of(size), torch.randn(7, 5)
    laid = [sw.distribute_tensor(whole, mesh, way).requires_grad_() for way in WAYS]
    moved = [(x, x.redistribute(placements=way, async_op=True)) for x in laid for way in WAYS]
    terms = sw.DTensor.from_local(whole * (rank + 1), mesh, [P("sum"), P("sum")])
    sums = [terms.redistribute(placements=way, async_op=True) for way in WAYS]
    if rank % 2:
        del moved[3], sums[1]  # on the others they live on until the group is destroyed
        moved.reverse()
    for _, y in moved:
        y.to_local()
    del y
    for x in laid:  # gradients communicate, so these come in one order everywhere
        torch.testing.assert_close(x.detach().full_tensor(), whole)
    kept = [y for _, y in moved if y.placements == (R, R)]
    for y in kept[:: -1 if rank % 2 else 1]:
        (y * y).to_local().sum().backward()
    for x in laid:
        if x.grad is not None:
            torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
    torch.testing.assert_close(sums[0].to_local(), whole * sum(range(1, size + 1)))


def records(rank: int, size: int) -> dict[str, Any]:
    mesh = mesh_of(size)
    return {name: recorded(name, mesh) for name in PROGRAMS}


@pytest.mark.parametrize("case", [Case(f"moves_under_way-{size}", size, moves_under_way) for size in (2, 4)], ids=str)
def test_moves_under_way(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)


@pytest.mark.parametrize("case", [Case(f"records-{size}", size, records) for size in (2, 4)], ids=str)
def test_every_port_records_the_same(case: Case, on_ranks: Callable[[Case], list[dict[str, Any]]]) -> None:
    found = on_ranks(case)[0]  # others send other numbers of bytes, where shards are uneven
    for name in PROGRAMS:
        for make in (sw.simulate, sw.recording):
            assert recorded(name, make((case.size // 2, 2), AXES)) == found[name], (name, make)
