"""How the commands show tables and progress: with Rich in a terminal, as plain text in pipes and without it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardwise.debug.table import Table, draw, plain
from shardwise.words import size

UNBOUNDED = 10**6
"""Columns of a pipe: nothing is folded there, so that other programs find whole lines."""
INTERVAL = 10.0
"""Seconds between two lines of plain progress."""


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def printable(text: str) -> str:
    r"""What a file calls something may not steer the terminal.

    >>> printable("\x1b[2J")
    '\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_tables(made: Sequence[Table]) -> None:
    made = [replace(table, rows=[tuple(map(printable, row)) for row in table.rows]) for table in made]
    in_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if in_terminal else UNBOUNDED
    if in_terminal and has_rich():
        print(draw(made, width, color=True), end="")
    else:
        print("\n".join(plain(table, width) for table in made), end="")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Inside, what it gives is told of the bytes that were done."""
    bar = _rich_bar(title, total) if sys.stderr.isatty() else None
    if bar is not None:
        with bar:
            yield lambda num_bytes: bar.advance(bar.task_ids[0], num_bytes)
        return
    done, told = 0, time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal done, told
        done += num_bytes
        if time.monotonic() - told > INTERVAL:
            told = time.monotonic()
            print(f"{title}: {size(done)} of {size(total)}", file=sys.stderr)

    yield advance


def _rich_bar(title: str, total: int) -> Any:
    if not has_rich():
        return None
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
    )
    bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(title, total=total)
    return bar
