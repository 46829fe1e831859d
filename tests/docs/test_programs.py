"""The programs in examples/ that a test machine can run in a moment, as a reader starts them."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_llama_plan(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "llama_plan.py"), run_name="__main__")
    assert "a forward pass communicates {'all_reduce': 5, 'all_gather': 1}" in capsys.readouterr().out


def test_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed by itself, and started again, it ends where a run that was not killed does."""
    program = str(EXAMPLES / "resume.py")
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, program, str(tmp_path / "run"), "--kill-at", "23"]
    killed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    losses = []
    for folder, begins in (("run", "goes on after step "), ("whole", "a fresh start")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [program, str(tmp_path / folder)])
            runpy.run_path(program, run_name="__main__")
        said = capsys.readouterr().out
        assert said.startswith(begins)
        losses.append(said.splitlines()[-3:])
    assert losses[0] == losses[1]
    assert sorted(os.listdir(tmp_path / "run")) == [f"step-000000{step}" for step in (30, 35, 40)]


@pytest.mark.parametrize("options", ["--dp 2 --shard 1 --tp 2", "--dp 1 --shard 2 --tp 2"])
def test_gpt(options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that README shows; the program itself compares losses and norms with one device."""
    assert f"examples/gpt.py {options}" in (EXAMPLES.parent / "README.md").read_text()
    monkeypatch.setattr("sys.argv", ["gpt.py", *options.split(), "--steps", "8"])
    runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
    assert "step  7   loss" in capsys.readouterr().out


def test_fully_sharded_and_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    """The program itself compares losses and norms with one device."""
    runpy.run_path(str(EXAMPLES / "fsdp_tp.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "step 9   loss" in said
    assert "up.weight    [128,32] S(0)@tp,shard   gradient [128,32] S(0)@tp,shard" in said
