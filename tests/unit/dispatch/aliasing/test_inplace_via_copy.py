"""In-place calls whose target cannot stay where it is while they run: right all the same, and it lies as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check_shards
from sweep import normal, place
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.errors import FallbackWarning, StrictModeError
from shardwise.rules import Rule, Strategy, register
from shardwise.rules.kit import registry

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
PENDING = [[P()], [P("avg")], [P("max")], [P("min")]]
X = normal(6, 4)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "relu_": Tensor.relu_,
    "clamp_": lambda x: x.clamp_(max=0.2),
    "round_": Tensor.round_,
    "pow_": lambda x: x.pow_(2),
    "+= with a product": lambda x: x.addcmul_(x, x),
    "cumsum_": lambda x: x.cumsum_(0),
    "inplace=True": lambda x: F.elu(x, inplace=True),
    "of a part": lambda x: x[1:3].exp_(),
    "of one row": lambda x: x[1].exp_(),
    "foreach": lambda x: torch._foreach_abs_([x]),
    "foreach, two": lambda x: torch._foreach_mul_([x], [x.detach().clone()]),
}


@pytest.mark.parametrize("placements", [*PENDING, [P(), S(0)], [S(1), P("max")]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_pending_stays_pending(name: str, placements: list[sw.Placement]) -> None:
    plain, dist = X.clone(), place(X, *placements, mesh=(2,) * len(placements))
    alias = dist.detach()
    CALLS[name](plain)
    CALLS[name](dist)
    check_shards(dist)
    assert list(dist.placements) == placements
    torch.testing.assert_close(dist.full_tensor(), plain)
    torch.testing.assert_close(alias.full_tensor(), plain)


def test_it_returns_what_it_writes_to() -> None:
    x, y = place(X, P()), place(X, P())
    assert x.relu_() is x and F.relu(y, inplace=True) is y


def test_it_costs_one_reduction() -> None:
    x = place(X, P())
    with CommDebugMode() as comm:
        x.relu_()
    assert comm.get_comm_counts() == {"all_reduce": 1}


def test_gradients() -> None:
    """Of what was there before, and of what is written."""
    weight = normal(6, 4)
    found = []
    for to in (Tensor.clone, lambda x: place(x, P())):
        x, y = to(X).requires_grad_(), to(X.flip(0)).requires_grad_()
        z = x * 2
        z.sin_()
        z.atan2_(y)
        (z * (place(weight, S(0)) if isinstance(z, sw.DTensor) else weight)).sum().backward()
        found.append([g.full_tensor() if isinstance(g, sw.DTensor) else g for g in (x.grad, y.grad)])
    torch.testing.assert_close(found[0], found[1])


def test_leaves_are_refused_as_torch_does() -> None:
    said = []
    for x in (X.clone(), place(X, P())):
        with pytest.raises(RuntimeError) as error:
            x.requires_grad_().relu_()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_running_statistics_may_lie_anyhow() -> None:
    plain = nn.BatchNorm1d(4).double()
    plain(X)
    for where in (S(0), P(), P("max")):
        mean, var = (place(x, where) for x in (torch.zeros(4).double(), torch.ones(4).double()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            F.batch_norm(place(X, S(0)), mean, var, training=True)
        assert mean.placements == var.placements == (where,)
        torch.testing.assert_close(mean.full_tensor(), plain.running_mean)
        torch.testing.assert_close(var.full_tensor(), plain.running_var)


# What cannot be done


def test_bad_arguments_are_seen_before_anything_moves() -> None:
    x = place(X, P())
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match="uniform_ expects"):
        x.uniform_(2.0, 1.0)
    assert not comm.comms


def test_what_is_gathered_for_it_is_reported() -> None:
    """An op that keeps no shards, of which nothing is pending either."""
    with registry.restored():
        register("relu", rule=Rule(lambda call: [Strategy((None,), (None,))]))
        sw.clear_cache()
        x = place(X, S(0))
        with pytest.warns(FallbackWarning, match="relu_"):
            x.relu_()
        assert x.placements == (S(0),) and torch.equal(x.full_tensor(), X.relu())
        with sw.strict(), pytest.raises(StrictModeError):
            x.relu_()
    sw.clear_cache()
