"""Axes of one rank: nothing is communicated along them or counted, and copies stay copies."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.layout import Layout
from shardwise.redistribute import plan_moves

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
WAYS = [R, S(0), S(1), P("sum"), P("avg"), P("max")]


@pytest.mark.parametrize("before", WAYS, ids=str)
def test_no_move_along_them_communicates(before: sw.Placement) -> None:
    for make, after in product((sw.simulate, sw.recording), WAYS):
        mesh = make((1, 2), ("one", "two"))
        local = torch.randn(4, 3, device=mesh.device_type)
        x = sw.DTensor.from_local(local, mesh, [before, S(0)]).requires_grad_()
        with CommDebugMode() as comm:
            moved = x.redistribute(placements=[after, S(0)])
            moved.sum().redistribute(placements=[R, P("sum")]).backward(sw.ones((), device_mesh=mesh))
        assert comm.comms == [], (before, after)
        if make is sw.simulate:
            assert torch.equal(moved.detach().full_tensor(), x.detach().full_tensor())
            assert torch.equal(x.grad.full_tensor(), torch.ones(8, 3))
            assert moved.placements == x.placements or moved.to_local().data_ptr() != x.to_local().data_ptr()


def test_they_are_left_out_of_groups() -> None:
    mesh = sw.simulate((2, 1, 2), ("a", "b", "c"))
    x = sw.distribute_tensor(torch.randn(8, 3), mesh, [S(0), S(0), S(0)]).requires_grad_()
    weight = sw.distribute_tensor(torch.randn(3, 3), mesh).requires_grad_()
    with CommDebugMode() as comm:
        (x @ weight).sum().backward()
        x.redistribute(placements=[R, R, R])
        x.redistribute(placements={0: ("a", "c"), 1: ("b",)})
        x.redistribute(placements={0: ("b", "a", "c")})
    assert [(c.kind, c.axes) for c in comm.comms] == [("all_reduce", ("a", "c")), ("all_gather", ("a", "c"))]


def test_paths_along_them_cost_next_to_nothing() -> None:
    """Of two ways to cut a tensor the one that leaves several ranks alone is taken."""
    mesh, chance = sw.simulate((1, 3, 1), ("a", "b", "c")), random.Random(0)
    for _ in range(50):
        b = chance.choice([R, S(0), S(1)])
        source, target = (
            Layout.of(mesh, (6, 4), [chance.choice(WAYS[:4]), b, chance.choice(WAYS[:4])]) for _ in range(2)
        )
        assert not any(move.communicates for move in plan_moves(source, target)), (source, target)


@pytest.mark.parametrize("where", [S(0), R, P("sum")], ids=str)
def test_what_is_laid_out_is_a_copy(where: sw.Placement) -> None:
    plain = torch.ones(4)
    laid = sw.distribute_tensor(plain, sw.simulate((1,), ("one",)), [where])
    laid.redistribute(placements=[R]).add_(1) if where != R else laid.clone().add_(1)
    laid.add_(1)
    assert torch.equal(plain, torch.ones(4)) and torch.equal(laid.full_tensor(), torch.full((4,), 2.0))


def test_a_view_of_a_tensor_that_is_whole_on_one_rank_is_a_view() -> None:
    x = sw.distribute_tensor(torch.zeros(4, 6), sw.simulate((1,), ("one",)), [S(1)])
    view = x.view(24)
    view.add_(1)
    x.mul_(2)
    assert torch.equal(view.full_tensor(), torch.full((24,), 2.0)) and torch.equal(
        x.full_tensor(), torch.full((4, 6), 2.0)
    )
