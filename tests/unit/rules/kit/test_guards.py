"""Arguments that are looked at before random numbers are drawn, and those that need not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sweep import normal, place
from torch import Tensor

import shardwise as sw

S0 = sw.Shard(0)


@pytest.mark.parametrize(
    "draw",
    [lambda x: x.bernoulli(0.5), lambda x: x.bernoulli(p=0.5), lambda x: torch.bernoulli(x, 0.5)],
    ids=["method", "keyword", "function"],
)
def test_a_chance_given_as_a_number_is_one_for_all_elements(draw: Callable[[Tensor], Tensor]) -> None:
    x = normal(64) * 3
    drawn = draw(place(x, S0)).full_tensor()
    assert set(drawn.tolist()) == {0.0, 1.0} and drawn.shape == draw(x).shape


@pytest.mark.parametrize(
    "call", [torch.bernoulli, Tensor.bernoulli, torch.poisson], ids=["function", "method", "poisson"]
)
def test_elements_that_are_no_chances_are_refused(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([0.5, 0.5, 0.5, -2.0])
    with pytest.raises(RuntimeError):
        call(x)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"expects (chances|rates)"):
        call(place(x, S0))
    assert torch.equal(before, torch.get_rng_state()), "numbers were drawn before it was refused"


@pytest.mark.parametrize("indices", [[], [None]], ids=["none", "only None"])
def test_writing_without_indices_is_refused_as_torch_does(indices: list) -> None:
    x, put = normal(4, 2), torch.ops.aten.index_put.default
    with pytest.raises(RuntimeError) as expected:
        put(x, indices, x)
    with pytest.raises(RuntimeError) as found:
        put(place(x, S0), indices, place(x, S0))
    assert str(found.value) == str(expected.value)
