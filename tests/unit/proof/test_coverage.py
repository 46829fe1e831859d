"""`shardwise coverage`: what it tries, how it sums up, and a seeded part of the whole run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.proof.coverage.command import (
    Settings,
    assignments,
    calls,
    measure,
    parse_assignment,
    show_assignment,
)
from shardwise.proof.coverage.results import Result, problem_rows, summary, tables
from shardwise.proof.kit.samples import operator, operators

FEW = Settings(samples=2, assignments=6, spread=1)
PARTS = 40


def test_all_assignments_where_they_are_few() -> None:
    ways = assignments([torch.ones(2, 2), torch.ones(2, dtype=torch.int64)], 1, 24, random.Random(0))
    assert len(ways) == len(set(ways)) == 4 * 2
    assert ((sw.Partial(),), (sw.Shard(0),)) in ways


def test_a_seeded_choice_where_they_are_many() -> None:
    tensors = [torch.ones(2, 2)] * 4
    ways = assignments(tensors, 1, 24, random.Random(0))
    assert len(ways) == len(set(ways)) == 24
    assert ways == assignments(tensors, 1, 24, random.Random(0))
    alone = [way for way in ways if sum(p != (sw.Replicate(),) for p in way) == 1]
    assert len(alone) >= 12  # every tensor alone, in every placement


def test_every_form_is_tried_on_both_meshes() -> None:
    op = operator("add")
    tried = {(form.name, shape) for form, shape, _ in calls(op, op.samples()[1], FEW)}
    names = ("function", "method", "in-place", "out=")
    assert tried == {(form, shape) for form in names for shape in ((2,), (2, 2))}


def test_targets_lie_as_results_do_and_otherwise() -> None:
    op = operator("add")
    targets = [way[-1] for form, _, way in calls(op, op.samples()[1], Settings()) if form.name == "out="]
    assert None in targets and len(set(targets)) > 2


def test_the_same_settings_make_the_same_calls() -> None:
    op = operator("addmm")
    sample = op.samples()[2]
    assert list(calls(op, sample, FEW)) == list(calls(op, sample, FEW))


def test_assignments_can_be_written_down() -> None:
    assert parse_assignment("S0,R P,S12") == ((sw.Shard(0), sw.Replicate()), (sw.Partial(), sw.Shard(12)))
    assert show_assignment(parse_assignment("S0,R P,S12 =")) == "S0,R P,S12 ="


def part(**problem: str) -> Result:
    filed = {"form": "function", "sample": 3, "call": "(f64[2])", "mesh": [2], "placements": "S0", **problem}
    return Result("mm", samples=1, counts={"right": 5, problem["kind"]: 1}, problems=[filed])


def test_problems_that_differ_in_numbers_only_are_one() -> None:
    result = Result("mm")
    result.add(part(kind="raised", detail="ValueError: no"))
    for off in ("1.5", "2e-3", "7"):
        result.add(part(kind="wrong", detail=f"value: off by {off} as [2] R"))
    assert [problem["kind"] for problem in result.problems] == ["wrong", "raised"]
    assert result.counts == {"right": 20, "wrong": 3, "raised": 1} and result.samples == 4
    assert problem_rows([result]) == [("mm", "24", "3", "1", "(f64[2]) S0: value: off by 1.5 as [2] R")]


def test_a_task_that_failed_counts_as_raised() -> None:
    result = Result("mm")
    result.ended("timed out: nothing heard for 5 s", 0)
    assert result.counts == {"raised": 1} and result.problems[0]["detail"].startswith("timed out")
    assert dict(summary([result]))["sometimes raised"] == "1 (100.0%)"


def test_an_operator_without_samples_is_not_right() -> None:
    result = Result("mm")
    assert result.note == "torch has no samples of it"
    assert dict(summary([result]))["right throughout"] == "0 (0.0%)"


def test_what_was_compared_is_counted() -> None:
    """Every form, and gradients but those that torch does not have."""
    add, acosh = measure(["add", "acosh"], FEW)
    assert all(add.counts[f"as {form}"] for form in ("function", "method", "in-place", "out="))
    assert add.counts["gradients compared"] and add.counts["gradients none"] == add.counts["as out="]
    assert acosh.counts["gradients refused by torch"] == acosh.counts["as in-place"]


def test_other_strides_are_listed() -> None:
    strided, add = measure(["as_strided", "add"], FEW)
    rows = {title: rows for title, _, rows in tables([strided, add])}["other strides than torch's"]
    assert rows == [("as_strided", str(strided.counts["other strides"]), strided.strides)]
    assert ", as [" in strided.strides
    assert dict(summary([strided, add]))["other strides than torch's"] == "1 (50.0%)"


def test_what_cannot_be_tried_is_listed_with_a_reason() -> None:
    names = ["zeros", "to_sparse", "torch._scaled_mm", "empty_like"]
    results = measure(names, FEW)
    assert [result.note for result in results] == [
        "takes no tensor: there is nothing to shard",
        "takes or returns sparse or nested tensors, which have no shards",
        "takes no dtype that the CPU can compute with",
        "",
    ]
    assert results[3].random == results[3].samples


def test_a_sample_counts_if_any_form_of_it_does() -> None:
    """torch refuses to write to leaves that need gradients, but not to copies of them."""
    (result,) = measure(["_foreach_zero"], FEW)
    assert result.samples == 2 and result.counts["right"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("part", "dtype"), [(0, "float32"), (13, "float64"), (26, "float32")])
def test_a_part_of_all_operators_is_right(part: int, dtype: str) -> None:
    """The whole is `make coverage`; these are 1/40 of the operators each, in a few layouts."""
    results = measure([op.name for op in operators()[part::PARTS]], replace(FEW, dtype=dtype))
    assert problem_rows(results) == []
    assert sum(result.calls for result in results) > 100
