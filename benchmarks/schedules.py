"""What programs communicate, against the best schedule that is known for each.

    python benchmarks/schedules.py                   all programs at all sizes, on every port that can run them
    python benchmarks/schedules.py --port recording  on one port
    python benchmarks/schedules.py --only Megatron   the programs whose name contains this
    python benchmarks/schedules.py --small           only the sizes that the tests run
    python benchmarks/schedules.py --explain         and every collective of those that miss, with its line and reason
    python benchmarks/schedules.py --write           and write benchmarks/results/schedules-<date>.md

A program is a plain module with its parameters and inputs laid out; beside it stands what a person would communicate
for it. Bytes are what one rank sends in a ring. Small collectives (`wire.Small`: a few numbers for each row, the
gradient of a vector) are listed apart. The recording port runs every size, on meta shards; the simulator and torch's
fake process group run those that fit into memory. The exit status is 1 if a program communicates more than 1.00 times
what the person would, raises, or communicates differently on different ports.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

import scheduled_blocks
import scheduled_models
import scheduled_modules
import scheduled_vocabulary
from race import Row, Table
from scheduled import PORTS, Program, Size, judge, run_on
from shardwise.debug import CommDebugMode
from wire import Comparison, Schedule, Tally

PROGRAMS: tuple[Program, ...] = (
    *scheduled_blocks.PROGRAMS,
    *scheduled_modules.PROGRAMS,
    *scheduled_vocabulary.PROGRAMS,
    *scheduled_models.PROGRAMS,
)
COLUMNS = ("program", "size", "pass", "person", "bytes", "ours", "bytes", "× bytes", "× number", "small", "ports", "")
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one program did at one size: its schedules, each with the ports that it ran so on, and what ports raised."""

    program: Program
    size: Size
    schedules: list[tuple[Schedule, list[str]]]
    errors: dict[str, str]
    records: list[CommDebugMode]
    """Of each schedule, every collective with its line and reason."""

    @property
    def comparisons(self) -> list[tuple[Comparison, Comparison]]:
        return [judge(self.program, self.size, schedule) for schedule, _ in self.schedules]

    @property
    def is_met(self) -> bool:
        met = all(comparison.is_met for pair in self.comparisons for comparison in pair)
        return met and len(self.schedules) == 1 and not self.errors


def can_run(port: str, program: Program, size: Size) -> bool:
    return port == "recording" or not size.is_large


def same(a: Schedule, b: Schedule) -> bool:
    """The same collectives, in whatever order."""
    return Counter(a.forward) == Counter(b.forward) and Counter(a.backward) == Counter(b.backward)


def measure(program: Program, size: Size, ports: tuple[str, ...]) -> Outcome:
    outcome = Outcome(program, size, [], {}, [])
    for port in ports:
        if not can_run(port, program, size):
            continue
        try:
            ran = run_on(port, program, size)
        except Exception as error:  # one failure must not hide the other results
            outcome.errors[port] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        for schedule, ran_on in outcome.schedules:
            if same(schedule, ran.schedule):
                ran_on.append(port)
                break
        else:
            outcome.schedules.append((ran.schedule, [port]))
            outcome.records.append(ran.comm)
    return outcome


# --- The report ---


def amount(num_bytes: float) -> str:
    """
    >>> amount(512), amount(1536), amount(3 << 29)
    ('512 B', '1.50 KiB', '1.50 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "broadcast": "BC"}


def counts(tally: Tally) -> str:
    return " ".join(f"{count} {SHORT[kind]}" for kind, count in tally.counts.items()) or "-"


def rows_of(outcome: Outcome) -> list[Row]:
    rows: list[Row] = []
    for (_, ports), pair in zip(outcome.schedules, outcome.comparisons, strict=True):
        for name, found in zip(PASSES[: 1 + outcome.program.trains], pair, strict=False):
            met = found.is_met and len(outcome.schedules) == 1
            rows.append(
                (
                    *((outcome.program.name, str(outcome.size)) if not rows else ("", "")),
                    name,
                    counts(found.person),
                    amount(found.person.bytes),
                    counts(found.ours),
                    amount(found.ours.bytes),
                    f"{found.of_bytes:.2f}",
                    f"{found.of_collectives:.2f}",
                    f"{counts(found.person_small)} : {counts(found.ours_small)}",
                    "all" if len(ports) == len(PORTS) else ", ".join(ports),
                    "pass" if met else "MISS",
                )
            )
    for port in outcome.errors:
        name = (outcome.program.name, str(outcome.size)) if not rows else ("", "")
        rows.append((*name, "raised", *("",) * 7, port, "MISS"))
    return rows


def summary(outcomes: list[Outcome]) -> str:
    met = sum(outcome.is_met for outcome in outcomes)
    return f"{met} of {len(outcomes)} programs and sizes communicate at most what the person would."


def missing(needs: str) -> bool:
    return bool(needs) and find_spec(needs) is None


def write_report(table: Table, outcomes: list[Outcome], left_out: list[str]) -> Path:
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"schedules-{today}.md"
    errors = [f"- {o.program.name}, {o.size}, {port}: {text}" for o in outcomes for port, text in o.errors.items()]
    text = [
        f"# Schedules, {today}\n",
        f"`python benchmarks/schedules.py --write`, Python {platform.python_version()}, torch {torch.__version__}.\n",
        "AR all_reduce, AG all_gather, RS reduce_scatter, A2A all_to_all. Bytes are what one rank sends in a ring. "
        "Small: the person's : ours.\n",
        f"{summary(outcomes)}\n",
        *([f"Left out: {', '.join(left_out)}.\n"] if left_out else []),
        table.markdown(),
        *(["## Raised\n", *errors, ""] if errors else []),
    ]
    path.write_text("\n".join(text))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", choices=PORTS, help="run on this port only")
    parser.add_argument("--only", default="", help="the programs whose name contains this")
    parser.add_argument("--small", action="store_true", help="only the sizes that the tests run")
    parser.add_argument("--explain", action="store_true", help="show every collective of those that miss")
    parser.add_argument("--write", action="store_true", help="write a dated report")
    options = parser.parse_args()

    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, 230)
    chosen = [program for program in PROGRAMS if options.only.lower() in program.name.lower()]
    left_out = [f"{program.name} ({program.needs} is missing)" for program in chosen if missing(program.needs)]
    ports = (options.port,) if options.port else PORTS
    outcomes = [
        measure(program, size, ports)
        for program in chosen
        if not missing(program.needs)
        for size in program.sizes
        if (size.is_tiny or not options.small) and any(can_run(port, program, size) for port in ports)
    ]
    table = Table("Schedules", COLUMNS, [row for outcome in outcomes for row in rows_of(outcome)])
    table.print(console)
    for outcome in outcomes:
        for port, error in outcome.errors.items():
            console.print(f"{outcome.program.name}, {outcome.size}, {port}: {error}", style="yellow", markup=False)
        if options.explain and not outcome.is_met:
            console.print(f"{outcome.program.name}, {outcome.size}", *outcome.records, sep="\n", markup=False)
    for name in left_out:
        console.print(f"left out: {name}", style="yellow", markup=False)
    console.print(summary(outcomes))
    if options.write:
        path = write_report(table, outcomes, left_out)
        console.print(f"written: {path.relative_to(Path(__file__).parent.parent)}")
    sys.exit(not all(outcome.is_met for outcome in outcomes))


if __name__ == "__main__":
    main()
