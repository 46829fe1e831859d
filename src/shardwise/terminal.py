"""How commands show tables and how far they are: with Rich in a terminal, as plain text in pipes and without it."""

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


def print_tables(made: Sequence[Table], *, piped: int = UNBOUNDED) -> None:
    """Print tables, as wide as the terminal or, where there is none, as is said."""
    made = [_printable(table) for table in made]
    in_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if in_terminal else piped
    if in_terminal and has_rich():
        print(draw(made, width, color=True), end="")
    else:
        print("\n".join(plain(table, width) for table in made), end="")


def _printable(table: Table) -> Table:
    rows = [tuple(map(printable, row)) for row in table.rows]
    return replace(table, title=printable(table.title), columns=tuple(map(printable, table.columns)), rows=rows)


@contextmanager
def progress(
    title: str, total: int, *, done: int = 0, quiet: bool = False, said: Callable[[int], str] = str
) -> Iterator[Callable[..., None]]:
    """Inside, what it gives is told how much more is done, and what that was; `said` is how such numbers are shown."""
    bar = _rich_bar(title, total, done, said) if not quiet and sys.stderr.isatty() and has_rich() else None
    if bar is not None:
        with bar:
            yield lambda more=1, what="": bar.update(bar.task_ids[0], advance=more, what=what)
        return
    began = told = time.monotonic()
    fresh = 0

    def advance(more: int = 1, what: str = "") -> None:
        nonlocal fresh, told
        fresh += more
        now, left = time.monotonic(), total - done - fresh
        if not quiet and now - told > INTERVAL:
            told, seconds = now, int((now - began) / fresh * left)
            rest = f"{said(done + fresh)} of {said(total)}, {seconds // 60}:{seconds % 60:02} left"
            print(f"{title}: {rest}{what and f': {what}'}", file=sys.stderr)

    yield advance


def _rich_bar(title: str, total: int, done: int, said: Callable[[int], str]) -> Any:
    from rich import progress as rich
    from rich.console import Console

    class Amount(rich.ProgressColumn):
        def render(self, task: Any) -> Any:
            return f"{said(int(task.completed))} of {said(total)}"

    class Clock(rich.TimeRemainingColumn):
        def render(self, task: Any) -> Any:
            return super().render(task).append(" in all" if task.finished else " left")

    texts = (rich.TextColumn("{task.description}", markup=False), rich.TextColumn("{task.fields[what]}", markup=False))
    columns = (texts[0], rich.BarColumn(), Amount(), Clock(elapsed_when_finished=True), texts[1])
    bar = rich.Progress(*columns, console=Console(stderr=True))
    bar.add_task(title, total=total, completed=done, what="")
    return bar
