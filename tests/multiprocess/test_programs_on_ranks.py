"""Programs in which ranks may come to do different things, on real ranks. All of one size run in one go."""

from __future__ import annotations

import json
import math
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from bodies import AXES
from bodies_recomputation import PROGRAMS  # with those of bodies_uneven_ranks
from launch import run_ranks
from shardwise.debug import CommDebugMode

SIZES = sorted({math.prod(found.shape) for found in PROGRAMS.values()})


def run_all(rank: int, size: int, folder: Path, names: list[str]) -> None:
    for name in names:
        found = PROGRAMS[name]
        mesh = sw.init_device_mesh("cpu", found.shape, mesh_dim_names=AXES[len(found.shape)])
        error = ""
        with CommDebugMode() as comm:
            try:
                run(mesh, name)
            except Exception:
                error = traceback.format_exc()
        # A rank that fails while others wait for it never gets past this line; the launcher then stops them all.
        outcomes: list[Any] = [None] * size
        dist.all_gather_object(outcomes, ([(c.kind, c.axes, c.backward) for c in comm.comms], error))
        if rank == 0:
            (folder / name).write_text(json.dumps(outcomes))


def run(mesh: DeviceMesh, name: str) -> None:
    PROGRAMS[name](mesh)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where the records of the programs that ran are, and what stopped the others: after a stop, the rest runs anew."""
    folder, problems = tmp_path_factory.mktemp("programs"), {}
    for size in SIZES:
        names = [name for name, found in PROGRAMS.items() if math.prod(found.shape) == size]
        while names:
            try:
                run_ranks(run_all, size, folder, names, timeout=120)
            except AssertionError as error:
                stopped = [name for name in names if not (folder / name).exists()] or names[-1:]
                problems[stopped[0]] = str(error)
            names = [name for name in names if not (folder / name).exists() and name not in problems]
    return folder, problems


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_the_simulator(name: str) -> None:
    found = PROGRAMS[name]
    found(sw.simulate(found.shape, AXES[len(found.shape)]))


@pytest.mark.multiprocess
@pytest.mark.timeout(500)  # the first of these runs them all
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_processes(name: str, outcomes: tuple[Path, dict[str, str]]) -> None:
    folder, problems = outcomes
    if name in problems:
        pytest.fail(problems[name], pytrace=False)
    ranks = json.loads((folder / name).read_text())
    for rank, (record, error) in enumerate(ranks):
        if error:
            pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)
        assert record == ranks[0][0], f"ranks 0 and {rank} communicated differently"
