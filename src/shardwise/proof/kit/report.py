"""Results as tables: with Rich where it is installed, else as the Markdown that is also written to files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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
    return "\n".join([f"# {title}", "", about, "", _rows(total), *(_section(table) for table in details if table[2])])


def _section(table: Table) -> str:
    return f"## {table[0].capitalize()}\n\n{_rows(table)}"


def _rows(table: Table) -> str:
    _, columns, rows = table
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "/") for cell in row] for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), ""])


def print_tables(made: Sequence[Table]) -> None:
    """Print those that have rows."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print("\n".join(_section(table) for table in made if table[2]))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for title, columns, rows in made:
        table = RichTable(title=title, title_justify="left", show_header=any(columns))
        for column in columns[:-1]:
            table.add_column(column, overflow="fold", justify="right" if table.columns else "left")
        table.add_column(columns[-1], overflow="fold", ratio=2)
        for row in rows:
            table.add_row(*map(Text, row))
        if rows:
            console.print(table)
