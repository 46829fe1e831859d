"""Collectives as a table: what moved, where it was asked for, why, and what it cost. Rich's where it is installed."""

from __future__ import annotations

import importlib.util
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.comm.record import Comm
from shardwise.words import size

NARROW, WIDE = 110, 160
"""Columns of a terminal below which the cells of a row stand under one another, and from which each has its own."""

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, of one or more lines each. Columns from `numbers` on hold numbers."""

    title: str
    columns: Cells
    rows: list[Cells]
    numbers: int


def tables(comms: Sequence[Comm], width: int, *, every: bool = True) -> list[Table]:
    """Every collective, like ones together, unless only the totals are wanted; then totals by line."""
    return [*([_collectives(comms, width)] if every else []), _totals(comms)]


# What stands in the tables


def _collectives(comms: Sequence[Comm], width: int) -> Table:
    alike = Counter(comms)
    columns, arrange = _ARRANGED[(width >= NARROW) + (width >= WIDE)]
    rows = [(*arrange(comm), str(number), size(number * comm.wire_bytes)) for comm, number in alike.items()]
    return Table("Collectives", (*columns, "×", "sent"), rows, len(columns))


def _narrow(comm: Comm) -> Cells:
    moves = "\n".join(filter(None, (_collective(comm), *_from_to(comm))))
    return "\n".join(filter(None, (where(comm), comm.function, comm.argument, comm.why))), moves


def _medium(comm: Comm) -> Cells:
    called = "\n".join(filter(None, (comm.function, comm.argument, comm.why)))
    return where(comm), called, _collective(comm), "\n".join(_from_to(comm))


def _wide(comm: Comm) -> Cells:
    called = ", ".join(filter(None, (comm.function, comm.argument)))
    return where(comm), called, _collective(comm), " ".join(_from_to(comm)), comm.why


_ARRANGED: tuple[tuple[Cells, Callable[[Comm], Cells]], ...] = (
    (("line, call, why", "collective, from → to"), _narrow),
    (("line", "call, why", "collective", "from → to"), _medium),
    (("line", "call", "collective", "from → to", "why"), _wide),
)


def _collective(comm: Comm) -> str:
    return f"{comm.kind} {'×'.join(comm.axes)}={comm.ranks}, {'backward' if comm.backward else 'forward'}"


def _from_to(comm: Comm) -> Cells:
    """The layouts from which and to which a value went; its shape is said once."""
    return () if comm.source is None else (str(comm.source), f"→ {str(comm.target).partition(' ')[2]}")


def _totals(comms: Sequence[Comm]) -> Table:
    lines: dict[str, list[Comm]] = {}
    for comm in comms:
        lines.setdefault(where(comm), []).append(comm)
    rows = [(line, *_total(found)) for line, found in lines.items()]
    return Table("Totals by line", ("line", "collectives", "×", "sent"), [*rows, ("all", *_total(comms))], 2)


def _total(comms: Sequence[Comm]) -> Cells:
    kinds = Counter(comm.kind for comm in comms)
    named = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
    return named or "none", str(len(comms)), size(sum(comm.wire_bytes for comm in comms))


def where(comm: Comm) -> str:
    """The user's line: its file as seen from where the program runs or, outside of that, the end of its path."""
    return place(comm.file, comm.line) if comm.file else "line unknown"


def place(file: str, line: int) -> str:
    """A line, in the same way."""
    near = os.path.relpath(file) if os.path.isabs(file) else file
    name = near if not near.startswith("..") else os.sep.join(["…", *Path(file).parts[-2:]])
    return f"{name}:{line}"


# How they are drawn


def draw(made: Sequence[Table], width: int, *, color: bool = False) -> str:
    if importlib.util.find_spec("rich") is None:
        return "\n".join(plain(table, width) for table in made)
    return _with_rich(made, width, color)


def _with_rich(made: Sequence[Table], width: int, color: bool) -> str:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=color, color_system="auto" if color else None)
    for table in made:
        drawn = RichTable(title=Text(table.title), title_justify="left", show_header=any(table.columns))
        drawn.show_lines = any("\n" in cell for row in table.rows for cell in row)
        for at, column in enumerate(table.columns):
            number = at >= table.numbers
            drawn.add_column(Text(column), overflow="fold", justify="right" if number else "left", no_wrap=number)
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    return text.getvalue()


def plain(table: Table, width: int) -> str:
    """A table without lines, at most `width` wide: what does not fit of a cell goes on below it."""
    lines = [*([table.columns] if any(table.columns) else []), *table.rows]
    widths = _widths([[max(map(len, cell.split("\n"))) for cell in line] for line in lines], width)
    text = [table.title]
    for line in lines:
        cells = [_folded(cell, most) for cell, most in zip(line, widths, strict=True)]
        for at in range(max(map(len, cells))):
            parts = [cell[at] if at < len(cell) else "" for cell in cells]
            text.append("  ".join(_set(part, widths[i], i >= table.numbers) for i, part in enumerate(parts)).rstrip())
    return "\n".join([*text, ""])


def _widths(needed: list[list[int]], width: int) -> list[int]:
    """The widths of columns: what they need, or else the widest give way."""
    widths = [max(column) for column in zip(*needed, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    return widths


def _folded(cell: str, width: int) -> list[str]:
    return [line[at : at + width] for line in cell.split("\n") for at in range(0, max(len(line), 1), width)]


def _set(part: str, width: int, right: bool) -> str:
    return part.rjust(width) if right else part.ljust(width)
