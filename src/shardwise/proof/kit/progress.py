"""A progress bar with the time that is left: Rich's where it is installed, else a line of text now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERVAL = 10.0
"""Seconds between two lines of plain text."""


@contextmanager
def progress(title: str, total: int, *, done: int = 0, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Inside, what it gives is called with what was done each time that one more is."""
    bar = None if quiet or not sys.stderr.isatty() else _rich_bar(title, total, done)
    if bar is not None:
        with bar:
            yield lambda what: bar.update(bar.task_ids[0], advance=1, what=what)
        return
    fresh, began = 0, time.monotonic()
    told = began

    def advance(what: str) -> None:
        nonlocal fresh, told
        fresh += 1
        now, left = time.monotonic(), total - done - fresh
        if not quiet and (now - told > INTERVAL or not left):
            told, seconds = now, int((now - began) / fresh * left)
            print(f"{title}: {total - left}/{total}, {seconds // 60}:{seconds % 60:02} left: {what}", file=sys.stderr)

    yield advance


def _rich_bar(title: str, total: int, done: int) -> Any:
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        return None
    columns = (rich.TextColumn(title), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    what = rich.TextColumn("{task.fields[what]}")
    bar = rich.Progress(*columns, rich.TimeRemainingColumn(), what, console=Console(stderr=True))
    bar.add_task(title, total=total, completed=done, what="")
    return bar
