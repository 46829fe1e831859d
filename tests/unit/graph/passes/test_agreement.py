"""Ranks that would not communicate alike after a pass leave it out, all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import batch, net_on
from optimised import case_of, kinds
from torch import fx

import shardwise as sw
from shardwise.graph.draft.storages import replaces_memory
from shardwise.graph.nodes import Start
from shardwise.graph.passes import DEFAULT, PASSES
from shardwise.graph.passes.share import share


def mesh_2() -> Any:
    return sw.simulate((2, 1), ("dp", "tp"))


def test_a_pass_that_acts_on_one_rank_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "share", lambda draft: share(draft) if draft.held else [])
    program = case_of("gathered twice").program(mesh_2(), ("tidy", "share", "merge"))
    assert [(report.name, report.left_out) for report in program.reports] == [
        ("tidy", False),
        ("merge", False),
        ("share", True),
    ]
    assert str(program.reports[-1]) == "share: left out, since the ranks would not communicate alike"
    assert kinds(program, 0) == kinds(program, 1) == ["all_gather"]


def test_a_pass_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(draft: Any) -> list[str]:
        raise KeyError("here")

    monkeypatch.setitem(PASSES, "share", fails)
    with pytest.raises(KeyError, match="here"):
        case_of("gathered twice").program(mesh_2(), "default")


def test_passes_are_chosen_by_name() -> None:
    case = case_of("gathered twice")
    assert [report.name for report in case.program(mesh_2(), "default").reports] == list(DEFAULT)
    assert [report.name for report in case.program(mesh_2(), ["merge", "share"]).reports] == ["share", "merge"]
    assert [report.name for report in case.program(mesh_2(), "share").reports] == ["share"]
    assert case.program(mesh_2(), ()).reports == ()
    with pytest.raises(ValueError, match=r"passes are 'default', or some of 'tidy', 'share', .*; got 'shares'"):
        sw.compile(case.function, passes=["shares"])


def test_memory_that_is_replaced_is_not_reasoned_about() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    assert not replaces_memory(graph)
    graph.call_function(torch.ops.aten.set_.source_Tensor, (x, doubled))
    assert replaces_memory(graph)


def test_what_is_started_in_a_pass_is_awaited_in_it() -> None:
    """A program with a gradient is cut in two: no collective may be under way between them."""
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    net = net_on(mesh)
    sw.compile(net, backend="fx")
    for call in range(2):
        net(batch(mesh, call)).square().mean().backward()
    for part in sw.graph.programs_of(net).programs[0].ranks:
        awaited = {node.args[0]: node for node in part.graph.nodes if getattr(node.target, "__name__", "") == "wait"}
        started = [node for node in part.graph.nodes if isinstance(node.target, Start)]
        assert started and set(awaited) == set(started)
        for node in started:
            assert bool(node.meta.get("backward")) == bool(awaited[node].meta.get("backward"))
