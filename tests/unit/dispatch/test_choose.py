"""Choosing: what is preferred along an axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.prices import IMPOSSIBLE, kind_between, move_cost
from shardwise.layout import Partial
from shardwise.rules import Value

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()


# Prices


def value(*shape: int, dtype: torch.dtype = torch.float64) -> Value:
    return Value(0, shape, dtype)


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (None, None, "nothing"),
        (0, 0, "nothing"),
        (None, 1, "slice"),
        (None, Partial("sum"), "mask"),
        (1, None, "all_gather"),
        (1, 0, "all_to_all"),
        (1, Partial("sum"), "pad"),
        (Partial("sum"), None, "all_reduce"),
        (Partial("sum"), 0, "reduce_scatter"),
        (Partial("sum"), Partial("max"), "impossible"),
    ],
)
def test_the_kind_of_a_move(source: object, target: object, kind: str) -> None:
    assert kind_between(source, target) == kind


def test_what_nothing_can_become() -> None:
    """A sum of anything, an average or an extremum of equal terms; no product, and a norm has no sign."""
    x = value(8, 4)
    for start in (None, 0):
        assert move_cost(x, start, Partial("sum"), 4) < IMPOSSIBLE
        assert (move_cost(x, start, Partial("avg"), 4) < IMPOSSIBLE) is (start is None)
        assert (move_cost(x, start, Partial("max"), 4) < IMPOSSIBLE) is (start is None)
        assert move_cost(x, start, Partial("norm", 2), 4) == IMPOSSIBLE
        assert move_cost(x, start, Partial("product"), 4) == IMPOSSIBLE


def test_between_two_reductions_a_value_is_whole() -> None:
    x = value(8, 4)
    there = move_cost(x, Partial("max"), Partial("sum"), 4)
    assert there == move_cost(x, Partial("max"), None, 4) + move_cost(x, None, Partial("sum"), 4)


def test_gradients_decide_only_between_equals() -> None:
    floats, ints = value(8, 4), value(8, 4, dtype=torch.int64)
    for source, target in ((0, None), (0, 1), (Partial("sum"), None), (None, 0)):
        with_gradient, without = move_cost(floats, source, target, 4), move_cost(ints, source, target, 4)
        assert without <= with_gradient < without * 1.001


# Preferences


def comms(call: Callable[[], Tensor]) -> tuple[dict[str, int], tuple[sw.Placement, ...]]:
    with CommDebugMode() as comm:
        out = call()
    return comm.get_comm_counts(), out.placements


def test_a_batch_is_not_gathered_for_a_large_weight() -> None:
    x, weight = place(normal(8, 4), S(0)), place(normal(400, 4), R).requires_grad_()
    assert comms(lambda: F.linear(x, weight)) == ({}, (S(0),))


def test_linear_ops_leave_a_sum_pending_and_others_reduce_it() -> None:
    x = place(normal(8, 4), P)
    assert comms(lambda: x * 2 - x) == ({}, (P,))
    assert comms(lambda: x.exp()) == ({"all_reduce": 1}, (R,))
    assert comms(lambda: F.gelu(x * 2)) == ({"all_reduce": 1}, (R,))


def test_whole_values_are_not_split_to_put_a_reduction_off() -> None:
    x, bias, weight = place(normal(8, 4), R), place(normal(4), R), place(normal(4, 4), R)
    assert comms(lambda: x + bias) == ({}, (R,))
    assert comms(lambda: torch.addmm(bias, x, weight)) == ({}, (R,))
