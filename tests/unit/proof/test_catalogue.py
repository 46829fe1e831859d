"""The catalogue of rules: its notation, and that docs/rules.md lists the rules there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sweep import normal

from shardwise.proof.calls import record
from shardwise.proof.case import Case
from shardwise.proof.catalogue import families, render, short, ways
from shardwise.proof.forced import concrete
from shardwise.proof.verdicts import OpReport

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rules.md"


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (torch.mm, (normal(5, 4), normal(4, 3)), "`ab, bc → ac`; b: P(sum); pending: P(sum), R → P(sum)"),
        (torch.relu, (normal(5, 4),), "`ab → ab`"),
        (lambda x: x.softmax(1), (normal(5, 4),), "`ab → ab`"),
        (lambda x: x.sum(1), (normal(5, 4),), "`ab → a`; b: P(sum); pending: P(sum) → P(sum)"),
        (lambda x: x.argmax(1), (normal(5, 4),), "`ab → a`; b: whole"),
        (lambda x: x.t(), (normal(5, 4),), "`ab → ba`"),
    ],
)
def test_strategies_in_a_line(function: Callable, inputs: tuple, expected: str) -> None:
    (recorded,) = record(function, inputs, {})
    assert ways(recorded.call, concrete(Case(recorded))).startswith(expected)


def test_a_page() -> None:
    page = render({"aten::mm": OpReport("aten::mm", True, calls=1, ways="`ab, bc → ac`")})
    assert "| `mm` | `ab, bc → ac` | verified |" in page
    assert "| `bmm` |  | no sample |" in page
    assert "## matmul" in page


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
