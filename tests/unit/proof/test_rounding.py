"""Rounding is told from faults: what single precision does to a call is excused, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from sweep import normal
from torch import Tensor

import shardwise as sw
from shardwise.proof.coverage.command import Settings, measure, parse_assignment
from shardwise.proof.coverage.forms import Form
from shardwise.proof.coverage.judge import ROUNDED, Verdict, judge
from shardwise.proof.coverage.reference import Reference
from shardwise.proof.kit.placing import mesh_of
from shardwise.proof.kit.samples import Sample
from shardwise.redistribute import Group
from shardwise.rules import Local, Rule, Strategy, register
from shardwise.rules.kit import registry


def case(function: Callable, *tensors: Tensor) -> Reference:
    return Reference(Form("function", function), Sample(0, tensors))


def single(*shape: int) -> Tensor:
    return normal(*shape).float().requires_grad_()


def verdict(function: Callable, otherwise: Callable, x: Tensor, placements: str = "S0") -> Verdict:
    """Of a function that does something else with DTensors."""
    cheat = lambda x: (otherwise if isinstance(x, sw.DTensor) else function)(x)  # noqa: E731
    return judge(case(cheat, x), mesh_of((2,)), parse_assignment(placements))


def in_single(error: float) -> Callable[[Tensor], Tensor]:
    """Something to add, in single precision only."""
    return lambda x: x + (error if x.dtype == torch.float32 else 0)


# What is excused


@pytest.mark.parametrize(
    ("error", "kind"), [(1e-4, "right"), (1.0, "wrong"), (torch.inf, "wrong"), (torch.nan, "wrong")]
)
def test_a_little_off_in_single_precision_and_right_in_double(error: float, kind: str) -> None:
    found = verdict(lambda x: x * 2, lambda x: in_single(error)(x * 2), single(4, 3))
    assert found.kind == kind and found.detail.startswith(ROUNDED if kind == "right" else "value: off by")


def test_answers_that_are_near_need_no_excuse() -> None:
    assert verdict(torch.exp, torch.exp, single(4, 3)).detail == ""


def test_what_is_off_in_double_precision_too_is_wrong() -> None:
    assert verdict(torch.exp, lambda x: torch.exp(x) * (1 + 1e-4), single(4, 3)).kind == "wrong"


def test_double_precision_has_no_excuse() -> None:
    assert verdict(lambda x: x * 2, lambda x: x * 2 + 1e-6, normal(4, 3)).kind == "wrong"


def test_where_rounding_is_all_of_the_result_the_answer_in_double_precision_is_compared() -> None:
    """A group of one has the variance zero: what is left of its mean is multiplied by 1/sqrt(eps)."""
    layer_norm = lambda x: F.layer_norm(x, [1])  # noqa: E731
    assert verdict(layer_norm, lambda x: in_single(1e-4)(layer_norm(x)), single(4, 1)).detail == ROUNDED
    assert verdict(layer_norm, lambda x: layer_norm(x) + 1e-4, single(4, 1)).kind == "wrong"


def test_dtypes_among_the_arguments_are_doubled() -> None:
    call = Reference(Form("function", torch.sum), Sample(0, (single(4, 3),), {"dtype": torch.float32}))
    assert call.in_double is not None and call.in_double.outputs[0].dtype == torch.float64
    assert call.in_double.in_double is None


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
