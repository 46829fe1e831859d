"""The `shardwise` command line: what it takes, what it says, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwise.cli import COMMANDS, main
from shardwise.rules import Rule, Strategy, register
from shardwise.rules.kit import registry


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["nonsense"], ["coverage", "--seed", "x"]),
        *(["coverage", "--samples", "0"], ["coverage", "--assignments", "-1"], ["fuzz", "--programs", "x"]),
    ],
    ids=" ".join,
)
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: shardwise" in capsys.readouterr().err


def coverage(*arguments: str) -> int:
    return main(["coverage", "--jobs", "0", "--quiet", "--samples", "1", "--assignments", "3", *arguments])


def test_an_operator_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage("--ops", "mm") == 0
    text = capsys.readouterr().out
    assert "1 (100.0%)" in text and "0 raised, 0 wrong" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("dtype", "how"), [("float32", "in double precision"), ("float64", "within 1e-08")])
def test_a_page_says_what_was_tried_and_how_it_was_judged(dtype: str, how: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    assert coverage("--ops", "mm", "--dtype", dtype, "--write-report", str(file)) == 0
    text = file.read_text()
    assert f"in {dtype} where it is taken" in text and how in text and "0 raised, 0 wrong" in text


def test_an_unknown_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage("--ops", "no such thing") == 2
    assert capsys.readouterr().err == "no operator is called no such thing\n"


def test_a_wrong_answer_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with registry.restored():
        register("flip", rule=Rule(lambda call: [Strategy((None,), (None,)), Strategy((0,), (0,))]))
        assert main(["coverage", "--jobs", "0", "--quiet", "--samples", "3", "--ops", "flip"]) == 1
    assert "1 (100.0%)" in capsys.readouterr().out.split("sometimes wrong")[1].splitlines()[0]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    assert coverage("--ops", "mm", "--json", str(file)) == 0
    first = json.loads(file.read_text())
    assert list(first["results"]) == ["mm"] and first["settings"]["samples"] == 1

    tried = []
    original = COMMANDS["coverage"].cover
    monkeypatch.setattr(COMMANDS["coverage"], "cover", lambda name, s: (tried.append(name), original(name, s))[1])
    assert coverage("--ops", "mm|bmm", "--json", str(file), "--resume") == 0
    assert tried == ["bmm"]
    assert json.loads(file.read_text())["results"]["mm"] == first["results"]["mm"]

    tried.clear()
    assert coverage("--ops", "mm|bmm", "--json", str(file), "--resume", "--seed", "1") == 0  # other settings
    assert tried == ["bmm", "mm"]


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert coverage("--ops", "mm|zeros") == 0
    text = capsys.readouterr().out
    assert "right throughout" in text and "takes no tensor" in text and "┃" not in text


def test_without_the_packages_that_samples_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwise.proof.kit import samples

    monkeypatch.setattr(samples, "all_operators", samples.all_operators.__wrapped__)
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_methods_invocations", None)
    assert coverage("--ops", "mm") == 2
    assert "pip install 'shardwise[proof]'" in capsys.readouterr().err
