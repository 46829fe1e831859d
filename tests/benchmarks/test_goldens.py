"""A part of the goldens on every run, `make goldens` compares all; and the comparison notices what it must."""

from __future__ import annotations

import warnings
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import goldens
from golden_calls import CALLS, TENSORS
from goldens import Golden, compare, differences, freeze, inputs_of, load, run_call

ROOT = Path(__file__).resolve().parents[2]
EVERY = 4  # of the cases of each family, so that all of them take some ten seconds

frozen_with_this_torch = pytest.mark.skipif(
    f"torch=={torch.__version__.partition('+')[0]}\n" not in (ROOT / "constraints.txt").read_text(),
    reason="frozen with another version of torch",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    return tmp_path


@frozen_with_this_torch
@pytest.mark.parametrize("family", CALLS)
def test_calls_are_as_frozen(family: str) -> None:
    now: Golden = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subject, case, mesh, way in list(goldens.cases_of(f"{family}: "))[::EVERY]:
            now.setdefault(subject, {})[case] = run_call(subject.partition(": ")[2], mesh, way)
    frozen = load("calls")
    same = {subject: {case: frozen[subject][case] for case in cases} for subject, cases in now.items()}
    assert not list(differences(same, now))


def test_every_case_is_frozen_and_nothing_else() -> None:
    cases = {(subject, case) for subject, case, _, _ in goldens.cases_of()}
    assert cases == {(subject, case) for subject, records in load("calls").items() for case in records}


def test_calls_use_the_tensors_that_there_are() -> None:
    assert {name for calls in CALLS.values() for call in calls for name in inputs_of(call)} == set(TENSORS)


BEFORE: Golden = {
    "matmul: x @ y": {"tp2: x=R y=S(1)": {"out": "[4,4] S(1)@tp"}, "tp2: x=S(1) y=S(0)": {"out": "[4,4] P(sum)@tp"}}
}
AFTER: Golden = {
    "matmul: x @ y": {"tp2: x=R y=S(1)": {"out": "[4,4] R", "forward": "all_gather@tp 32"}},
    "matmul: x @ x": {"tp2: x=S(0)": {"out": "[4,4] S(0)@tp"}},
}


def test_what_differs_is_told(folder: Path) -> None:
    freeze("calls", BEFORE, "")
    console = Console(record=True, width=200, file=StringIO())
    assert compare("calls", BEFORE, "", console)
    assert not compare("calls", AFTER, "", console)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [row for row in rows if row and row[0]] == [
        ["matmul: x @ y", "tp2: x=R y=S(1)", "out", "[4,4] S(1)@tp", "[4,4] R"],
        ["matmul: x @ y", "tp2: x=R y=S(1)", "forward", "-", "all_gather@tp 32"],
        ["matmul: x @ y", "tp2: x=S(1) y=S(0)", "", "there", "-"],
        ["matmul: x @ x", "tp2: x=S(0)", "", "-", "there"],
    ]


def test_freezing_a_part_keeps_the_rest(folder: Path) -> None:
    freeze("calls", BEFORE, "")
    freeze("calls", {"matmul: x @ y": {"tp2: x=R y=S(1)": {"out": "[4,4] R"}}}, "x=R")
    assert load("calls") == {
        "matmul: x @ y": {"tp2: x=R y=S(1)": {"out": "[4,4] R"}, "tp2: x=S(1) y=S(0)": {"out": "[4,4] P(sum)@tp"}}
    }
    freeze("calls", AFTER, "")
    assert load("calls") == AFTER


def test_a_record_is_a_line(folder: Path) -> None:
    lines = freeze("calls", BEFORE, "").read_text().splitlines()
    assert lines == ["{", '"matmul: x @ y": {', *lines[2:4], "}", "}"]
    assert all(line.startswith('"tp2: ') for line in lines[2:4])
