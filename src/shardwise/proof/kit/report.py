"""Results as tables: printed, and as Markdown in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwise import terminal
from shardwise.debug import table

WIDTH = 100

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, names of columns, and rows."""


def share(some: Sequence[Any], total: Sequence[Any]) -> str:
    return f"{len(some)} ({100 * len(some) / max(len(total), 1):.1f}%)"


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names by reason, in a row for each."""
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason, []).append(name)
    return [(reason, ", ".join(names)) for reason, names in found.items()]


def page(made: Sequence[Table], title: str, about: str) -> str:
    """Tables as a page of Markdown, the last, which sums up, first."""
    *details, total = made
    return "\n".join([f"# {title}", "", about, "", _rows(total), *(_section(one) for one in details if one[2])])


def _section(one: Table) -> str:
    return f"## {one[0].capitalize()}\n\n{_rows(one)}"


def _rows(one: Table) -> str:
    _, columns, rows = one
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "/") for cell in row] for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), ""])


def print_tables(made: Sequence[Table]) -> None:
    """Print those that have rows."""
    shown = [(title, tuple(columns), list(map(tuple, rows))) for title, columns, rows in made if rows]
    terminal.print_tables([table.Table(*one, numbers=len(one[1])) for one in shown], piped=WIDTH)
