"""The oracle: the truth by recombining shards, and strategies that are forced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweep import normal
from torch import Tensor

from shardwise.layout import Partial
from shardwise.proof.kit.compare import near
from shardwise.proof.kit.placing import terms
from shardwise.proof.verify.calls import excluded, made_again, record
from shardwise.proof.verify.case import Case
from shardwise.proof.verify.forced import Impossible, concrete, failure, trials
from shardwise.proof.verify.oracle import pieces, recombined, truths
from shardwise.rules import Local, Rule, Strategy, register
from shardwise.rules.kit import registry

SUM, AVG, MAX, MIN = map(Partial, ("sum", "avg", "max", "min"))


def case_of(function: Callable, *args: Any, op: str = "") -> Case:
    """The case of the one call that `function` makes, or of the call of `op` among them."""
    found = [case for case in record(function, args, {}) if op in case.op]
    assert len(found) == 1, found
    return found[0]


def table(case: Case) -> dict:
    return {truth.ins: truth.outs for truth in truths(case)}


# Taking apart and putting together


@pytest.mark.parametrize("pending", [SUM, AVG, MAX, MIN, Partial("product")])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_terms_make_the_whole(pending: Partial, num_ranks: int) -> None:
    x = normal(5, 4)
    parts = terms(x, [(pending.reduce_op, num_ranks)])
    assert parts is not None and len(parts) == num_ranks
    assert all(not near(part, x) for part in parts)
    if pending.reduce_op == "product":
        assert near(torch.stack(parts).prod(0), x)
    else:
        assert near(recombined(parts, pending), x)
        assert any((part < 0).any() for part in parts) and any((part > 0).any() for part in parts)


@pytest.mark.parametrize(
    ("x", "pending", "there_are"),
    [
        (torch.tensor([True, False, True]), SUM, False),
        (torch.tensor([True, False, True]), MAX, True),
        (torch.tensor([1, 2, 3]), SUM, True),
        (torch.tensor([1, 2, 3]), AVG, False),
        (torch.tensor([torch.iinfo(torch.int64).max, 0]), MIN, True),
        (torch.tensor([1 + 2j]), MAX, False),
        (torch.tensor([float("inf"), 1.0]), SUM, True),
    ],
)
def test_terms_of_other_dtypes(x: Tensor, pending: Partial, there_are: bool) -> None:
    parts = terms(x, [(pending.reduce_op, 2)])
    assert (parts is not None) == there_are
    if parts is not None:
        assert near(recombined(parts, pending), x)


def test_pieces_are_uneven() -> None:
    assert [tuple(piece.shape) for piece in pieces(normal(5, 4), 0, 3)] == [(2, 4), (2, 4), (1, 4)]


# The truth


def test_a_product() -> None:
    case = case_of(torch.mm, normal(5, 4), normal(4, 6))
    assert table(case) == {(0, None): (0,), (None, 1): (1,), (1, 0): (SUM,)}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.relu(), {(0,): (0,), (1,): (1,)}),
        (lambda x: x.sum(1), {(0,): (0,), (1,): (SUM,)}),
        (lambda x: x.mean(0), {(1,): (0,)}),  # five rows on two ranks: no average of averages
        (lambda x: x.t(), {(0,): (1,), (1,): (0,)}),
        (lambda x: x.softmax(1), {(0,): (0,)}),
        (lambda x: x.cumsum(0), {(1,): (1,)}),
        (lambda x: x.amax(0), {(1,): (0,), (0,): (MAX,)}),
        (lambda x: x.view(20), {(0,): (0,)}),
        (lambda x: x.expand(3, 5, 4), {(0,): (1,), (1,): (2,)}),
        (lambda x: x.flip(0), {(1,): (1,)}),
        (lambda x: x.add_(1.0), {(0,): (0,), (1,): (1,)}),
        (lambda x: torch.zeros_like(x), {(0,): (0,), (1,): (1,)}),
    ],
)
def test_functions_of_one_tensor(function: Callable, expected: dict) -> None:
    assert table(case_of(function, normal(5, 4))) == expected


def test_what_is_true_of_the_data_only_is_not_the_truth() -> None:
    everywhere = torch.ones(6, dtype=torch.bool)
    assert table(case_of(torch.any, everywhere)) == {(0,): (MAX,)}
    assert table(case_of(torch.all, everywhere)) == {(0,): (MIN,)}


@torch.library.custom_op("oracletest::by_size", mutates_args=())
def by_size(x: Tensor) -> Tensor:
    """The same value on shards as on the whole; a gradient that depends on the size."""
    return x * 2


by_size.register_fake(torch.empty_like)
by_size.register_autograd(
    lambda ctx, grad: grad * ctx.size, setup_context=lambda ctx, inputs, output: setattr(ctx, "size", len(inputs[0]))
)


def test_the_gradient_decides_too() -> None:
    assert table(case_of(by_size, normal(5, 4))) == {(1,): (1,)}


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (torch.rand_like, (torch.rand(4),), "draws random numbers"),
        (torch.nonzero, (torch.ones(4),), "the shape of its result depends on data"),
        (torch.empty_like, (torch.ones(4),), "its result is uninitialised memory"),
        (Tensor.squeeze_, (torch.ones(4, 1),), "changes how a tensor is viewed; dispatch does so itself"),
        (torch.equal, (torch.ones(4), torch.ones(4)), "returns a number read off the data"),
        (torch.mm, (torch.ones(4, 4), torch.ones(4, 4)), None),
    ],
)
def test_what_is_not_judged(function: Callable, args: tuple, reason: str | None) -> None:
    assert [excluded(recorded.call) for recorded in record(function, args, {})] == [reason]


def test_a_recorded_call_can_be_made_again() -> None:
    for recorded in record(F.cross_entropy, (normal(5, 4), torch.tensor([0, 1, 2, 3, 0])), {}):
        again = made_again(recorded.portable())
        assert str(again) == str(recorded)
        assert all(torch.equal(a, b) for a, b in zip(again.tensors, recorded.tensors, strict=True))


# Strategies, forced


def problems(case: Case) -> list[str]:
    found = []
    for trial in trials(case):
        with suppress(Impossible):
            found.append((trial, failure(case, trial)))
    assert found, "nothing was tried"
    return [f"{trial}: {problem}" for trial, problem in found if problem]


@pytest.mark.parametrize("function", [torch.mm, torch.add, torch.matmul, torch.maximum])
def test_right_rules_pass(function: Callable) -> None:
    case = case_of(function, normal(4, 4), normal(4, 4).flip(0), op=f"::{function.__name__}")
    assert len(concrete(case)) > 1
    assert problems(case) == []


@pytest.fixture(autouse=True)
def rules_are_forgotten() -> Iterator[None]:
    with registry.restored():
        yield


@pytest.mark.parametrize(
    ("function", "name", "way", "local", "problem"),
    [
        (torch.relu, "aten::relu", Strategy((SUM,), (SUM,)), None, "as [5,4] P(sum)@a"),
        (torch.relu, "aten::relu", Strategy((0,), (None,)), None, "do not fit [5,4] R"),
        (torch.sin, "aten::sin", Strategy((None,), (0,)), None, "do not fit [5,4] S(0)@a"),
        (torch.sin, "aten::sin", Strategy((0,), (0,)), lambda x: x.detach().sin(), "no gradient flows"),
        (torch.sin, "aten::sin", Strategy((0,), (0,)), lambda x: x.detach().sin() + x - x.detach(), "gradient of"),
        (torch.sin, "aten::sin", Strategy((0,), (0,)), lambda x: x.sin() * x.shape[0] / 5, "result 0"),
    ],
)
def test_wrong_rules_are_found_out(function: Callable, name: str, way: Strategy, local: Any, problem: str) -> None:
    case = case_of(function, normal(5, 4))
    whole = Strategy((None,), (None,))
    lowering = None if local is None else lambda call, ins, outs: Local(local, [call.inputs[0]])
    register(name, rule=Rule(lambda call: [whole, way], lowering))
    found = problems(case)
    assert any(problem in one for one in found), found


def test_a_rule_that_cannot_take_empty_shards_is_found_out() -> None:
    whole = Strategy((None,), (None,))
    register("aten::amax", rule=Rule(lambda call: [whole, Strategy((0,), (MAX,))]))
    found = problems(case_of(lambda x: x.amax(0), normal(5, 4)))
    assert found and all("empty" in one and "raises IndexError" in one for one in found), found
