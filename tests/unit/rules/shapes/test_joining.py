"""Joining tensors: along a dim, along a new one, or as blocks of a matrix."""

import pytest
import torch
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

JOINS = {
    "cat": (lambda a, b: torch.cat([a, b]), (5, 3), (5, 3)),
    "cat shorter": (lambda a, b: torch.cat([a, b]), (5, 3), (1, 3)),
    "cat shorter first": (lambda a, b: torch.cat([b, a]), (5, 3), (2, 3)),
    "cat between": (lambda a, b: torch.cat([b, a, b]), (5, 3), (2, 3)),
    "cat inner": (lambda a, b: torch.cat([a, b], -1), (5, 3), (5, 2)),
    "cat one": (lambda a, b: torch.cat([a]) + b, (5, 3), (3,)),
    "cat of the old kind of nothing": (lambda a, b: torch.cat([a, b, b]), (0,), (5, 2)),
    "cat nothing": (lambda a, b: torch.cat([a, b]), (0, 2), (5, 2)),
    "cat itself": (lambda a, b: torch.cat([a, b, a], 1), (5, 3), (5, 2)),
    "cat of parts": (lambda a, b: torch.cat([a[1:3], b[2:]]), (5, 3), (5, 3)),
    "cat of equal parts": (lambda a, b: torch.cat([a[1:3], b[3:]]), (5, 3), (5, 3)),
    "stack": (lambda a, b: torch.stack([a, b], 1), (5, 3), (5, 3)),
    "hstack": (lambda a, b: torch.hstack([a, b]), (5, 3), (5, 2)),
    "vstack": (lambda a, b: torch.vstack([a, b]), (5, 3), (3,)),
    "dstack": (lambda a, b: torch.dstack([a, b]), (5, 3), (5, 3)),
    "column_stack": (lambda a, b: torch.column_stack([a, b]), (5,), (5, 2)),
    "block_diag": (lambda a, b: torch.block_diag(a, b), (5, 3), (2,)),
    "cartesian_prod": (lambda a, b: torch.cartesian_prod(a, b), (5,), (3,)),
    "kron": (torch.kron, (2, 3), (3, 2)),
}


@pytest.mark.parametrize(("op", "left", "right"), JOINS.values(), ids=JOINS)
def test_join(op, left, right):
    sweep(op, normal(*left), normal(*right))


def test_second_derivative_of_cat():
    def gradient(a):
        return torch.autograd.grad((torch.cat([a, 2 * a]) ** 3).sum(), a, create_graph=True)[0]

    sweep(gradient, normal(5, 3))


def test_dtypes_are_promoted_on_every_rank():
    x, y = normal(5, 3), torch.arange(6, dtype=torch.int32).view(2, 3)
    result = torch.cat([place(y, R, mesh=(4,)), place(x, S(0), mesh=(4,))])
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.full_tensor(), torch.cat([y, x]))


WAYS = {
    "other dim": (lambda a, b: torch.cat([a, a], 1), {}, "[8,12] S(0)@a"),
    "stack": (lambda a, b: torch.stack([a, a]), {}, "[2,8,6] S(1)@a"),
    "even": (lambda a, b: torch.cat([a, a]), {"all_to_all": 2}, "[16,6] S(0)@a"),
    "grows at the end": (lambda a, b: torch.cat([a, b]), {}, "[9,6] S(0=2+2+2+3)@a"),
    "grows at the start": (lambda a, b: torch.cat([b, b, a]), {}, "[10,6] S(0=4+2+2+2)@a"),
    "grows too much": (lambda a, b: torch.cat([a, *[b] * 8]), {"all_to_all": 1}, "[16,6] S(0)@a"),
}


@pytest.mark.parametrize(("op", "comms", "layout"), WAYS.values(), ids=WAYS)
def test_nothing_is_gathered(op, comms, layout):
    """Whole tensors are put where the sharded one begins or ends; equally long ones are exchanged to an even cut."""
    x, y = place(normal(8, 6), S(0), mesh=(4,)), place(normal(1, 6), R, mesh=(4,))
    with CommDebugMode() as comm:
        result = op(x, y)
    assert comm.get_comm_counts() == comms
    assert str(result._layout) == layout
    torch.testing.assert_close(result.full_tensor(), op(normal(8, 6), normal(1, 6)))


def test_a_sequence_that_grows_by_one_stays_balanced():
    """No rank ever holds much more than twice its share, and the cut changes only now and then."""
    rows = [normal(1, 2) + i for i in range(40)]
    x, later = place(torch.cat(rows[:4]), S(0), mesh=(4,)), [place(row, R, mesh=(4,)) for row in rows[4:]]
    with CommDebugMode() as comm:
        for row in later:
            x = torch.cat([x, row])
            assert max(x._layout.pieces(0)) <= 2 * -(-x.shape[0] // 4)
    assert set(comm.get_comm_counts()) == {"all_to_all"}
    assert comm.get_total_counts() < 10
    torch.testing.assert_close(x.full_tensor(), torch.cat(rows))


@pytest.mark.parametrize("op", [lambda a: torch.cat([a, a]), lambda a: torch.stack([a, a]), torch.block_diag])
def test_a_pending_sum_passes_through(op):
    x = place(normal(5, 3), P())
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_total_counts() == 0
    assert result.placements == (P(),)


def test_many_tensors_are_joined_in_time_proportional_to_their_number():
    xs = [place(normal(2, 3), S(1)) for _ in range(500)]
    assert torch.cat(xs).shape == (1000, 3)
    assert str(torch.stack(xs)._layout) == "[500,2,3] S(2)@a"
