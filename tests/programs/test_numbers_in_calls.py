"""Numbers and sizes in calls: no plan keeps what was one of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, compare, full
from meshes import PAIR, data, pending
from sweep import normal, place
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x // s,
        lambda x, s: 1 / torch.where(x > 0, x, s),
        lambda x, s: 1 / F.pad(x, (1, 1), value=s),
    ],
    ids=["floor_divide", "where", "pad"],
)
def test_zeros_have_a_sign(function: Callable[[Tensor, float], Tensor]) -> None:
    x = torch.tensor([1.0, -1.0])
    d = place(x, S(0))
    for zero in (-0.0, 0.0, -0.0):
        assert torch.equal(function(d, zero).full_tensor(), function(x, zero))


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sub": operator.sub,
    "pow": operator.pow,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
}


@pytest.mark.parametrize("ranks", [1, 2])  # on one rank plans are those of real ranks
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_on_either_side_of_an_operator_are_read_anew(name: str, ranks: int) -> None:
    function, x = OPERATORS[name], torch.tensor([1.5, 2.5, 3.5])
    for placement in (R, S(0)):
        d = place(x, placement, mesh=(ranks,))
        for number in (2.0, 0.25, 3.0, 2):
            torch.testing.assert_close(full(function(number, d)), function(number, x))
            torch.testing.assert_close(full(function(d, number)), function(x, number))
        for dtype in (torch.float64, torch.float32, torch.int64):
            found, expected = function(2, d.to(dtype)), function(2, x.to(dtype))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(full(found), expected)


PLACEMENTS = pytest.mark.parametrize("placement", [R, S(0), S(1), S(2)], ids=str)


SIZES: dict[str, Callable[[Tensor, Callable[[int], Tensor]], Tensor]] = {
    "view": lambda x, n: x.view(3, 6, n(2), 4),
    "reshape": lambda x, n: torch.reshape(x, (3, 6, n(2), n(4))),
    "expand": lambda x, n: x.unsqueeze(0).expand(n(2), 3, 6, 8),
    "pad": lambda x, n: F.pad(x, (n(1), n(2)), mode="reflect"),
    "split": lambda x, n: torch.split(x, [n(3), n(5)], 2)[1],
    "sum": lambda x, n: x.sum(n(1)),
    "permute": lambda x, n: x.permute(n(2), 0, 1),
    "one_hot": lambda x, n: F.one_hot(x.argmax(-1), n(8)),
    "conv1d": lambda x, n: F.conv1d(x, beside(x, torch.ones(6, 1, 3, dtype=torch.float64)), groups=n(6)),
}


@PLACEMENTS
@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_tensors_and_nothing_is_gathered_for_it(name: str, placement: sw.Placement) -> None:
    x, call = normal(3, 6, 8), SIZES[name]
    d = sw.distribute_tensor(x, PAIR, [placement])
    for n in (torch.tensor, lambda size: sw.distribute_tensor(torch.tensor(size), PAIR)):
        got = call(d, n)  # a fallback is a warning, and that an error
        torch.testing.assert_close(got.full_tensor(), call(x, torch.tensor))
        assert got.placements == call(d, int).placements  # type: ignore[arg-type]


def test_sizes_in_tensors_are_read_in_every_call() -> None:
    d = sw.distribute_tensor(normal(4, 12), PAIR, [S(0)])
    assert [d.view(4, torch.tensor(n), -1).shape[2] for n in (2, 3, 4)] == [6, 4, 3]


def test_bad_sizes_in_tensors_are_refused_in_torchs_words() -> None:
    d = sw.distribute_tensor(normal(4, 12), PAIR, [S(0)])
    with pytest.raises(RuntimeError, match=r"shape '\[4, 5, -1\]' is invalid for input of size 48"):
        d.view(4, torch.tensor(5), -1)
    with pytest.raises(RuntimeError, match="duplicate dims are not allowed"):
        d.permute(torch.tensor(1), 1)


def test_a_number_is_not_part_of_a_stale_plan() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0])
    for factor in (-5, 2, -5.0, 2.0, 0.5):
        assert (factor * d).tolist() == [3.0 * factor, 4.0 * factor]
        assert (d + factor).tolist() == [3.0 + factor, 4.0 + factor]
        assert d.pow(factor).tolist() == pytest.approx([3.0**factor, 4.0**factor])


STALE: list[Callable[[Tensor, float], Tensor]] = [
    lambda t, v: torch.add(t, t, alpha=v),
    lambda t, v: t.clamp(min=v),
    lambda t, v: F.softplus(t, beta=v),
    lambda t, v: F.layer_norm(t, (3,), eps=v),
    lambda t, v: t.norm(v),
    lambda t, v: torch.full_like(t, v) * t,
    lambda t, v: F.pad(t, (1, 1), value=v),
    lambda t, v: torch.quantile(t, v / 4),
    lambda t, v: torch.where(t > 0, t, v),
    lambda t, v: t.masked_fill(t > 0, v),
    lambda t, v: torch.cdist(t, t + 1, p=v),
    lambda t, v: t.renorm(2.0, 0, v),
    lambda t, v: torch.histc(t.detach(), 4, -v, v),
    lambda t, v: F.interpolate(t[None], scale_factor=v, mode="linear"),
]


@pytest.mark.parametrize("placement", [S(0), S(1), P(), R])
def test_numbers_of_functions_are_not_part_of_a_stale_plan(placement: sw.Placement) -> None:
    for function, value in itertools.product(STALE, (1.0, 2.0, 3.5)):
        compare(lambda t, f=function, v=value: f(t, v), [data(4, 3)], PAIR, [[placement]], backward=value != 1.0)


def test_types_of_numbers_are_part_of_a_plan() -> None:
    """1 == 1.0 == True, and 0.0 == -0.0."""
    d = sw.distribute_tensor(torch.arange(4), PAIR, [S(0)])
    for factor in (1, 1.0, True, 1j):
        assert (d * factor).dtype == (torch.arange(4) * factor).dtype
    for zero in (0.0, -0.0):
        assert torch.equal((1 / (d * zero)).full_tensor(), 1 / (torch.arange(4) * zero))
