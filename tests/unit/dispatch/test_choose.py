"""Choosing: what is preferred along an axis, and that looking for it stays within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch import choose, lower
from shardwise.dispatch.choose import BEAM, IMPOSSIBLE, LONG, kind_between, move_cost
from shardwise.dispatch.trace import Trace
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


def test_what_is_whole_everywhere_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x = place(normal(5, 4), R)
    assert evaluations(lambda: torch.gradient(x, spacing=2.0), monkeypatch)[0] == 0


# Bounds


def evaluations(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many strategies were priced to plan a call, and how many ops it has."""
    counts, ops, price, along = [], [], choose.step_cost, choose.choose_axis

    def counted(*args: object) -> float:
        counts.append(1)
        return price(*args)  # type: ignore[arg-type]

    def seen(trace: Trace, *args: object) -> list:
        ops.append(len(trace.calls))
        return along(trace, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(choose, "step_cost", counted)
        patch.setattr(lower, "choose_axis", seen)
        sw.clear_cache()
        call()
    return len(counts), sum(ops)


@pytest.mark.parametrize("num_dims", [1, 2, 3, 4])
def test_functions_that_loop_over_numbers_are_planned_quickly(num_dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.gradient` makes dozens of ops per dim. A longer trace is searched less widely."""
    x = place(normal(*(4,) * num_dims), S(0))
    spacing = [place(torch.arange(4.0, dtype=torch.float64), R) for _ in range(num_dims)]
    found, ops = evaluations(lambda: torch.gradient(x, spacing=spacing), monkeypatch)
    assert ops == 37 * num_dims
    assert found <= ops * (BEAM if ops > LONG else 8 * BEAM)


def test_work_grows_with_the_length_of_a_trace_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(many: int) -> tuple[int, int]:
        matrices = [place(normal(4, 4), S(i % 2), mesh=(2,)) for i in range(many)]
        return evaluations(lambda: torch.linalg.multi_dot(matrices), monkeypatch)

    (few, _), (many, _) = chain(6), chain(24)
    assert many < 6 * few


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_narrow_search_is_still_right() -> None:
    x = normal(4, 4, 4)
    spacing = [torch.arange(4.0, dtype=torch.float64) * (i + 1) for i in range(3)]
    expected = torch.gradient(x, spacing=spacing)
    for where in ([S(0), S(1)], [S(2), S(2)], [P, S(1)]):
        d = sw.distribute_tensor(x, mesh_of((2, 2)), where)
        found = torch.gradient(d, spacing=[sw.distribute_tensor(s, mesh_of((2, 2))) for s in spacing])
        torch.testing.assert_close([t.full_tensor() for t in found], list(expected))
