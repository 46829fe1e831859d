"""Rounding is told from faults: what single precision does to a call is excused, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from sweep import normal
from torch import Tensor

import shardwise as sw
from shardwise.proof.coverage.command import Settings, measure, mesh_of, parse_assignment
from shardwise.proof.coverage.forms import Form
from shardwise.proof.coverage.judge import Verdict, judge
from shardwise.proof.coverage.plain import Case
from shardwise.proof.kit import rounding
from shardwise.proof.kit.samples import Sample
from shardwise.redistribute import Group
from shardwise.rules import Local, Rule, Strategy, register
from shardwise.rules.kit import registry


def case(function: Callable, *tensors: Tensor) -> Case:
    return Case(Form("function", function), Sample(0, tensors))


def single(*shape: int) -> Tensor:
    return normal(*shape).float().requires_grad_()


def reach(function: Callable, *tensors: Tensor) -> tuple[float, float]:
    """How far the value, and the gradient of the first input, may be off at most."""
    found = case(function, *tensors).spread
    assert found is not None
    value, gradient = found.shake[0], found.shake[1 + len(tensors)]
    return tuple(0.0 if x is None else rounding.FACTOR * float(x.max()) for x in (value, gradient))


# How far rounding goes


@pytest.mark.parametrize("function", [torch.exp, lambda x: x @ x.t(), lambda x: x.softmax(0), lambda x: x.var(1)])
def test_next_to_nothing_in_most_calls(function: Callable) -> None:
    assert 0 < max(reach(function, single(4, 3))) < 1e-4


def test_farther_where_large_numbers_cancel() -> None:
    value, gradient = reach(lambda x: (x + 1e4) - 1e4, single(4, 3))
    assert 1e-3 < value < 1e-1 and gradient < 1e-5
    assert 1e-3 < reach(lambda x: x.sum() * 1e4 - x.flip(0).sum() * 1e4, single(4, 3))[0] < 1


def test_farther_where_something_nearly_zero_is_divided_by() -> None:
    """A group of one has the variance zero: what is left of its mean is multiplied by 1/sqrt(eps)."""
    value, gradient = reach(lambda x: F.layer_norm(x, [1]), single(4, 1))
    assert 1e-5 < value < 1e-2 and 1e-5 < gradient < 1e-2


def test_kernels_of_several_steps_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing would be seen of what rounding does inside them."""
    monkeypatch.setattr(rounding, "_decompositions", dict)
    assert reach(lambda x: F.layer_norm(x, [1]), single(4, 1))[0] < 1e-10


def test_a_jump_is_no_rounding() -> None:
    whole = torch.tensor([2.0, 3.5])
    assert reach(torch.floor, whole)[0] < 1e-5
    assert reach(lambda x: (x > 2).float(), whole)[0] == 0
    tied = torch.tensor([1.0, 5, 5]).requires_grad_()
    assert reach(lambda x: x.amax(), tied)[1] == 0


# What is excused


def verdict(function: Callable, otherwise: Callable, x: Tensor, placements: str = "S0") -> Verdict:
    """Of a function that does something else with DTensors."""
    cheat = lambda x: (otherwise if isinstance(x, sw.DTensor) else function)(x)  # noqa: E731
    return judge(case(cheat, x), mesh_of((2,)), parse_assignment(placements))


def test_as_far_as_rounding_goes_and_no_farther() -> None:
    call = lambda x: (x + 1e4) - 1e4  # noqa: E731
    assert verdict(call, lambda x: call(x) + 1e-3, single(4, 3)).kind == "right"
    assert verdict(call, lambda x: call(x) + 0.1, single(4, 3)).kind == "wrong"
    assert verdict(torch.exp, lambda x: torch.exp(x) * (1 + 1e-3), single(4, 3)).kind == "wrong"


def test_what_is_excused_is_told() -> None:
    call = lambda x: (x + 1e4) - 1e4  # noqa: E731
    assert verdict(torch.exp, torch.exp, single(4, 3)).detail == ""
    assert verdict(call, lambda x: call(x) + 1e-3, single(4, 3)).detail == rounding.EXCUSED


def test_where_rounding_may_be_all_of_the_result_nothing_is_told() -> None:
    """The true value is zero: a wrong one cannot be told from rounding, and does not count as compared."""
    call = lambda x: (x + 1e4).sum(0) - x.sum(0) - 4e4  # noqa: E731
    assert verdict(call, lambda x: call(x) + 1e-3, single(4, 3)).detail == rounding.DROWNED


def test_double_precision_has_no_excuse() -> None:
    call = lambda x: (x + 1e4) - 1e4  # noqa: E731
    assert verdict(call, lambda x: call(x) + 1e-3, normal(4, 3)).kind == "wrong"


def test_what_depends_on_the_dtype_has_no_excuse() -> None:
    """In double precision it is another function: what rounding does to that one says nothing."""
    call = lambda x: x * 1e4 - x.detach() * 1e4 * (1 - torch.finfo(x.dtype).eps)  # noqa: E731
    assert verdict(call, lambda x: call(x) * 1.5, single(4, 3)).kind == "wrong"


# Faults that are still found in single precision

FEW = Settings(samples=4, assignments=12, spread=2, dtype="float32")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    sw.clear_cache()
    with registry.restored():
        yield
    sw.clear_cache()


def wrong(name: str) -> int:
    (result,) = measure([name], FEW)
    return result.counts.get("wrong", 0)


@pytest.mark.parametrize("name", ["nn.functional.layer_norm", "softmax", "var"])
def test_a_missing_all_reduce(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(name) == 0
    sw.clear_cache()
    monkeypatch.setattr(Group, "psum", lambda self, x: x)
    if name == "softmax":  # its sum has no gradient of its own
        monkeypatch.setattr(Group, "reduce", lambda self, x, op: x)
    assert wrong(name) > 0


@pytest.mark.parametrize("name", ["nn.functional.layer_norm", "nn.functional.group_norm"])
def test_a_missing_all_reduce_of_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "vary", lambda self, x: x)
    assert wrong(name) > 0


@pytest.mark.parametrize("name", ["nn.functional.conv1d", "nn.functional.avg_pool1d", "flip"])
def test_a_window_that_is_off_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = Group.window

    def shifted(self: Group, x: Tensor, dim: int, have: list, want: list) -> Tensor:
        last = max(stop for _, stop in have)
        moved = [(a + 1, b + 1) if b < last else (a - 1, b - 1) if a else (a, b) for a, b in want]
        return window(self, x, dim, have, moved)

    monkeypatch.setattr(Group, "window", shifted)
    assert wrong(name) > 0


def test_a_wrong_divisor() -> None:
    """The average of the shards' averages, which is another where they are uneven."""
    strategies = [Strategy((None,), (None,)), Strategy((0,), (sw.Partial("avg"),))]
    rule = Rule(lambda call: strategies, lambda call, ins, outs: Local(lambda x: x.mean(), [call.inputs[0]]))
    register("mean", rule=rule)
    found = judge(case(torch.mean, single(5, 3)), mesh_of((2,)), parse_assignment("S0"))
    assert found.kind == "wrong"
