"""Strict mode, the warning of a fallback, implicit replication, and the plan cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.dispatch import call as dispatch_call
from shardwise.dispatch.planning import fallback
from shardwise.experimental import implicit_replication

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def sharded(*shape: int) -> sw.DTensor:
    return sw.distribute_tensor(torch.rand(*shape, dtype=torch.float64), MESH, [S0, R])


@pytest.fixture
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_reported", set())


@pytest.mark.usefixtures("nothing_reported")
def test_a_fallback_is_right_and_says_so_once_with_the_users_line() -> None:
    d = sharded(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = torch.linalg.inv(d)
        torch.linalg.inv(sharded(6, 6))
    assert torch.allclose(found.full_tensor(), torch.linalg.inv(d.full_tensor()))
    (warning,) = caught
    assert warning.category is sw.errors.FallbackWarning and warning.filename == __file__
    assert str(warning.message) == (
        "aten.linalg_inv_ex(f64[4,4] S(0)@dp) cannot run on these shards: they were gathered and it ran replicated"
    )


@pytest.mark.usefixtures("nothing_reported")
def test_replicated_inputs_are_no_fallback() -> None:
    x = torch.rand(4, 4, dtype=torch.float64)
    with sw.strict():
        d = torch.linalg.inv(sw.distribute_tensor(x, MESH))
    assert torch.allclose(d.full_tensor(), torch.linalg.inv(x))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_fallback_is_differentiable() -> None:
    x = torch.rand(4, 4, dtype=torch.float64) + 4 * torch.eye(4, dtype=torch.float64)
    a = x.clone().requires_grad_()
    d = sw.distribute_tensor(x, MESH, [S0, S1]).requires_grad_()
    torch.linalg.inv(a).sum().backward()
    torch.linalg.inv(d).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), a.grad)


def test_strict_mode_refuses() -> None:
    d = sharded(4, 4)
    with sw.strict(), pytest.raises(sw.errors.StrictModeError) as error:
        torch.linalg.inv(d)
    assert str(error.value) == (
        "strict mode: aten.linalg_inv_ex(f64[4,4] S(0)@dp) cannot run on these shards and would gather them. "
        "Redistribute them to Replicate() yourself, or leave strict mode"
    )


def is_strict() -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.linalg.inv(sharded(4, 4))
    except sw.errors.StrictModeError:
        return True
    return False


def test_modes_end_with_their_block_even_by_an_exception_and_nest() -> None:
    with pytest.raises(KeyError), sw.strict():
        assert is_strict()
        raise KeyError
    assert not is_strict()
    with sw.strict():
        with sw.strict(False):
            assert not is_strict()
        assert is_strict()
        with pytest.raises(KeyError), sw.strict(False):
            raise KeyError
        assert is_strict()
    assert not is_strict()


def test_strict_mode_holds_for_calls_planned_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.linalg.inv(sharded(4, 4))
    assert not is_strict()
    with sw.strict():
        assert is_strict()


def mixes_freely() -> bool:
    try:
        _ = sharded(4, 4) + torch.ones(4)
    except sw.errors.MixedTensorError:
        return False
    return True


def test_implicit_replication() -> None:
    x, y = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    d = sw.distribute_tensor(x, MESH, [S0, S1]).requires_grad_()
    for _ in range(2):  # a plan made inside must not serve outside
        with implicit_replication():
            out = (d * y) @ x
        assert not mixes_freely()
    torch.testing.assert_close(out.full_tensor(), (x * y) @ x)
    out.sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), (torch.ones(4, 4, dtype=torch.float64) @ x.T) * y)
    with pytest.raises(KeyError), implicit_replication():
        with implicit_replication():
            assert mixes_freely()
        assert mixes_freely()
        raise KeyError
    assert not mixes_freely()


def test_plain_numbers_and_scalars_mix_without_asking() -> None:
    x = torch.rand(4, 4, dtype=torch.float64)
    d = sw.distribute_tensor(x, MESH, [P, S0])
    scalar = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close((d * scalar + 1).full_tensor(), x * 2 + 1)
    torch.testing.assert_close((scalar - d).full_tensor(), 2 - x)


# The cache


def train(steps: int, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        x = sw.distribute_tensor(torch.rand(4, 8), MESH, [S0, R])
        optimizer.zero_grad()
        (layer(x) * (0.5 + step)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0 + step)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_equal_steps_need_no_new_plans(foreach: bool) -> None:
    layer = sw.distribute_module(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), MESH)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=foreach)
    train(3, layer, optimizer)
    before = sw.cache_info()
    train(20, layer, optimizer)
    after = sw.cache_info()
    assert after.size == before.size and after.misses == before.misses
    assert after.hits >= before.hits + 20


def test_attention_without_a_given_float_is_planned_once_for_all_dtypes() -> None:
    queries = [
        sw.distribute_tensor(torch.ones(4, 2, 3, 2, dtype=dtype), MESH, [S0, R])
        for dtype in (torch.float32, torch.float64)
    ]
    nn.functional.scaled_dot_product_attention(queries[0], queries[0], queries[0], is_causal=True)
    before = sw.cache_info().misses
    nn.functional.scaled_dot_product_attention(queries[1], queries[1], queries[1], is_causal=True)
    assert sw.cache_info().misses == before
    nn.functional.scaled_dot_product_attention(queries[1], queries[1], queries[1], dropout_p=0.5)
    nn.functional.scaled_dot_product_attention(queries[1], queries[1], queries[1], dropout_p=0.0)
    assert sw.cache_info().misses > before + 1


def test_floats_make_no_new_plans() -> None:
    d = sharded(4, 4)
    _ = 0.5 / (d * 0.5 + 0.25) - 0.5
    before = sw.cache_info()
    for n in range(10):
        _ = (1.0 + n) / (d * (1.5 + n) + (0.25 + n)) - (2.0 - n)
    assert sw.cache_info().misses == before.misses and sw.cache_info().size == before.size


def test_ints_are_part_of_the_key() -> None:
    d = sharded(4, 4)
    for n in (2, 3):
        torch.testing.assert_close((d**n).full_tensor(), d.full_tensor() ** n)
        torch.testing.assert_close(d.sum(n - 2).full_tensor(), d.full_tensor().sum(n - 2))


def test_the_cache_is_bounded_and_can_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_call, "MAX_PLANS", 5)
    for n in range(1, 12):
        _ = sharded(n, 2) + 1
        assert sw.cache_info().size <= 5
    assert sw.cache_info().max_size == 5
    sw.clear_cache()
    assert sw.cache_info().size == 0
    misses = sw.cache_info().misses
    _ = sharded(3, 2) + 1
    assert sw.cache_info().misses > misses


def test_describing_a_call() -> None:
    d = sharded(8, 4)
    shown = fallback.describe("aten.add", (d, torch.ones(2), [1, d, 3, 4, 5]), {"alpha": 2})
    assert shown == "aten.add(f64[8,4] S(0)@dp, f32[2], [1, f64[8,4] S(0)@dp, 3, 4, …], alpha=2)"


def test_a_mode_of_torchs_sees_every_call() -> None:
    """Methods and functions of ours that go to dispatch at once do not when somebody looks on."""

    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = sw.distribute_tensor(torch.ones(4, 2), sw.simulate((2,), ("tp",)), [sw.Shard(0)])
    with Names() as names:
        torch.nn.functional.layer_norm((x + x).mul(2), [2]).relu()
    assert names.seen == ["add", "mul", "layer_norm", "relu"]


def test_another_kind_of_tensor_is_asked_first() -> None:
    """A subclass of somebody else's among the arguments has its say, as torch orders them."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "heard"

    x = sw.distribute_tensor(torch.ones(4, 2), sw.simulate((2,), ("tp",)), [sw.Shard(0)])
    loud = torch.ones(2).as_subclass(Loud)
    assert torch.nn.functional.layer_norm(loud, [2], x) == "heard"


def test_a_function_that_does_nothing_for_a_float_is_planned_anew_for_another() -> None:
    d = sharded(4, 4)
    for p in (0.0, 1.0, -0.0, 1.0):
        expected = torch.zeros(4, 4) if p else d.full_tensor()
        assert torch.equal(nn.functional.dropout(d, p).full_tensor(), expected)
        assert torch.equal(nn.functional.feature_alpha_dropout(d[None], p, training=True).full_tensor()[0], expected)
