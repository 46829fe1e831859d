"""A progress bar with the time that is left: Rich's where it is installed, else a line of text now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

INTERVAL = 10.0
"""Seconds between two lines of plain text."""


class Progress:
    """Counts what is done of a number of tasks, on stderr."""

    def __init__(self, title: str, total: int, *, done: int = 0, quiet: bool = False) -> None:
        self.title, self.total, self.done, self.quiet = title, total, done, quiet
        self.began, self.already = time.monotonic(), done
        self.told = self.began
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet:
            self.bar = _rich_bar(self.title, self.total, self.done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, what: str) -> None:
        """One more is done: `what`."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], advance=1, what=what)
        elif not self.quiet and (time.monotonic() - self.told > INTERVAL or self.done == self.total):
            self.told = time.monotonic()
            print(f"{self.title}: {self.done}/{self.total}, {_duration(self.left)} left: {what}", file=sys.stderr)

    @property
    def left(self) -> float:
        """Seconds left, if the rest takes as long as what was done."""
        fresh = self.done - self.already
        return (time.monotonic() - self.began) / fresh * (self.total - self.done) if fresh else 0.0


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _rich_bar(title: str, total: int, done: int) -> Any:
    """Rich's bar, where there is a terminal to draw it on."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Bar(*columns, TextColumn("{task.fields[what]}"), console=Console(stderr=True))
    bar.add_task(title, total=total, completed=done, what="")
    bar.start()
    return bar
