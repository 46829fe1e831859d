"""The judge finds every kind of fault: faults are planted, as wrong rules and as functions that cheat on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweep import normal
from torch import Tensor

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.errors import InPlaceError
from shardwise.proof.coverage.command import ONE_AXIS, TWO_AXES, parse_assignment, replay
from shardwise.proof.coverage.forms import Form, Unusable
from shardwise.proof.coverage.judge import Verdict, judge, same_strides
from shardwise.proof.coverage.reference import Reference
from shardwise.proof.kit.placing import mesh_of, place
from shardwise.proof.kit.samples import Sample
from shardwise.rules import Local, Rule, Strategy, register
from shardwise.rules.kit import registry

Plant = Callable[..., None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Gives an op another rule for the length of a test; None: no rule."""

    def planted(name: str, rule: Rule | None) -> None:
        if rule is None:
            del registry._rules[f"aten::{name}"]
            registry._found.clear()
        else:
            register(name, rule=rule)
        sw.clear_cache()

    with registry.restored():
        yield planted
    sw.clear_cache()


def unary(*ways: tuple[Any, Any], function: Callable | None = None) -> Rule:
    """A rule of one tensor: replicated, and these ways; the shards run as `function`, if there is one."""
    strategies = [Strategy((None,), (None,)), *(Strategy((a,), (b,)) for a, b in ways)]
    local = None if function is None else (lambda call, ins, outs: Local(function, [call.inputs[0]]))
    return Rule(lambda call: strategies, local)


def verdict(function: Callable, placements: str, *args: Any, in_place: bool = False) -> Verdict:
    way = parse_assignment(placements)
    case = Reference(Form("function", function, in_place), Sample(0, args or (normal(4, 3).requires_grad_(),)))
    return judge(case, mesh_of(ONE_AXIS if len(way[0]) == 1 else TWO_AXES), way)


# Wrong rules


def test_a_right_rule_is_right(plant: Plant) -> None:
    plant("sin", unary((0, 0)))
    assert verdict(torch.sin, "S0") == Verdict("right", "sharded")


def test_a_wrong_value(plant: Plant) -> None:
    plant("flip", unary((0, 0)))
    found = verdict(lambda x: torch.flip(x, [0]), "S0")
    assert (found.kind, found.way) == ("wrong", "sharded") and found.detail.startswith("value: off by")
    assert verdict(lambda x: torch.flip(x, [1]), "S0").kind == "right"


def test_a_wrong_gradient(plant: Plant) -> None:
    plant("sin", unary((0, 0), function=lambda x: x.sin().detach() + 0 * x))
    found = verdict(torch.sin, "S0")
    assert found.kind == "wrong" and found.detail.startswith("gradient of input 0: off by")


def test_replicas_that_differ(plant: Plant) -> None:
    plant("sum", unary((0, None)))
    found = verdict(torch.sum, "S0")
    assert found.kind == "wrong" and found.detail == "value: replicas differ as [] R"


def test_shards_that_do_not_fit(plant: Plant) -> None:
    plant("sin", unary((0, None)))
    found = verdict(torch.sin, "S0")
    assert found.detail == "value: shards of shapes [(2, 3), (2, 3)] do not fit [4,3] R"


def test_a_rule_that_takes_pending_sums_it_must_not(plant: Plant) -> None:
    plant("sin", unary((sw.Partial("sum"), sw.Partial("sum"))))
    assert verdict(torch.sin, "P").kind == "wrong"
    assert verdict(torch.neg, "P").kind == "right"


def test_an_error_is_told_with_its_place(plant: Plant) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no such luck\nat all")

    plant("sin", unary((0, 0), function=fail))
    found = verdict(torch.sin, "S0")
    assert found.kind == "raised" and found.detail.startswith("ValueError: no such luck [dispatch/")


def test_gathering(plant: Plant) -> None:
    plant("flip", None)
    assert verdict(lambda x: torch.flip(x, [0]), "S0") == Verdict("right", "gathered")
    assert verdict(lambda x: torch.flip(x, [1]), "R") == Verdict("right", "whole")
    assert verdict(torch.sin, "S0,S1") == Verdict("right", "sharded")


# Functions that do something else with DTensors


def cheat(honest: Callable, otherwise: Callable) -> Callable:
    return lambda x, *rest: (otherwise if isinstance(x, sw.DTensor) else honest)(x, *rest)


@pytest.mark.parametrize(
    ("otherwise", "detail"),
    [
        (lambda x: x[:2] * 2, "value: shape [2, 3], not [4, 3]"),
        (lambda x: x.float() * 2, "value: dtype torch.float32, not torch.float64"),
        (lambda x: x.detach() * 2, "requires_grad of output 0 is False"),
        (lambda x: x.full_tensor() * 2, "value: a Tensor, not a DTensor"),
        (lambda x: (x * 2, x), "returns tuple[_, _], not _"),
    ],
)
def test_results_of_another_kind(otherwise: Callable, detail: str) -> None:
    found = verdict(cheat(lambda x: x * 2, otherwise), "S0")
    assert (found.kind, found.detail) == ("wrong", detail)


def test_values_that_are_no_tensors() -> None:
    assert verdict(lambda x: x.dim(), "S0").kind == "right"
    assert verdict(lambda x: float("nan"), "S0").kind == "right"
    assert verdict(cheat(lambda x: 1, lambda x: 2), "S0").detail == "value: 2, not 1"
    assert verdict(cheat(lambda x: 1, lambda x: True), "S0").detail == "value: True, not 1"


def test_arguments_that_are_written_to_count() -> None:
    def add_one(x: Tensor) -> None:
        x.add_(1)

    plain = normal(4, 3)
    assert verdict(add_one, "S0", plain).kind == "right"
    assert verdict(cheat(add_one, lambda x: None), "S0", plain).detail.startswith("argument 0, which it writes to: off")


@pytest.mark.parametrize("placements", ["S0", "R", "P", "S1,S0"])
def test_other_arguments_must_stay_as_they_are(placements: str) -> None:
    """Though the value is right, and the gradient."""

    def double_and_write(x: Tensor) -> Tensor:
        result = x * 2
        x.detach().add_(x.detach())
        return result

    found = verdict(cheat(lambda x: x * 2, double_and_write), placements)
    assert (found.kind, found.detail) == ("wrong", "argument 0: was written to, which torch does not do")


def test_in_place_returns_what_it_writes_to() -> None:
    found = verdict(cheat(Tensor.exp_, lambda x: x.exp_().clone()), "S0", in_place=True)
    assert (found.kind, found.detail) == ("wrong", "value of output 1: 'none of its targets', not 0")


def test_a_change_of_shape_may_be_refused() -> None:
    assert verdict(Tensor.exp_, "P", in_place=True).kind == "right"
    assert verdict(Tensor.squeeze_, "S0", normal(1, 3), in_place=True).kind == "refused"


@pytest.mark.parametrize("placements", ["R", "S0", "S1,R", "P"])
def test_a_write_must_not_be_refused_wherever_its_target_lies(placements: str) -> None:
    def refuse(x: Tensor) -> None:
        raise InPlaceError("no")

    found = verdict(cheat(Tensor.exp_, refuse), placements, in_place=True)
    assert (found.kind, found.detail) == ("raised", "InPlaceError: no")


def test_a_write_must_not_be_refused_half_way() -> None:
    def write_and_refuse(x: Tensor) -> None:
        x.add_(1)
        raise InPlaceError("no")

    found = verdict(cheat(Tensor.exp_, write_and_refuse), "S0", in_place=True)
    assert (found.kind, found.detail) == ("wrong", "refused after having written")


def test_only_writes_may_be_refused() -> None:
    def refuse(x: Tensor) -> None:
        raise InPlaceError("no")

    assert verdict(cheat(torch.exp, refuse), "S0").kind == "raised"


def exp_into(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.exp(x, out=out)


def refuse_into(x: Tensor, out: Tensor | None = None) -> Tensor:
    if isinstance(out, sw.DTensor):
        raise InPlaceError("no")
    return torch.exp(x, out=out)


@pytest.mark.parametrize("placements", ["S0 S1", "S0 P", "P R"])
def test_out_must_not_be_refused_wherever_it_lies(placements: str) -> None:
    case = Reference(Form("out=", exp_into), Sample(0, (normal(4, 3),)))
    assert judge(case, mesh_of(ONE_AXIS), parse_assignment(placements)).kind == "right"
    case = Reference(Form("out=", refuse_into), Sample(0, (normal(4, 3),)))
    assert judge(case, mesh_of(ONE_AXIS), parse_assignment(placements)).kind == "raised"


def test_strides_are_compared_but_do_not_make_an_answer_wrong() -> None:
    turned = cheat(lambda x: x * 2, lambda x: (x.t() * 2).contiguous().t())
    found = verdict(turned, "S0")
    assert (found.kind, found.strides) == ("right", "[1, 4], not [3, 1], as [4,3] S(0)@a")
    assert verdict(turned, "S0", normal(4, 1)).strides == verdict(turned, "S0", normal(0, 3)).strides == ""
    assert verdict(lambda x: x.t(), "S0").strides == verdict(lambda x: x.t() * 2, "S1").strides == ""


@pytest.mark.parametrize("placements", ["R", "S0", "S1", "P"])
def test_inputs_lie_in_memory_as_they_do_for_torch(placements: str) -> None:
    (where,) = parse_assignment(placements)
    image = normal(2, 2, 3, 6).to(memory_format=torch.channels_last)
    for x in (normal(3, 4).t(), image, image[:1], normal(6, 4)[:, ::2], normal(1, 4).expand(3, 4)):
        made = place(x, mesh_of(ONE_AXIS), where)
        assert torch.equal(made.full_tensor(), x) and not made._is_view()
        assert made.is_contiguous(memory_format=torch.contiguous_format) == x.clone().is_contiguous()
        assert same_strides(x.shape, made.stride(), x.clone().stride())


def test_random_values_are_not_compared_but_replicas_are() -> None:
    assert verdict(lambda x: torch.nn.functional.dropout(x, 0.5), "S0").kind == "right"
    ranked = cheat(torch.rand_like, lambda x: sw.DTensor.from_local(torch.rand_like(x.to_local()), x.device_mesh))
    assert verdict(ranked, "R").detail == "value: replicas differ as [4,3] R"


def test_what_torch_refuses_is_no_case() -> None:
    with pytest.raises(Unusable, match="torch refuses it"):
        verdict(lambda x: x @ x, "S0")


def test_sparse_results_are_no_case() -> None:
    with pytest.raises(Unusable, match="sparse"):
        verdict(lambda x: x.to_sparse(), "S0")


@pytest.mark.parametrize("placements", ["P", "P,P", "S0,P", "P,S1", "S1,S0"])
def test_tensors_are_placed_exactly(placements: str) -> None:
    (way,) = parse_assignment(placements)
    x = torch.cat([normal(4, 3), torch.tensor([[torch.inf, torch.nan, 0.0]], dtype=torch.float64)])
    made = place(x, mesh_of(ONE_AXIS if len(way) == 1 else TWO_AXES), way)
    assert made.placements == way and torch.equal(made.full_tensor().nan_to_num(7.0), x.nan_to_num(7.0))
    if sw.Partial() in way:  # no term is the whole
        shards = [shard.as_subclass(Tensor) for shard in shards_of(made.to_local())]
        assert all(bool(shard.any()) for shard in shards)


def test_a_call_can_be_replayed() -> None:
    assert replay("mm", 0, "S0 R").kind == "right"
