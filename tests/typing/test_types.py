"""Users' programs type-check against the package."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.rules.kit import registry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def errors_in(*programs: str) -> set[tuple[str, int, str]]:
    """File, line and kind of all that mypy says of some programs, strictly; the package itself is checked elsewhere."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", *programs]
    command += ["--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"]
    command += ["--allow-untyped-calls"]  # much of torch is not annotated, `backward` for one
    env = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    ran = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = re.findall(r"^([^:\n]+):(\d+): error: .*\[([\w-]+)\]$", ran.stdout, re.MULTILINE)
    assert len(found) == ran.stdout.count(": error: "), ran.stdout
    return {(file, int(line), kind) for file, line, kind in found}


def expected_in(program: str) -> set[tuple[str, int, str]]:
    marks = [re.search(r"# expect: ([\w-]+)$", line) for line in (HERE / program).read_text().splitlines()]
    return {(program, number, mark[1]) for number, mark in enumerate(marks, 1) if mark}


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first run reads all of torch
def test_a_program_checks_and_wrong_arguments_do_not() -> None:
    pytest.importorskip("mypy")
    expected = expected_in("wrong_types.py")
    assert expected
    assert errors_in("user_program.py", "wrong_types.py") == expected


def test_the_program_that_checks_runs(tmp_path: Path) -> None:
    with registry.restored():
        program = runpy.run_path(str(HERE / "user_program.py"))
        losses = program["train"]()
        assert losses[-1] < losses[0]
        assert program["move"]() == ("split by dim 0", "waiting for a sum")
        assert program["loss_over_classes"]() == {"all_reduce": 2}
        assert program["by_a_plan"]().shape == (4, 8)
        assert program["kept"](tmp_path) == (3, 3)
        assert program["looked_at"]() == ["all_reduce", "[] P(sum)@tp"]


def test_types_ship_with_the_package() -> None:
    """Type checkers look at installed packages only where they hold this file; everything in the folder ships."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert (ROOT / "src" / "shardwise" / "py.typed").exists()
    assert settings == {"targets": {"wheel": {"packages": ["src/shardwise"]}}}
