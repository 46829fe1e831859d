"""The same test bodies on the simulator and on real Gloo processes; on processes also with ranks in other orders.

Each body is a test.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import bodies_errors
import bodies_moves
import bodies_ops
import bodies_optimizers
import bodies_ragged
import bodies_recomputation
import bodies_rules
import bodies_second_order
import bodies_styles
import bodies_training
import bodies_uneven_ranks
import shardwise as sw
from bodies import AXES, BODIES, Body
from launch import Case
from shardwise.comm.functional import traceable
from shardwise.debug import CommDebugMode

# importing them fills BODIES
assert bodies_errors and bodies_moves and bodies_ops and bodies_optimizers
assert bodies_ragged and bodies_recomputation and bodies_rules and bodies_second_order and bodies_training
assert bodies_styles and bodies_uneven_ranks

Record = list[tuple[Any, ...]]

# How ranks may lie on a mesh of a given shape: in order, and otherwise; and with collectives that can be traced.
RANKS: dict[tuple[int, ...], dict[str, Any]] = {
    (2,): {"in_order": [0, 1], "reversed": [1, 0], "traceable": [1, 0]},
    (2, 2): {
        "in_order": [[0, 1], [2, 3]],
        "shuffled": [[3, 1], [2, 0]],
        "traceable": [[3, 1], [2, 0]],
    },
    (2, 1, 2): {"in_order": [[[0, 1]], [[2, 3]]], "shuffled": [[[2, 0]], [[1, 3]]]},
}
# On ranks in another order only what moves data can go wrong.
REORDERED = {name for name, body in BODIES.items() if body.function.__module__ == "bodies_moves"}
REORDERED = REORDERED - {"every_transition_on_two_axes"} | {"communication_of_a_block"}


def orders(shape: tuple[int, ...]) -> dict[str, Any]:
    return RANKS.get(shape, {"in_order": torch.arange(math.prod(shape)).view(shape).tolist()})


def recorded(body: Body, mesh: Any) -> Record:
    """Run a body; what it communicated, as every rank must."""
    with CommDebugMode() as comm:
        body(mesh)
    return [
        (c.kind, c.axes, c.ranks, c.backward, c.line, c.function, c.argument, c.why, str(c.source), str(c.target))
        for c in comm.comms
    ]


@functools.cache
def simulated(name: str) -> Record:
    body = BODIES[name]
    return recorded(body, sw.simulate(body.shape, body.axes))


@functools.cache
def mesh_on_ranks(shape: tuple[int, ...], order: str) -> DeviceMesh:
    """One for all bodies: making groups takes longer than most of them."""
    return DeviceMesh("cpu", orders(shape)[order], mesh_dim_names=AXES[len(shape)])


def on_processes(rank: int, size: int, name: str, order: str) -> Record:
    body = BODIES[name]
    mesh = mesh_on_ranks(body.shape, order)
    with traceable(mesh) if order == "traceable" else nullcontext(mesh) as used:
        return recorded(body, used)


CASES = [
    Case(f"{name}-{order}", body.num_ranks, on_processes, (name, order))
    for name, body in BODIES.items()
    for order in orders(body.shape)
    if order == "in_order" or name in REORDERED
]


@pytest.mark.parametrize("name", BODIES)
def test_on_the_simulator(name: str) -> None:
    simulated(name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], list[Record]]) -> None:
    records, (name, _) = on_ranks(case), case.arguments
    for rank, record in enumerate(records):
        assert record == records[0], f"ranks 0 and {rank} communicated differently"
    if BODIES[name].same_record:
        assert records[0] == simulated(name)
