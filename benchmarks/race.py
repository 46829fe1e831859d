"""Timing several calls fairly beside each other, and showing the numbers."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

SLICE_SECONDS = 0.02
WARM_UP_CALLS = 2  # after each change of system: a program runs one of them, and finds its own code in the caches

Call = Callable[[], object]
Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call, one for each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    def ratio_to(self, other: Timing) -> float:
        """The median over the rounds of how many times as long it took as another did in the same round: whatever
        slows the machine down for a while slows down both."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


Clock = Callable[[Call, int], float]
"""Seconds per call, of so many calls in a row."""


def time_per_call(call: Call, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def work_per_call(call: Call, num_calls: int) -> float:
    """Of CPU time, which what else runs on the machine does not lengthen: for calls that wait for nothing."""
    start = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - start) / num_calls


def race(
    calls: dict[str, Call],
    *,
    num_rounds: int,
    clock: Clock = time_per_call,
) -> dict[str, Timing]:
    """Times the calls in turns, each for an equal slice. Every round has another order, so that each comes after all
    of the others: what one leaves behind in caches and heaps is to slow down all alike.
    """
    sizes = {name: slice_size(call, clock) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, chance = list(calls), random.Random(0)
    gc.collect()
    gc.freeze()  # collections then cost what the calls leave behind, not what torch's import did
    try:
        for _ in range(num_rounds):
            chance.shuffle(order)
            for name in order:
                for _ in range(WARM_UP_CALLS):
                    calls[name]()
                samples[name].append(clock(calls[name], sizes[name]))
    finally:
        gc.unfreeze()
    return {name: Timing(tuple(s)) for name, s in samples.items()}


def slice_size(call: Call, clock: Clock) -> int:
    for _ in range(5):
        call()
    return max(1, round(SLICE_SECONDS / clock(call, 5)))


def seconds(value: float) -> str:
    """Three significant digits or so.

    >>> seconds(0.0707), seconds(0.00486), seconds(0.00067158), seconds(8.42e-6)
    ('70.7 ms', '4.86 ms', '672 us', '8.42 us')
    """
    number, unit = (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "us")
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {unit}"


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[Row]

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("measure", "system", "op") else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row, style={"MISS": "red", "pass": "green"}.get(row[-1]))
        console.print(table)

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n"


def options_of(about: str | None, *, num_rounds: int) -> argparse.ArgumentParser:
    """The options that benchmarks have which measure in rounds."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--rounds", type=int, default=num_rounds, help="interleaved rounds per measurement")
    return parser


RESULTS = Path(__file__).parent / "results"


def report(stem: str, title: str, about: str, tables: list[Table], *, write: bool, out: Path = RESULTS) -> None:
    """Print tables and, if asked to, write them to <stem>-<date>.md, with what they were measured on."""
    for table in tables:
        table.print(Console(width=180))
    if write:
        today, body = datetime.date.today(), "\n".join(table.markdown() for table in tables)
        machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
        path = out / f"{stem}-{today}.md"
        path.write_text(f"# {title}, {today}\n\n{machine}, {os.cpu_count()} cores. {about}\n\n{body}")
