"""What the commands refuse to begin with, in one line each; and that a run which was stopped goes on with the rest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import COMMANDS, main
from shardwise.proof.kit import pool, results

IN_THIS_PROCESS = ("--jobs", "0", "--quiet", "--samples", "1")

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "coverage": ("--ops", "mm|bmm|mv", "--assignments", "2", "--spread", "1"),
    "verify": ("aten::mm", "aten::bmm", "aten::mv", "--calls", "1"),
}
OF_OPERATORS = list(ARGUMENTS)
"""Commands that go through torch's operators. (`fuzz` goes through programs: see test_fuzz.py.)"""
TASKS = {"coverage": "cover", "verify": "judge_saved"}


def run(command: str, *arguments: str) -> int:
    return main([command, *arguments, *IN_THIS_PROCESS])


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before anything was run, however long that takes."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("it ran")

    for name in ("coverage", "fuzz", "verify"):
        monkeypatch.setattr(COMMANDS[name], "run_tasks", fail)


def refused(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    """What a command says that does not begin."""
    assert run(command, *arguments) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1
    return told.err.rstrip("\n")


# Numbers and patterns


@pytest.mark.parametrize("command", OF_OPERATORS)
@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--samples", "0", "'0' is not a number from 1"),
        ("--samples", "-1", "'-1' is not a number from 1"),
        ("--samples", "²", "'²' is not a number from 1"),
        ("--jobs", "-1", "'-1' is not a number from 0"),
        ("--timeout", "0", "'0' is not a number of seconds above 0"),
        ("--timeout", "-1", "'-1' is not a number of seconds above 0"),
        ("--timeout", "nan", "'nan' is not a number of seconds above 0"),
        ("--timeout", "soon", "'soon' is not a number of seconds above 0"),
        ("--ops", "(", "'(' is not a regular expression: missing ), unterminated subpattern at position 0"),
    ],
)
def test_what_no_option_takes(
    command: str, option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused_by_the_parser([command, option, value], f"shardwise {command}: error: argument {option}: {why}", capsys)


@pytest.mark.parametrize("value", ["0", "-2"])
def test_rules_are_judged_by_some_calls(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    why = f"shardwise verify: error: argument --calls: '{value}' is not a number from 1"
    _refused_by_the_parser(["verify", "--calls", value], why, capsys)


def _refused_by_the_parser(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == why


# Files

FILES = [(command, option) for command in OF_OPERATORS for option in ("--json", "--write-report")]
FILES.append(("verify", "--write-docs"))


@pytest.mark.parametrize(("command", "option"), FILES)
@pytest.mark.parametrize(
    ("name", "why"),
    [("none/file", "there is no such folder"), ("", "it is not a plain file"), ("denied", "permission denied")],
)
def test_a_file_that_cannot_be_written_is_told_of_first(
    command: str,
    option: str,
    name: str,
    why: str,
    tmp_path: Path,
    nothing_runs: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "denied":
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    file = tmp_path / name
    assert refused(capsys, command, *ARGUMENTS[command], option, str(file)) == f"{file} cannot be written: {why}"


def test_results_replace_no_device(nothing_runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "coverage", "--ops", "mm", "--json", "/dev/null")
    assert told == "/dev/null cannot be written: it is not a plain file"


@pytest.mark.parametrize("command", OF_OPERATORS)
def test_resume_needs_a_file(command: str, nothing_runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, command, *ARGUMENTS[command], "--resume")
    assert told == "--resume needs --json FILE: the results to go on with"


@pytest.mark.parametrize("command", OF_OPERATORS)
@pytest.mark.parametrize("content", ["", '{"results": {', "[]", "3", "{}", '{"results": []}', "\udcff"])
def test_a_file_that_holds_no_results(
    command: str, content: str, tmp_path: Path, nothing_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert refused(capsys, command, *ARGUMENTS[command], "--json", str(file), "--resume") == (
        f"--resume cannot go on with {file}: it does not hold the results of a run; leave out --resume to write over it"
    )
    assert file.read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.parametrize("kept", [[], {"mm": 3}, {"mm": {"nonsense": 3}}])
def test_results_of_another_kind(kept: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({**results.Store(None, {}).header, "results": kept}))
    with pytest.raises(results.CannotRun, match="it does not hold the results of a run"):
        results.Store(file, {}, resume=True)


# Names


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("mm", "nosuch", "aten::mm_", "any::mm"), "no op is called nosuch, aten::mm_, any::mm"),
        (("mm", "addmm_", "bmm", "--ops", "mm"), "no sample makes a call of addmm_, bmm"),
        (("mm", "--ops", "nosuch"), "no operator is called nosuch"),
        (("--ops", "_foreach_add"), "no sample makes a call of any op that has rules"),
    ],
)
def test_ops_that_are_not_found_are_named(
    arguments: tuple[str, ...], why: str, nothing_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "verify", *arguments) == why


# Going on


def _noting(task: pool.Task, tried: list[str], stop_at: int | None = None) -> pool.Task:
    """A task that notes what it is called for, and is interrupted when it is called for the n-th time."""

    def noting(name: str, settings: Any) -> Iterator[Any]:
        tried.append(name)
        if len(tried) == stop_at:
            raise KeyboardInterrupt
        yield from task(name, settings)

    return noting


@pytest.mark.parametrize("command", OF_OPERATORS)
def test_only_the_rest_of_an_interrupted_run_is_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "results.json", tmp_path / "whole.json"
    assert run(command, *ARGUMENTS[command], "--json", str(whole)) == 0
    printed = capsys.readouterr().out
    names = list(json.loads(whole.read_text())["results"])
    assert len(names) == 3

    task = getattr(COMMANDS[command], TASKS[command])
    arguments = (*ARGUMENTS[command], "--json", str(file), "--resume")
    for stop_at, tried_now, kept in ((2, names[:2], names[:1]), (2, names[1:], names[:2]), (None, names[2:], names)):
        tried: list[str] = []
        monkeypatch.setattr(COMMANDS[command], TASKS[command], _noting(task, tried, stop_at))
        assert run(command, *arguments) == (0 if stop_at is None else 130)
        assert tried == tried_now
        assert list(json.loads(file.read_text())["results"]) == kept
    told = capsys.readouterr()
    assert _without_times(told.out) == _without_times(printed)
    assert told.err == "interrupted\n" * 2


def _without_times(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "s of processes" not in line]


KILLED = """
import os, signal, sys
from types import SimpleNamespace
from shardwise.cli import main
from shardwise.proof.kit import results

results.source_digest = lambda: "this code"
results.time = SimpleNamespace(monotonic=lambda: 0.0)  # no write is put off because the one before it was slow
replace, left = os.replace, [None] * 2

def killing(draft, file):
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left.pop()
    replace(draft, file)

os.replace = killing
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of its own, at its third result. Both runs say that they are of the same code, so that nobody has to
    stop editing it while they run."""
    monkeypatch.setattr(results, "source_digest", lambda: "this code")
    file = tmp_path / "results.json"
    arguments = (*ARGUMENTS["coverage"], "--json", str(file))
    killed = subprocess.run([sys.executable, "-c", KILLED, "coverage", *arguments, "--samples", "1", "--jobs", "1"])
    assert killed.returncode == -signal.SIGKILL
    assert len(json.loads(file.read_text())["results"]) == 2

    tried: list[str] = []
    monkeypatch.setattr(COMMANDS["coverage"], "cover", _noting(COMMANDS["coverage"].cover, tried))
    assert run("coverage", *arguments, "--resume") == 0
    assert tried == ["mm"]
    assert set(json.loads(file.read_text())["results"]) == {"mm", "bmm", "mv"}
