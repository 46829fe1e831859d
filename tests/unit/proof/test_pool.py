"""Tasks on a few processes: a hang, a crash and a fault each cost one task and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tasks import be_a_parent, misbehave

from shardwise.proof.kit.pool import run_all


def test_in_this_process() -> None:
    (outcome,) = run_all(misbehave, ["well"], 3, jobs=0, timeout=1.0)
    assert (outcome.parts, outcome.failure) == ([("well", 3), "more"], None)


@pytest.mark.slow
def test_one_bad_task_does_not_spoil_the_others() -> None:
    names = ["well", "die", "fail", "hang", "interrupt", "fine"]
    outcomes = {outcome.name: outcome for outcome in run_all(misbehave, names, 3, jobs=2, timeout=2.0)}
    assert set(outcomes) == set(names)
    assert {name: outcome.failure for name, outcome in outcomes.items()} == {
        "well": None,
        "die": "its process died (exit code 7)",
        "fail": "ValueError: what a pity",
        "hang": "timed out: nothing heard for 2 s",
        "interrupt": None,  # it is for the process that started it
        "fine": None,
    }
    for name, outcome in outcomes.items():  # what was done before it went wrong is kept
        assert outcome.parts == [(name, 3), *(["more"] if outcome.failure is None else [])]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "die"])
def test_what_a_task_started_ends_with_its_process(how: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (outcome,) = run_all(be_a_parent, [how], tmp_path / "pipe", jobs=1, timeout=2.0)
    assert outcome.failure is not None and outcome.parts == ["started"]
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b""  # nobody can write to it any more: else this would wait
    os.close(reading)
