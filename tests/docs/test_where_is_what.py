"""The pages for people who work on the library name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"
PAGES = ("CONTRIBUTING.md", "docs/design.md", "README.md")


def test_every_answer_names_files_that_exist() -> None:
    """In a row of "Where is what" a name is a path in the package, or stands beside the one before it."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is what")[2]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 20
    assert [row for row in rows if not names_files(row.split("|")[2])] == []


def names_files(answer: str) -> bool:
    beside, found = PACKAGE, False
    for name in re.findall(r"`([\w/]+(?:\.py|/|(?<=/)\w+))`", answer):
        path = next((at / name for at in (PACKAGE, beside) if (at / name).exists()), None)
        if path is None:
            return False
        beside, found = path if path.is_dir() else path.parent, True
    return found


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """`transitions.py`, `redistribute/transitions.py` and `src/shardwise/redistribute/transitions.py` are one file."""
    files = [str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if ".venv" not in file.parts]
    named = re.findall(r"(?<![\w/.*-])((?:\w+/)*\w+\.py)(?![\w:])", (ROOT / page).read_text())
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []


def test_an_answer_that_names_no_file_is_found() -> None:
    assert names_files(" `graph/run/run.py`; compiled `inductor.py` ")
    assert not names_files(" `graph/run/run.py`; compiled `compiler.py` ")
    assert not names_files(" `graph/runs/` ")
    assert not names_files(" the family's file ")
