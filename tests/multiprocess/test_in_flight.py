"""On real ranks: moves under way, and what is recorded, which is what the simulator and a mesh without data record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from launch import run_ranks

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


def run(rank: int, size: int, folder: Path) -> None:
    moves_under_way(rank, size)
    mesh = mesh_of(size)
    found = {name: recorded(name, mesh) for name in PROGRAMS}
    if rank == 0:
        (folder / "records").write_text(json.dumps(found))


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 4])
def test_moves_under_way_and_records(size: int, tmp_path: Path) -> None:
    """One launch for both: starting processes is what costs."""
    run_ranks(run, size, tmp_path, timeout=120)
    found = json.loads((tmp_path / "records").read_text())
    for name in PROGRAMS:
        for make in (sw.simulate, sw.recording):
            assert json.loads(json.dumps(recorded(name, make((size // 2, 2), AXES)))) == found[name], (name, make)
