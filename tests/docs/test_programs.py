"""The programs in examples/ that a test machine can run in a moment, as a reader starts them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_llama_plan(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "llama_plan.py"), run_name="__main__")
    assert "a forward pass communicates {'all_reduce': 5, 'all_gather': 1}" in capsys.readouterr().out


@pytest.mark.parametrize("options", ["--dp 2 --shard 1 --tp 2", "--dp 1 --shard 2 --tp 2"])
def test_gpt(options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that README shows; the program itself compares losses and norms with one device."""
    assert f"examples/gpt.py {options}" in (EXAMPLES.parent / "README.md").read_text()
    monkeypatch.setattr("sys.argv", ["gpt.py", *options.split(), "--steps", "8"])
    runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
    assert "step  7   loss" in capsys.readouterr().out
