"""Functions that run whole: those that are an op need no second look, those that may read sizes do; and what is found
out once about an op, or an axis, is not found out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sweep import normal, place
from torch import Tensor

import shardwise as sw
from shardwise.dispatch.planning import local_calls
from shardwise.dispatch.planning import replay_check as whole

S = sw.Shard


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple]:
    """The calls that a function gets from now on."""
    calls: list[tuple] = []
    function = getattr(module, name)

    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(module, name, counted)
    return calls


def agrees(function: Callable[[Tensor], Any], x: Tensor, *placements: sw.Placement) -> None:
    sw.clear_cache()
    found, expected = function(place(x, *placements)), function(x)
    for a, b in zip(
        [found] if isinstance(found, Tensor) else found, [expected] if isinstance(expected, Tensor) else expected
    ):
        torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(1),
        lambda x: torch.flip(x, (1,)),
        lambda x: x.transpose(0, 1),
        lambda x: torch.cumsum(x, dim=1),
        lambda x: torch.ops.aten.amax.default(x, [1]),
        lambda x: torch.topk(x, 2, dim=1),
        lambda x: x.unsqueeze(-1),
    ],
)
def test_an_op_itself_is_not_traced_on_shards(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    again = counting(monkeypatch, whole, "trace_call")
    agrees(function, normal(5, 4), S(0))
    assert again == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(1),
        lambda x: torch.chunk(x, 2, 1),
        lambda x: torch.tensor_split(x, 2, 1),
        lambda x: torch._C._nn.upsample_nearest1d(x.unsqueeze(1), None, [2.0]),
    ],
)
def test_what_may_read_sizes_is_traced_on_shards(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    again = counting(monkeypatch, whole, "_makes_the_calls")
    once = counting(monkeypatch, whole, "_makes_the_call")
    agrees(function, normal(5, 4), S(0))
    assert again or once


def test_one_call_is_rehearsed_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives on the shards is known: only what it is given must be looked at."""
    again = counting(monkeypatch, whole, "trace_call")
    agrees(lambda x: torch.layer_norm(x, [4]), normal(5, 4), S(0))
    assert again == []
    agrees(lambda x: torch.log_softmax(x, 1), normal(5, 4), S(0))
    assert again == []


@pytest.mark.parametrize("placement", [S(0), S(2)])
def test_sizes_that_a_function_reads_off_shards_are_noticed(placement: sw.Placement) -> None:
    agrees(lambda x: torch._C._nn.upsample_nearest1d(x, None, [1.7]), normal(3, 2, 7), placement)
    agrees(lambda x: torch.adaptive_avg_pool1d(x, 3), normal(3, 2, 7), placement)
    agrees(lambda x: torch.max_pool1d(x, 3, padding=1), normal(3, 2, 7), placement)


def test_an_op_is_tried_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_calls, "_bindings", {})
    tried = counting(monkeypatch, local_calls, "fast_callable")
    function = lambda x: torch.nn.functional.normalize(x, dim=0)  # noqa: E731
    agrees(function, normal(5, 4), S(0))
    assert tried
    before = len(tried)
    agrees(function, normal(6, 7), S(0))
    assert [call.name for (call,) in tried[before:] if call.name != "expand"] == []  # which is given its sizes


def test_what_is_known_of_ops_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_calls, "_bindings", {})
    monkeypatch.setattr(local_calls, "MAX_BINDINGS", 3)
    for number in range(6):
        agrees(lambda x, number=number: torch.nn.functional.normalize(x, 2.0 + number, dim=0), normal(5, 4), S(0))
        assert 0 < len(local_calls._bindings) <= 3
