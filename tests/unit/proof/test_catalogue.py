"""The catalogue of rules: its notation, and that docs/rules.md lists the rules there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sweep import normal

from shardwise.proof.verify.calls import record
from shardwise.proof.verify.catalogue import families, render, short, ways
from shardwise.proof.verify.forced import concrete
from shardwise.proof.verify.verdicts import OpReport

X = normal(5, 4)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "rules.md"


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (torch.mm, (X, normal(4, 3)), ("`ab, bc → ac`", "b: P(sum)", "sum, avg: `P, R → P` or `R, P → P`")),
        (torch.relu, (X,), ("`ab → ab`", "", "")),
        (lambda x: x.softmax(1), (X,), ("`ab → ab`", "b: by communication", "")),
        (lambda x: x.sum(1), (X,), ("`ab → a`", "b: P(sum)", "sum, avg: `P → P`")),
        (lambda x: x.amax((0, 1)), (X,), ("`ab → ()`", "a, b: whole, by communication", "")),
        (lambda x: x.t(), (X,), ("`ab → ba`", "", "any: `P → P`")),
        (torch.neg, (X,), ("`ab → ab`", "", "sum, avg: `P → P`")),
        (lambda x: x.unbind(1), (X,), ("`ab → 4×a`", "b: P(sum)", "any: `P → 4×P`")),
        (lambda x: x.square().view(20), (X,), ("`a· → a`", "", "any: `P → P`")),
    ],
)
def test_strategies_in_a_row(function: Callable, inputs: tuple, expected: tuple[str, str, str]) -> None:
    case = record(function, inputs, {})[-1]
    assert ways(case.call, concrete(case)) == expected


def test_the_call_with_the_most_ways_is_shown() -> None:
    report = OpReport("aten::mm")
    for cells in (("`() → ()`", "", "any: `P → P`"), ("`ab → ab`", "", ""), ("`a → a`", "", "sum: `P → P`")):
        report.add(OpReport("aten::mm", ways=cells))
    assert report.ways == ("`ab → ab`", "", "")


def test_a_page() -> None:
    gap = {"call": "", "true": "", "reason": "it is hidden"}
    page = render(
        {
            "aten::mm": OpReport("aten::mm", True, calls=1, ways=("`ab, bc → ac`", "b: P(sum)", "")),
            "aten::mv": OpReport("aten::mv", True, calls=1, true=3, claimed=2, gaps=[gap]),
        }
    )
    assert "| `mm` | `ab, bc → ac` | b: P(sum) |  | verified |" in page
    assert "| `bmm` |  |  |  | no sample |" in page
    assert "## math.matmul\n\nMatrix products." in page
    assert "Of 2 ops with a rule that were called: 1 verified, 1 sound but incomplete." in page
    assert "- `mv`: it is hidden" in page
    for text in (page, PAGE.read_text()):
        assert "## Kernels" in text
        assert "- `losses.class_rows.class_parallel_loss`: The loss of rows whose classes are sharded" in text


def test_the_page_is_up_to_date() -> None:
    """Every op with a rule is listed, under its file, and no other. If not: `make verify` writes the page again."""
    listed: dict[str, set[str]] = {}
    family = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            family = line.removeprefix("## ")
        elif found := re.match(r"\| `([^`]+)` \|", line):
            listed.setdefault(family, set()).add(found[1])
    assert listed == {family: set(map(short, names)) for family, names in families().items()}


def test_the_page_knows_of_every_rule() -> None:
    """None is unsound, and none was never called."""
    statuses = re.findall(r"^\| `.*\| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(statuses) == sum(map(len, families().values()))
    assert {status.split(":")[0].split(";")[0] for status in statuses} <= {
        "verified",
        "sound",
        "only in shape",
        "not judged",
    }
