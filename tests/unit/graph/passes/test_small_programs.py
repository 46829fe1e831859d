"""Each pass on small programs: what is communicated after it, and that results and arguments are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import shards
from optimised import SMALL, R, S, Small, case_of, kinds, only, ops, program_of, red, whole_numbers

import shardwise as sw
from shardwise.graph.cost.memory import memory_of
from shardwise.graph.nodes import collective_of
from shardwise.graph.passes import Traffic


def mesh_of(*shape: int) -> Any:
    return sw.simulate(shape, ("dp", "tp")[: len(shape)])


def sent(program: sw.graph.Program) -> int:
    return Traffic.of(program.ranks[0].graph).bytes


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_what_is_communicated(case: Small, shape: tuple[int, int]) -> None:
    """Five rows, so that ranks have different shards."""
    mesh = mesh_of(*shape)
    before, after = case.program(mesh, ()), case.program(mesh, only(case.acts))
    for rank in range(mesh.size()):
        assert kinds(before, rank) == list(case.before)
        assert kinds(after, rank) == list(case.after)
    assert not any(report.left_out for report in after.reports)
    assert sent(after) <= sent(before)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_all_passes_together(case: Small) -> None:
    case.program(mesh_of(3, 2), "default")


def before_and_after(name: str) -> tuple[sw.graph.Program, sw.graph.Program]:
    """A small program on two ranks, tidy, and after the pass that it is about."""
    case, mesh = case_of(name), mesh_of(2, 1)
    return case.program(mesh, ("tidy",)), case.program(mesh, only(case.acts))


# What they say they do


def test_tidy_computes_nothing_twice() -> None:
    def function(x: Any) -> Any:
        return x.detach().exp() * 2 + x.exp() * 3

    def make() -> list[Any]:
        return [whole_numbers(mesh_of(2), (4, 4), [S(0)])]

    before = [op for op in ops(program_of(function, make, ())) if op not in ("alias", "detach")]
    assert before == ["exp", "mul", "exp", "mul", "add"]
    assert ops(program_of(function, make, ("tidy",))) == ["exp", "mul", "mul", "add"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.exp() + x.add_(1).exp(), id="written between"),
        pytest.param(lambda x: x.exp().add_(1) * x.exp(), id="one is written to"),
        pytest.param(lambda x: (x.exp(), x.exp()), id="both given back"),
    ],
)
def test_tidy_leaves_what_is_not_the_same(function: Any) -> None:
    def make() -> list[Any]:
        return [whole_numbers(mesh_of(2), (4, 4), [S(0)])]

    found = ops(program_of(function, make, ("tidy",)))
    assert found.count("exp") == 2


def test_random_numbers_are_not_shared() -> None:
    mesh = mesh_of(2)

    def function(x: Any) -> Any:
        return torch.dropout(x, 0.5, True) - torch.dropout(x, 0.5, True)

    compiled = sw.compile(function, backend="fx")
    found = compiled(whole_numbers(mesh, (64, 64), [S(0)]))
    assert found.to_local().abs().sum() > 0


def test_what_is_shared_is_given_back_as_two_tensors() -> None:
    case = case_of("both given back")
    compiled = sw.compile(case.function, backend="fx", passes=only("share"))
    with torch.no_grad():
        one, other = compiled(*case.arguments(mesh_of(2, 1)))
        before = other.full_tensor().clone()
        one.zero_()
    for shard in shards(other):
        assert torch.equal(shard, before)


def test_a_sum_that_is_split_is_computed_with_in_parts() -> None:
    before, after = before_and_after("sums split")
    assert sent(before) == 2 * sent(after) == 20
    divisions = [node.meta["facts"].shape for node in after.ranks[1].graph.nodes if "div" in str(node.target)]
    assert divisions == [(2,)]


@pytest.mark.parametrize("name", ["cast after", "cast before", "added after"])
def test_gathers_are_narrower(name: str) -> None:
    before, after = before_and_after(name)
    assert sent(before) == 2 * sent(after)


def test_a_gather_goes_on_meanwhile() -> None:
    before, after = before_and_after("meanwhile")
    assert ops(before) == ["all_gather", "getitem", "getitem", "cat", "mul", "exp2", "sum", "mul"]
    assert ops(after) == ["start_all_gather", "mul", "exp2", "sum", "wait", "getitem", "getitem", "cat", "mul"]


def test_what_is_gathered_is_written_to_behind_the_start() -> None:
    _, after = before_and_after("written meanwhile")
    found = ops(after)
    assert found.index("start_all_gather") < found.index("add_") < found.index("wait")


def test_nothing_is_started_that_is_needed_at_once() -> None:
    mesh = mesh_of(2)
    program = program_of(lambda x: red(x, R) * 2, lambda: [whole_numbers(mesh, (4, 4), [S(0)])], "default")
    assert ops(program) == ["all_gather", "getitem", "getitem", "cat", "mul"]


@pytest.mark.parametrize(
    ("name", "owned"),
    [
        ("in place", [True]),
        ("reduced and kept", [False]),
        ("views reduced", [False] * 2),
        ("given and reduced", [False]),
    ],
)
def test_only_what_nobody_else_uses_is_reduced_in_place(name: str, owned: list[bool]) -> None:
    _, after = before_and_after(name)
    nodes = [collective_of(node) for node in after.ranks[0].graph.nodes]
    assert [collective.owned for collective in nodes if collective is not None] == owned


def test_reports_say_what_was_done() -> None:
    _, after = before_and_after("two sums")
    assert [str(report) for report in after.reports] == [
        "tidy: nothing to do",
        "merge: 2 small collectives in 1; 2 all_reduce, 28 B → 1 all_reduce, 28 B",
    ]


def test_what_is_reduced_in_place_needs_no_other_memory() -> None:
    def function(x: Any) -> Any:
        return red(x.sum(0), R).sum()

    def make() -> list[Any]:
        return [whole_numbers(mesh_of(2), (8, 64), [S(0)])]

    before, after = (program_of(function, make, passes) for passes in (("tidy",), only("in_place")))
    made = [memory_of(program.ranks[0].graph).made for program in (before, after)]
    assert made == [2 * 4 * 64, 4 * 64 + 4]
