"""Choosing: which strategy a call takes along an axis, and what it may not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from sweep import mesh_of, normal, place
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
Outcome = tuple[dict[str, int], tuple[sw.Placement, ...]]


def comms(call: Callable[[], Tensor]) -> Outcome:
    with CommDebugMode() as comm:
        out = call()
    return dict(comm.get_comm_counts()), out.placements


def weight(x: Tensor, *placements: sw.Placement) -> nn.Parameter:
    return nn.Parameter(place(x, *placements))


# 1. Nothing moves that need not


def test_a_batch_is_not_gathered_for_a_large_weight() -> None:
    x, w = place(normal(8, 4), S(0)), weight(normal(400, 4), R)
    assert comms(lambda: F.linear(x, w)) == ({}, (S(0),))


@pytest.mark.parametrize("tokens", [2, 64, 4096])
def test_column_and_row_parallel_layers_move_nothing(tokens: int) -> None:
    """Whatever the sizes: the row-parallel result stays pending, its bias is masked, a whole bias is sliced."""
    x = place(normal(tokens, 8), R)
    up, up_bias = weight(normal(16, 8), S(0)), weight(normal(16), R)
    down, bias = weight(normal(8, 16), S(1)), weight(normal(8), R)
    assert comms(lambda: F.linear(x, up, up_bias)) == ({}, (S(1),))
    assert comms(lambda: F.linear(F.linear(x, up, up_bias), down, bias)) == ({}, (P,))


def test_linear_ops_leave_a_sum_pending_and_others_reduce_it() -> None:
    x, y, bias = place(normal(8, 4), P), place(normal(8, 4), P), place(normal(4), R)
    assert comms(lambda: x * 2 - x) == ({}, (P,))
    assert comms(lambda: x + bias) == ({}, (P,))
    assert comms(lambda: x.exp()) == ({"all_reduce": 1}, (R,))
    assert comms(lambda: F.gelu(y * 2)) == ({"all_reduce": 1}, (R,))


def test_what_is_replicated_is_sliced_to_meet_what_is_sharded() -> None:
    x, y, matrix = place(normal(8, 4), S(1)), place(normal(8, 4), R), place(normal(4, 6), R)
    assert comms(lambda: x * y) == ({}, (S(1),))
    assert comms(lambda: x @ matrix) == ({}, (P,))


# 2. No placement is invented


def test_a_pending_sum_becomes_whole_or_takes_the_placement_it_meets() -> None:
    whole, rows = place(normal(8, 4), R), place(normal(8, 4), S(0))
    for call, expected in (
        (lambda pending: pending.relu(), ({"all_reduce": 1}, (R,))),
        (lambda pending: pending + rows, ({"reduce_scatter": 1}, (S(0),))),
        (lambda pending: pending * rows, ({"reduce_scatter": 1}, (S(0),))),
        (lambda pending: whole + pending, ({"all_reduce": 1}, (R,))),
        (lambda pending: F.layer_norm(pending, (4,)), ({"all_reduce": 1}, (R,))),
    ):
        pending = place(normal(8, 4), P)
        assert comms(lambda call=call, pending=pending: call(pending)) == expected


def test_what_was_reduced_once_is_whole_from_then_on() -> None:
    """A norm written by hand reduces its input once; in graphs and without."""
    for needs in (False, True):
        x = (place(normal(8, 4), P).requires_grad_(needs)) * 1
        assert comms(lambda x=x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt()) == ({"all_reduce": 1}, (R,))
        assert x.placements == (P,)
        assert comms(lambda x=x: x.add_(1) * 1)[1] == (P,)  # another value now


def test_whole_values_are_not_split() -> None:
    x, bias, matrix = place(normal(8, 4), R), place(normal(4), R), place(normal(4, 4), R)
    assert comms(lambda: x + bias) == ({}, (R,))
    assert comms(lambda: torch.addmm(bias, x, matrix)) == ({}, (R,))


def test_what_cannot_stay_sharded_is_gathered_not_sharded_elsewhere() -> None:
    x, y = place(normal(6, 4, 4), S(1)), place(normal(8, 4), S(1))
    assert comms(lambda: torch.linalg.inv(x)) == ({"all_gather": 1}, (R,))
    assert comms(lambda: y.view(32)) == ({"all_gather": 1}, (R,))


# 3. Where operands conflict, what costs least moves


def test_the_smaller_operand_moves() -> None:
    wide, narrow = place(normal(8, 64), S(0)), place(normal(8, 2), S(1))
    assert comms(lambda: wide.T @ narrow)[1] == (P,)
    assert comms(lambda: wide + narrow[:, :1])[1] == (S(0),)


def test_a_gradient_counts_as_much_as_a_value() -> None:
    """Adding a small sharded tensor to a large whole one slices the large one: nothing moves. But where something must,
    the way back counts: a large operand that needs a gradient stays where it is."""
    rows, columns = normal(12, 8), normal(12, 8)
    for grads, expected in (((True, False), (S(0),)), ((False, True), (S(1),))):
        a, b = place(rows, S(0)).requires_grad_(grads[0]), place(columns, S(1)).requires_grad_(grads[1])
        assert comms(lambda a=a, b=b: a * 1 + b * 1)[1] == expected


def test_a_parameter_is_gathered_and_never_sharded_along_another_dim() -> None:
    """To exchange the weight's shards would send less than to gather it."""
    x, w, v = place(normal(64, 16), S(0)), weight(normal(16, 16), S(1)), weight(normal(16, 16), S(0))
    assert comms(lambda: F.linear(x, w)) == ({"all_gather": 1}, (S(0),))
    assert comms(lambda: w * v) == ({"all_gather": 2}, (R,))


def test_of_two_axes_that_shard_one_dim_the_order_is_the_larger_operands() -> None:
    """The other one is exchanged, or gathered and sliced if it is a parameter: in one key, whichever came first."""
    mesh = (2, 2)
    large, small = place(normal(64, 16), S(0), S(0), mesh=mesh), place(normal(64, 1), R, S(0), mesh=mesh)
    for operand, moved in ((small, "all_to_all"), (nn.Parameter(small), "all_gather"), (small, "all_to_all")):
        found, placements = comms(lambda operand=operand: large * operand)
        assert (found, placements) == ({moved: 1}, (S(0), S(0)))
    wide, column = nn.Parameter(place(normal(64, 16), R, S(0), mesh=mesh)), place(normal(64, 1), S(0), S(0), mesh=mesh)
    assert comms(lambda: wide * column) == ({"all_to_all": 1}, (S(0), S(0)))
    for placements in ([[S(0), S(0)], [R, S(0)]], [[R, S(0)], [S(0), S(0)]], [[S(0), R], [R, S(0)]]):
        compare(torch.mul, [normal(7, 2), normal(7, 1)], mesh_of(mesh), placements)


def test_plans_know_who_needs_a_gradient() -> None:
    """One key, two choices: the second call must not be given the first one's plan."""
    a, b = normal(12, 8), normal(12, 8)
    for needs in ((True, False), (False, True), (True, False)):
        x, y = (place(t, p).requires_grad_(n) for t, p, n in zip((a, b), (S(0), S(1)), needs, strict=True))
        assert (x + y).placements == ((S(0),) if needs[0] else (S(1),))


# 4. The same layouts at every size


@pytest.mark.parametrize("width", [8, 64, 256])
@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_a_block_has_the_same_layouts_at_every_size(tokens: int, width: int) -> None:
    x = place(normal(tokens, width), R).requires_grad_()
    up, down = weight(normal(4 * width, width), S(0)), weight(normal(width, 4 * width), S(1))
    gain = weight(torch.ones(width, dtype=torch.float64), R)
    with CommDebugMode() as comm:
        hidden = F.gelu(F.linear(F.rms_norm(x, (width,), gain), up))
        y = x + F.linear(hidden, down)
        assert (hidden.placements, y.placements) == ((S(1),), (R,))
        y.sum().backward()
    assert comm.get_comm_counts() == {"all_reduce": 2}


def test_a_sum_that_a_function_has_reduced_is_whole_for_the_rest_of_it() -> None:
    """`rms_norm` squares its input and multiplies it later: one reduction."""
    x = place(normal(8, 4), P)
    assert comms(lambda: F.rms_norm(x, (4,))) == ({"all_reduce": 1}, (R,))


def test_a_gather_that_was_asked_for_scatters_the_gradients_of_shards() -> None:
    x, w = place(normal(8, 4), S(0)).requires_grad_(), place(normal(6, 4), S(0))
    with CommDebugMode() as comm:
        whole = x.redistribute(placements=[R])
        (F.linear(whole, w).sum() + F.linear(whole, w).square().sum()).backward()
    assert comm.get_comm_counts() == {"all_gather": 1, "reduce_scatter": 1}
    full = x.detach().full_tensor().requires_grad_()
    plain = F.linear(full, w.full_tensor())
    (plain.sum() + plain.square().sum()).backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)


def test_a_gather_whose_result_stays_whole_sends_nothing_back() -> None:
    x = place(normal(8, 4), S(0)).requires_grad_()
    with CommDebugMode() as comm:
        x.redistribute(placements=[R]).square().sum().backward()
    assert comm.get_comm_counts() == {"all_gather": 1}
