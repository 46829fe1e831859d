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
