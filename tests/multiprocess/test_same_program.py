"""The same test bodies on the simulator and on real Gloo processes; on processes also with ranks in other orders.

All bodies for one number of processes run in one go, since starting processes is what costs. Each body is a test.
"""

from __future__ import annotations

import json
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import bodies_errors
import bodies_moves
import bodies_ops
import bodies_optimizers
import bodies_ragged
import bodies_rules
import bodies_second_order
import bodies_training
import shardwise as sw
from bodies import BODIES, Body
from launch import run_ranks
from shardwise.comm.functional import traceable
from shardwise.debug import CommDebugMode

# importing them fills BODIES
assert bodies_errors and bodies_moves and bodies_ops and bodies_optimizers
assert bodies_ragged and bodies_rules and bodies_second_order and bodies_training

Record = list[tuple[Any, ...]]

# How ranks may lie on a mesh of a given shape: in order, and otherwise; and with collectives that can be traced.
RANKS: dict[tuple[int, ...], dict[str, Any]] = {
    (2,): {"in_order": [0, 1], "reversed": [1, 0], "traceable": [1, 0]},
    (2, 2): {
        "in_order": [[0, 1], [2, 3]],
        "transposed": [[0, 2], [1, 3]],
        "shuffled": [[3, 1], [2, 0]],
        "traceable": [[3, 1], [2, 0]],
    },
    (2, 1, 2): {"in_order": [[[0, 1]], [[2, 3]]], "shuffled": [[[2, 0]], [[1, 3]]]},
}
# On ranks in another order only what moves data can go wrong.
REORDERED = {name for name, body in BODIES.items() if body.function.__module__ == "bodies_moves"}
REORDERED = REORDERED - {"every_transition_on_two_axes"} | {"communication_of_a_block"}
CASES = [
    (name, order)
    for name, body in BODIES.items()
    for order in RANKS[body.shape]
    if order == "in_order" or name in REORDERED
]


def world_size(body: Body) -> int:
    size = 1
    for extent in body.shape:
        size *= extent
    return size


def recorded(body: Body, mesh: Any) -> Record:
    """Run a body; what it communicated, as every rank must."""
    with CommDebugMode() as comm:
        body(mesh)
    return [
        (c.kind, c.axes, c.ranks, c.backward, c.line, c.function, c.argument, c.why, str(c.source), str(c.target))
        for c in comm.comms
    ]


def run_all(rank: int, size: int, folder: Path) -> None:
    """Every case for this many processes. What comes of each is written down, and the next one is run."""
    for name, order in CASES:
        body = BODIES[name]
        if world_size(body) != size:
            continue
        mesh = DeviceMesh("cpu", RANKS[body.shape][order], mesh_dim_names=body.axes)
        record, error = [], ""
        try:
            with traceable(mesh) if order == "traceable" else nullcontext(mesh) as used:
                record = recorded(body, used)
        except Exception:
            error = traceback.format_exc()
        # A rank that fails while others wait for it never gets past this line; the launcher then stops them all.
        outcomes: list[Any] = [None] * size
        dist.all_gather_object(outcomes, (record, error))
        if rank == 0:
            (folder / f"{name}-{order}").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, str]]:
    """Per number of processes: where the records of the bodies that ran are, and what stopped the others."""
    found = {}
    for size in sorted({world_size(body) for body in BODIES.values()}):
        folder, problem = tmp_path_factory.mktemp(f"{size}-ranks"), ""
        try:
            run_ranks(run_all, size, folder, timeout=150)
        except AssertionError as error:
            problem = str(error)
        found[size] = folder, problem
    return found


@pytest.mark.parametrize("name", BODIES)
def test_on_the_simulator(name: str) -> None:
    body = BODIES[name]
    body(sw.simulate(body.shape, body.axes))


@pytest.mark.multiprocess
@pytest.mark.timeout(300)  # the first of these runs them all
@pytest.mark.parametrize(("name", "order"), CASES)
def test_on_processes(name: str, order: str, outcomes: dict[int, tuple[Path, str]]) -> None:
    body = BODIES[name]
    folder, problem = outcomes[world_size(body)]
    outcome = folder / f"{name}-{order}"
    if not outcome.exists():
        pytest.fail(problem or "it was not run", pytrace=False)
    ranks = json.loads(outcome.read_text())
    for rank, (_, error) in enumerate(ranks):
        if error:
            pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)
    for rank, (record, _) in enumerate(ranks):
        assert record == ranks[0][0], f"ranks 0 and {rank} communicated differently"
    if body.same_record:
        simulated = recorded(body, sw.simulate(body.shape, body.axes))
        assert ranks[0][0] == json.loads(json.dumps(simulated))
