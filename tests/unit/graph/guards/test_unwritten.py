"""Dicts that somebody may have written to."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
import torch._dynamo.guards
from torch import nn

import shardwise as sw
from shardwise.graph.guards.unwritten import Unwritten


def yes() -> bool:
    return True


@pytest.mark.parametrize("kept", [{"a": 1}, OrderedDict(a=1), defaultdict(dict, {"a": 1}), nn.Linear(1, 1).__dict__])
def test_writes_are_noticed_and_reads_are_not(kept: dict[str, Any]) -> None:
    unwritten = Unwritten([{}, kept, kept])
    assert not unwritten.holds() and unwritten.looked(yes) and unwritten.holds()
    kept["a"] = kept.get("a", 0)
    assert unwritten.looked(yes) and unwritten.looked(yes) and unwritten.holds()
    kept["a"] = kept["a"]
    assert list(kept.items()) and unwritten.holds()
    kept["a"] += 1
    assert not unwritten.holds()
    kept["a"] -= 1
    assert not unwritten.holds()


def test_what_is_written_to_time_and_again_is_looked_into() -> None:
    kept = {"a": 1}
    unwritten, counted = Unwritten([kept]), []
    for number in range(1, 40):
        assert not unwritten.holds() and unwritten.looked(yes)
        if unwritten.holds():
            counted.append(number)
        kept["a"] += 1
    assert counted == [1, 2, 4, 8, 16, 32]


def test_nothing_is_taken_for_unwritten_that_was_not_found_as_it_was() -> None:
    unwritten = Unwritten([{}])
    assert not unwritten.looked(lambda: False) and not unwritten.holds()


def test_without_dynamo_dicts_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.guards")
    unwritten = Unwritten([{}])
    assert unwritten.looked(yes) and not unwritten.holds()
    assert "torch._dynamo.guards" not in sys.modules


def test_a_write_while_others_look_counts() -> None:
    kept = {"a": 1}
    unwritten = Unwritten([kept])
    assert unwritten.looked(lambda: kept.update(a=2) is None) and not unwritten.holds()


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_program_notices_what_changes_in_modules(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_counted:
        monkeypatch.delitem(sys.modules, "torch._dynamo.guards")
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    twice, spare = net[0].forward, nn.Parameter(torch.ones(2, 2))
    weight = net[0].weight
    compiled, x = sw.compile(lambda x: net(x), backend="fx"), torch.ones(1, 2)

    def captured() -> int:
        for _ in range(3):
            assert torch.equal(compiled(x), net(x))
        return len(compiled.programs)

    assert captured() == 1
    for number, (change, undo) in enumerate(
        (
            (lambda: setattr(net[1], "eps", 0.5), lambda: setattr(net[1], "eps", 1e-5)),
            (lambda: setattr(net[0], "forward", lambda x: 2 * twice(x)), lambda: delattr(net[0], "forward")),
            (lambda: net[0]._parameters.update(weight=spare), lambda: net[0]._parameters.update(weight=weight)),
            (lambda: setattr(net, "1", nn.Tanh()), lambda: None),
        )
    ):
        change()
        assert captured() == number + 2
        undo()
        assert captured() == number + 2
