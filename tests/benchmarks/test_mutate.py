"""Mutants of the core: which lines are changed, how, and where they are found again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutate import CORE, PACKAGE, ROOT, Mutant, Verdict, failed_tests, lost, mutants_of, replaced

SOURCE = '''
LIMIT = 3

def f(x: int = 1) -> bool:
    """Returns 2 > 1."""
    if x < 4 and x != 7:
        x += 1
    note(x)
    if x:
        raise ValueError(f"{x + 1} is more than 5")
    return not g(x - 2)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "core.py").write_text(SOURCE)
    return tmp_path


def test_lines_of_functions_are_changed_and_nothing_else(package: Path) -> None:
    found = {(mutant.line, mutant.replacement) for mutant in mutants_of(package / "core.py", package)}
    assert found == {
        ("if x < 4 and x != 7:", "if x >= 4 and x != 7:"),
        ("if x < 4 and x != 7:", "if x < 5 and x != 7:"),
        ("if x < 4 and x != 7:", "if x < 4 or x != 7:"),
        ("if x < 4 and x != 7:", "if x < 4 and x == 7:"),
        ("if x < 4 and x != 7:", "if x < 4 and x != 8:"),
        ("x += 1", "pass"),
        ("x += 1", "x += 2"),
        ("note(x)", "pass"),
        ("if x:", "if not x:"),
        ("return not g(x - 2)", "return g(x - 2)"),
        ("return not g(x - 2)", "return not g(x + 2)"),
        ("return not g(x - 2)", "return not g(x - 3)"),
    }


def test_a_mutant_is_found_where_its_line_has_moved_to(package: Path) -> None:
    mutant = Mutant("core.py", "note(x)", "pass")
    assert mutant.find(package) == (package / "core.py", 7)
    (package / "below").mkdir()
    moved = (package / "core.py").rename(package / "below" / "other.py")
    assert mutant.find(package) == (moved, 7)
    assert ast.unparse(ast.parse(replaced(moved, 7, "pass"))) == ast.unparse(
        ast.parse(SOURCE.replace("note(x)", "pass"))
    )
    (package / "twice.py").write_text("note(x)\n")
    assert mutant.find(package) is None
    assert Mutant("core.py", "note(y)", "pass").find(package) is None


@pytest.mark.parametrize("pattern", CORE)
def test_the_core_is_where_mutants_are_drawn(pattern: str) -> None:
    assert any((ROOT / PACKAGE).glob(pattern))


def test_tests_that_fail_are_read_off() -> None:
    said = (
        "FAILED tests/a.py::test[x - y] - AssertionError: no\nERROR tests/b.py - NameError\nFAILED tests/c.py::test\n"
    )
    assert failed_tests(said) == ("tests/a.py::test[x - y]", "tests/b.py", "tests/c.py::test")


def test_what_was_caught_and_survives_is_lost() -> None:
    mutants = [Mutant("core.py", line, "pass") for line in "abcd"]
    before = {m: Verdict(m, outcome) for m, outcome in zip(mutants, ("caught", "timeout", "survived", "caught"))}
    after = [Verdict(m, outcome) for m, outcome in zip(mutants, ("survived", "survived", "survived", "gone"))]
    assert [verdict.mutant for verdict in lost(after, before)] == mutants[:2]
