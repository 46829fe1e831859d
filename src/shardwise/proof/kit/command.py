"""What the commands of this package have in common: options, tasks with a bar and a file, and how they end."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from shardwise.proof.kit.pool import Outcome, Task, run_all
from shardwise.proof.kit.progress import Progress
from shardwise.proof.kit.report import Table, print_tables
from shardwise.proof.kit.results import NotResults, Store
from shardwise.proof.kit.samples import NoSamplesError


class CannotRun(Exception):
    """Why a command does not begin, in words for who asked for it."""


Command = Callable[[argparse.Namespace], int]


def may_not_begin(run: Command) -> Command:
    """A command that says why it cannot begin, and then ends with 2."""

    @wraps(run)
    def checked(given: argparse.Namespace) -> int:
        try:
            return run(given)
        except (CannotRun, NoSamplesError, NotResults) as reason:
            print(reason, file=sys.stderr)
            return 2

    return checked


def add_run_arguments(parser: argparse.ArgumentParser, *, timed: str) -> None:
    """Options of all commands: which part, how it runs, and what becomes of the results. `timed`: what has a limit."""
    parser.add_argument("--stratum", type=_stratum, default=(0, 1), metavar="K/N", help="the K-th of N parts, from 0")
    parser.add_argument(
        "--jobs", type=partial(count, least=0), default=2, metavar="N", help="processes; 0: this one (2)"
    )
    parser.add_argument("--timeout", type=_seconds, default=120.0, metavar="S", help=f"seconds {timed} may take (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as they come")
    parser.add_argument("--resume", action="store_true", help="keep what FILE holds of the same code and settings")
    parser.add_argument("--write-report", type=Path, metavar="FILE", help="write the results to FILE as a dated page")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


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


def _stratum(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(part), int(parts)


@dataclass(frozen=True)
class How:
    """How tasks run: the results there are, the number of processes (0: this one), and the seconds each may take."""

    store: Store | None = None
    jobs: int = 0
    timeout: float = 120.0
    quiet: bool = True


HERE = How()
"""In this process, and quietly."""


def how_to_run(given: argparse.Namespace, settings: dict[str, Any], kind: Callable[..., Any]) -> How:
    """How tasks are to run, as it was given; results are of some kind of dataclass."""
    if given.resume and given.json is None:
        raise CannotRun("--resume needs --json FILE: the results to go on with")
    for option in ("json", "write_report", "write_docs"):
        file = getattr(given, option, None)
        why = None if file is None else _unwritable(file, replaced=option == "json")
        if why is not None:  # said before a long run, not after it
            raise CannotRun(f"{file} cannot be written: {why}")
    store = Store(given.json, settings, resume=given.resume, kind=kind)
    return How(store, given.jobs, given.timeout, given.quiet)


def _unwritable(file: Path, *, replaced: bool) -> str | None:
    """Why a file cannot be written, or replaced by another one; None if it can."""
    folder = file.resolve().parent
    if not folder.is_dir():
        return "there is no such folder"
    if file.is_dir():
        return "it is a folder"
    if replaced and file.exists() and not file.is_file():  # a device would be gone
        return "it is not a plain file"
    if not os.access(folder if replaced or not file.exists() else file, os.W_OK):
        return "permission denied"
    return None


def in_part(stratum: tuple[int, int]) -> str:
    return "" if stratum == (0, 1) else f" in part {stratum[0]} of {stratum[1]}"


def some(names: Sequence[str], given: argparse.Namespace) -> Sequence[str]:
    """The names, if there are any."""
    if not names:
        part = in_part(given.stratum)
        raise CannotRun(f"no operator{part} is called {given.ops}" if given.ops else f"no operator is{part}")
    return names


def run_tasks(
    title: str,
    task: Task,
    names: Sequence[str],
    settings: Any,
    result_of: Callable[[Outcome], Any],
    how: How,
) -> list[Any]:
    """Run a task for each name that the store holds nothing of; the results, each with a `status`, in their order."""
    store = how.store
    done = {name: kept for name, kept in (store.results if store else {}).items() if name in names}
    left = [name for name in names if name not in done]
    outcomes = closing(run_all(task, left, settings, jobs=how.jobs, timeout=how.timeout))
    with outcomes as coming, Progress(title, len(names), done=len(done), quiet=how.quiet) as progress:
        for outcome in coming:
            result = done[outcome.name] = result_of(outcome)
            progress.advance(f"{outcome.name} {result.status}")
            if store is not None:
                store.add(result)
    return [done[name] for name in names]


def finish(given: argparse.Namespace, made: Sequence[Table], title: str, page: Callable[[str], str]) -> None:
    """Print the results and, if that is asked for, write them as a page, which gets a dated title."""
    print_tables(made)
    if given.write_report is not None:
        given.write_report.write_text(page(f"{title}, {date.today()}"))


def versions() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}."
