"""`shardwise checkpoint`: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import save_all
from safetensors.torch import load_file, save_file

from shardwise import terminal
from shardwise.checkpoint import save_step
from shardwise.checkpoint.command import SUBCOMMANDS
from shardwise.checkpoint.steps.index import _checksum
from shardwise.cli import main
from shardwise.words import size


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    save_all(folder)
    return folder


def run(*arguments: Any) -> int:
    return main(["checkpoint", *map(str, arguments)])


def test_help_is_a_good_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], *([name] for name in SUBCOMMANDS)):
        with pytest.raises(SystemExit) as exit:
            run(*arguments, "--help")
        assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "exit status: 0 if all is well, 1 if verify finds damage or diff a difference" in text
    assert all((module.__doc__ or "").splitlines()[0] in text for module in SUBCOMMANDS.values())
    assert max(map(len, text.splitlines())) <= 120
    monkeypatch.setenv("COLUMNS", "80")
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit):
            run(name, "--help")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    with pytest.raises(SystemExit):
        run("show")
    assert capsys.readouterr().err.endswith("the following arguments are required: PATH\n")


def test_ls(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "broken.safetensors").write_bytes(b"\0" * 20)
    monkeypatch.chdir(saved)
    assert run("ls") == 0
    lines = capsys.readouterr().out.splitlines()
    (saved / "broken.safetensors").unlink()
    assert lines[1].split() == ["name", "format", "about", "tensors", "bytes"]
    assert [line.split()[0] for line in lines[2:]] == ["a", "broken.safetensors", "dcp", "safetensors", "step"]
    assert lines[2].split() == ["a", "set", "safetensors", "3", "files", "5", "380", "B"]
    assert "cannot be read: broken.safetensors, at byte " in lines[3]
    assert run("ls", "step") == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("step-00000007  step    step 7, saved by 1 rank at 2")
    assert run("ls", "safetensors") == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["model.safetensors", "safetensors"]


def test_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", saved / "dcp") == 0
    text = capsys.readouterr().out
    rows = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[:4] == [
        [f"{saved}/dcp: dcp, 1 file"],
        ["key", "dtype", "shape", "layout", "×", "bytes"],
        ["model.{0,2}.weight", "float32", "[7, 4]", "5 boxes", "2", "224 B"],
        ["model.{0,2}.bias", "float32", "[7]", "2", "56 B"],
    ]
    assert ["optimizer.param_groups.0.lr", "0.25"] in cells and ["epoch", "3"] in cells
    assert run("show", saved / "step", "model.*", "--every") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert sorted(names) == ["6", *sorted(f"model.{i}.{kind}" for i in range(3) for kind in ("weight", "bias"))]


def test_keys_that_differ_by_numbers_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"h.{i}.w.{j}" for i in range(12) for j in range(2)]
    keys += ["a.0.x.1", "a.1.x.0", "solo.5"]
    save_file({key: torch.zeros(2) for key in keys}, tmp_path / "x.safetensors")
    assert run("show", tmp_path / "x.safetensors") == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]}
    assert names == {"a.*.x.*", "h.{0..11}.w.{0..1}", "solo.5", "27"}


def test_verify(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", saved / "step", saved / "dcp", saved / "torch.save", saved / "a set") == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["whole"] * 4
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    assert run("verify", tmp_path / "x.safetensors") == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/x.safetensors: safetensors, 1 tensor, 12 B: the files carry no checksums: their headers were "
        f"verified, and not their data\n"
    )


def test_what_cannot_be_verified_keeps_nothing_else_from_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", saved / "gone", saved / "dcp", saved / "lost") == 2
    told = capsys.readouterr()
    assert told.out.endswith("whole\n") and told.out.count("\n") == 1
    assert "gone: No such file or directory; cannot read" in told.err and "lost: No such" in told.err


def test_verify_names_all_that_is_wrong(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    data = bytearray((saved / "safetensors" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    data[-30] ^= 1
    target.write_bytes(data)
    assert run("verify", target, saved / "dcp") == 1
    first, *rest, last = capsys.readouterr().out.splitlines()
    assert first == f"{target}: safetensors, 5 tensors, 380 B: damaged" and last.endswith("whole")
    assert len(rest) == 2 and all("the data have changed since they were written" in line for line in rest)
    assert all(f"{target}, at byte " in line and ", key '" in line for line in rest)
    target.write_bytes(data[:-1])
    assert run("verify", target) == 1
    assert "the file ends at byte" in capsys.readouterr().out


def test_convert(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", saved / "step", tmp_path / "x.safetensors", "--under", "model.") == 0
    assert capsys.readouterr().out == f"{tmp_path}/x.safetensors: safetensors, 6 tensors, 408 B\n"
    assert load_file(tmp_path / "x.safetensors").keys() >= {"0.weight", "2.weight"}
    assert run("convert", saved / "dcp", tmp_path / "set", "--to", "safetensors", "--max-shard-size", "300B") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("left out, being no tensors: optimizer.param_groups.0.lr, ") and "more" in told[1]
    assert len(list((tmp_path / "set").glob("*.safetensors"))) > 3
    assert run("convert", tmp_path / "set", tmp_path / "back.pt") == 0
    assert torch.load(tmp_path / "back.pt", weights_only=True).keys() >= {"model.0.weight"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", "dcp", "there"), "there does not say which format is meant: say it with --to safetensors or"),
        (("convert", "dcp", "step", "--to", "dcp"), "step is there already"),
        (("convert", "dcp", "x.safetensors", "--max-shard-size", "much"), "max_shard_size='much' is no number of"),
        (("convert", "dcp", "x.pt", "--under", "nets."), "no key of dcp begins with 'nets.'"),
        (("show", "dcp", "*.scale", "b"), "dcp has no key like *.scale or b: the first one is 'model.0.weight'"),
        (("show", "nothing"), "cannot read nothing: No such file or directory"),
        (("verify", "nothing"), "cannot read nothing: No such file or directory"),
        (("ls", "nothing"), "ls: cannot read nothing: No such file or directory"),
    ],
)
def test_what_cannot_be_done(
    arguments: tuple[str, ...],
    words: str,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(saved)
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"shardwise checkpoint {arguments[0]}: ") and words in told.err and not told.out


def test_differences_of_like_tensors_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({f"h.{i}.w": torch.zeros(2) for i in range(12)} | {"x": torch.zeros(3)}, tmp_path / "a.safetensors")
    save_file({f"h.{i}.w": torch.zeros(2).half() for i in range(12)}, tmp_path / "b.safetensors")
    assert run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "13 differences" and [row.split() for row in rows] == [
        ["h.{0..11}.w", "dtype", "float32", "float16"],
        ["x", "only", "in", "the", "first", "float32", "[3]"],
    ]


def test_diff(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", saved / "step", saved / "dcp", "--under", "model.", "model.") == 0
    assert capsys.readouterr().out == "the same: 6 tensors\n"
    state = load_file(saved / "safetensors" / "model.safetensors")
    state["1.bias"][0] += 0.5
    save_file(state, tmp_path / "x.safetensors")
    assert run("diff", saved / "safetensors", tmp_path / "x.safetensors") == 1
    title, header, row = capsys.readouterr().out.splitlines()
    assert title == "1 difference" and header.split() == [
        *("key", "differs", "in", str(saved / "safetensors"), str(tmp_path / "x.safetensors"))
    ]
    assert row.split()[:6] == ["1.bias", "values", "1", "of", "4", "elements,"] and "by at most 0.5 (" in row
    for tolerance in (("--absolute", "0.6"), ("--relative", "10"), ("--no-values",)):
        assert run("diff", saved / "safetensors", tmp_path / "x.safetensors", *tolerance) == 0


@pytest.mark.parametrize("has_rich", [True, False])
def test_in_a_terminal(
    has_rich: bool, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rich:
        monkeypatch.setattr(terminal, "has_rich", lambda: False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("show", saved / "dcp") == 0
    text = capsys.readouterr().out
    assert ("┃" in text) is has_rich
    rows = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(len(row) for row in rows if str(saved) not in row) <= 60


HOSTILE = "\x1b]0;title\x07\x1b[31m\ud800\u202e[bold]{0}[/nothing]"


@pytest.mark.parametrize("in_terminal", [True, False])
def test_names_do_not_steer_the_terminal(
    in_terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those of folders what Rich makes of them."""
    (folder := tmp_path / "[bold]{0}[").mkdir()
    text = json.dumps({HOSTILE: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    torch.save({"x": torch.zeros(1), "value": HOSTILE, HOSTILE: 3}, folder / "{y}.pt")
    step = save_step(folder / "run", step=1, background=False, data={"x": 1}).wait()
    said = json.loads((step / "index.json").read_text())
    said["made_by"]["time"] = HOSTILE
    (step / "index.json").write_text(json.dumps({**said, "checksum": _checksum(said)}))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: in_terminal)
    monkeypatch.setenv("COLUMNS", "200")
    for status, *arguments in (
        *(
            (0, "ls"),
            (0, "show", "x.safetensors"),
            (0, "show", "run"),
            (0, "show", "{y}.pt"),
            (0, "verify", "x.safetensors"),
        ),
        *((1, "diff", "x.safetensors", "{y}.pt"), (0, "convert", "{y}.pt", "{z}[/].safetensors")),
    ):
        command, *names = arguments
        assert run(command, *(folder / name for name in names or ".")) == status
        told = capsys.readouterr()
        plain = re.sub(r"\x1b\[(\d+;)*\d*m", "", told.out).replace("\n", "")
        assert plain.isprintable() and "[bold]{0}[" in plain
        assert in_terminal or "\x1b" not in told.out + told.err


def test_numbers_that_torch_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}).encode()
    (file := tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert run("show", file) == 0 and run("diff", file, file, "--no-values") == 0
    for arguments in (("diff", file, file), ("convert", file, tmp_path / "y.pt")):
        assert run(*arguments) == 2
        assert "'w' is F4, of which torch has no single elements" in capsys.readouterr().err


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "INTERVAL", -1.0)
    with terminal.progress("copying", 2000, said=size) as done:
        done(500)
    told = capsys.readouterr()
    assert told.err == "copying: 500 B of 2.0 kB, 0:00 left\n" and not told.out
