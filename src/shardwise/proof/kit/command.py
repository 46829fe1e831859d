"""What the commands have in common: options, tasks with a bar and a file, and how they end."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.proof.kit.pool import Task, run_all
from shardwise.proof.kit.report import Table, page, print_tables
from shardwise.proof.kit.results import CannotRun, Store
from shardwise.terminal import progress


def add_run_arguments(parser: argparse.ArgumentParser, *, timed: str) -> None:
    """Options of all commands: how it runs, and what becomes of the results. `timed`: what has a limit."""
    add, number = parser.add_argument, partial(count, least=0)
    add("--jobs", type=number, default=2, metavar="N", help="processes; 0: this one (2)")
    add("--timeout", type=_seconds, default=120.0, metavar="S", help=f"seconds {timed} may take (120)")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE as they come")
    add("--resume", action="store_true", help="keep what FILE holds of the same code and settings")
    add("--write-report", type=Path, metavar="FILE", help="write the results to FILE as a dated page")
    add("--quiet", action="store_true", help="no progress bar")


def count(text: str, *, least: int = 1) -> int:
    """An argument that says how many: a run of none would find nothing wrong."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least}")
    return int(text)


def pattern(text: str) -> str:
    """An argument that is a regular expression."""
    try:
        re.compile(text)
    except (re.error, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


@dataclass(frozen=True)
class How:
    """How tasks run: the results there are, the number of processes (0: this one), and the seconds each may take."""

    store: Store | None = None
    jobs: int = 0
    timeout: float = 120.0
    quiet: bool = True


def how_to_run(given: argparse.Namespace, settings: dict[str, Any], kind: Callable[..., Any]) -> How:
    """How tasks are to run, as it was given. What cannot be written is told before a long run, not after it."""
    if given.resume and given.json is None:
        raise CannotRun("--resume needs --json FILE: the results to go on with")
    for option in ("json", "write_report", "write_docs"):
        file = getattr(given, option, None)
        if file is not None and (why := _unwritable(file)):
            raise CannotRun(f"{file} cannot be written: {why}")
    return How(Store(given.json, settings, resume=given.resume, kind=kind), given.jobs, given.timeout, given.quiet)


def _unwritable(file: Path) -> str:
    if not file.resolve().parent.is_dir():
        return "there is no such folder"
    if file.exists() and not file.is_file():
        return "it is not a plain file"
    return "" if os.access(file if file.is_file() else file.resolve().parent, os.W_OK) else "permission denied"


def run_tasks(
    title: str, task: Task, names: Sequence[str], settings: Any, kind: Callable[[str], Any], how: How
) -> list[Any]:
    """Run a task for each name that the store holds nothing of; the results, of a kind, in the order of the names."""
    store = how.store or Store(None, {})
    wanted = set(names)
    done = {name: kept for name, kept in store.results.items() if name in wanted}
    left = [name for name in names if name not in done]
    outcomes = closing(run_all(task, left, settings, jobs=how.jobs, timeout=how.timeout))
    try:
        with outcomes as coming, progress(title, len(names), done=len(done), quiet=how.quiet) as advance:
            for outcome in coming:
                result = done[outcome.name] = kind(outcome.name)
                for part in outcome.parts:
                    result.add(part)
                if outcome.failure is not None:
                    result.ended(outcome.failure, len(outcome.parts))
                result.seconds = round(outcome.seconds, 2)
                advance(what=f"{outcome.name} {result.status}")
                store.add(result)
    finally:
        store.save()
    return [done[name] for name in names]


def finish(given: argparse.Namespace, made: Sequence[Table], title: str, about: str, more: str = "") -> None:
    """Print the results and, if that is asked for, write them as a dated page."""
    print_tables(made)
    if given.write_report is not None:
        versions = f"Python {platform.python_version()}, torch {torch.__version__}."
        given.write_report.write_text(page(made, f"{title}, {date.today()}", f"{versions} {about}") + more)
