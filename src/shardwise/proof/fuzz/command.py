"""Run random programs on DTensors and on one device, and compare all values and gradients.

Programs are 5 to 25 calls on tensors in random layouts; number N of seed S is the same program everywhere, and
`--program S:N` prints it. They run on the simulator and on real ranks (Gloo). What fails is made as small as possible.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from shardwise.comm import simulate
from shardwise.proof.command import add_run_arguments, count, finish, how_to_run, may_not_begin, run_tasks, versions
from shardwise.proof.fuzz.draw import mesh_of
from shardwise.proof.fuzz.families import draw
from shardwise.proof.fuzz.judge import FAILURES, HUNG, INVALID, KINDS, RAISED, RIGHT, Verdict, judge
from shardwise.proof.fuzz.program import HEADER, Program
from shardwise.proof.fuzz.ranks import World
from shardwise.proof.fuzz.shrink import shrunk
from shardwise.proof.pool import Outcome
from shardwise.proof.report import Table, page

CHUNK = 25
"""Programs of one task."""
RANKS = (2, 4)
"""How many real ranks programs run on."""
TOLD = 300
"""Letters of a failure that are kept."""


@dataclass(frozen=True)
class Settings:
    """What is run. The same settings run the same programs."""

    seed: int = 0
    timeout: float = 60.0


# Running


def try_simulated(name: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Run the programs of a chunk in the simulator."""
    for number in _numbers(name):
        program = draw(settings.seed, number)
        yield described(settings.seed, number, program, judge(program, simulate(program.mesh)))


class OnRanks:
    """Runs the programs of a chunk on real ranks, of one number of them at a time."""

    def __init__(self) -> None:
        self.world = World(0)

    def __call__(self, name: str, settings: Settings) -> Iterator[dict[str, Any]]:
        size = int(name.split()[0])
        if size != self.world.size:
            self.world.close()
            self.world = World(size)
        for number in _numbers(name):
            if torch.Size(mesh_of(settings.seed, number)).numel() == size:
                program = draw(settings.seed, number)
                yield described(settings.seed, number, program, self.world.judge(program, settings.timeout))


def _numbers(name: str) -> range:
    first, last = name.split()[-1].split("-")
    return range(int(first), int(last) + 1)


def described(seed: int, number: int, program: Program, verdict: Verdict) -> dict[str, Any]:
    """What became of a program, in a form that is kept."""
    if verdict.kind == RIGHT:
        return {"kind": RIGHT, "calls": len(program.parts)}
    line = program.parts[verdict.at].text if 0 <= verdict.at < len(program.parts) else "the end"
    return {
        **{"kind": verdict.kind, "calls": len(program.parts), "program": f"{seed}:{number}", "line": line},
        **{"detail": verdict.detail[:TOLD], "class": verdict.head},
    }


@dataclass
class Result:
    """What became of a chunk of programs."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    lost: str = ""  # why some of them were not run
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """What happened, if anything bad did."""
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS if kind != RIGHT and self.counts.get(kind))


def result_of(outcome: Outcome) -> Result:
    counts = Counter(part["kind"] for part in outcome.parts)
    problems = [part for part in outcome.parts if part["kind"] != RIGHT]
    if outcome.failure is not None:  # the one after the last that it gave
        counts[HUNG] += 1
        number = _numbers(outcome.name)[len(outcome.parts)]
        told = {"kind": HUNG, "detail": outcome.failure, "class": outcome.failure, "line": "", "program": f"{number}"}
        problems.append(told)
    calls = sum(part["calls"] for part in outcome.parts)
    return Result(outcome.name, dict(counts), calls, problems, outcome.failure or "", round(outcome.seconds, 2))


# The results


def tables(simulated: Sequence[Result], real: Sequence[Result], classes: Sequence[Sequence[str]]) -> list[Table]:
    """Title, column names and rows of every table that has rows."""
    summary: list[Sequence[str]] = []
    for where, results in (("simulator", simulated), ("Gloo ranks", real)):
        counts: Counter[str] = sum((Counter(result.counts) for result in results), Counter())
        if results:
            seconds = sum(result.seconds for result in results)
            calls = sum(result.calls for result in results)
            summary.append((where, f"{counts.total()} programs, {calls} lines"))
            summary += [(f"{counts[kind]} {kind}", text) for kind, text in KINDS.items() if counts[kind]]
            summary.append(
                ("time", f"{seconds:.0f} s of processes, {counts.total() / max(seconds, 0.01):.1f} a second")
            )
    made: list[Table] = [
        ("problems", ("kind", "programs", "the first", "what"), classes),
        ("random programs", ("", ""), summary),
    ]
    return [table for table in made if table[2]]


def classes_of(results: Sequence[Result]) -> list[tuple[dict[str, Any], int]]:
    """Problems of one kind: the first of them, and how many there are; the worst first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        for problem in result.problems:
            found.setdefault((problem["kind"], problem["class"]), []).append(problem)
    order = [*FAILURES, RAISED, INVALID]
    return sorted(((same[0], len(same)) for same in found.values()), key=lambda c: (order.index(c[0]["kind"]), -c[1]))


def row(problem: dict[str, Any], number: int) -> tuple[str, ...]:
    return problem["kind"], str(number), problem["program"], f"{problem['line']}: {problem['detail']}"


# One program


def smallest(program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
    """The smallest program that fails in the simulator as this one does, and how it does."""

    def fails(candidate: Program) -> bool:
        found = judge(candidate, simulate(candidate.mesh))
        return found.kind == verdict.kind and _cause(found) == _cause(verdict)

    small = shrunk(program, fails)
    return small, judge(small, simulate(small.mesh))


def _cause(verdict: Verdict) -> str:
    """What shrinking must not change: the error; of wrong values, whether they are wrong or should not be."""
    if verdict.kind == RAISED:
        return verdict.head[:60]
    return " ".join(re.findall("None|replicas|after|requires_grad", verdict.detail))


def minimal_text(name: str) -> str:
    """A program that fails, made small, with what is wrong with it."""
    seed, number = map(int, name.split(":"))
    program = draw(seed, number)
    verdict = judge(program, simulate(program.mesh))
    if verdict.kind in (RIGHT, INVALID):
        return f"# {name}: {verdict.kind} in the simulator, run by itself\n{program.body}"
    small, how = smallest(program, verdict)
    return f"# {name}: {how.kind}: {how.detail}\n{small.body}"


def show(name: str, *, real: bool, timeout: float) -> int:
    """Print one program, run it, and print what is wrong with it, if anything is."""
    seed, number = map(int, name.split(":"))
    program = draw(seed, number)
    print(program.text)
    if real:
        world = World(torch.Size(program.mesh).numel())
        try:
            verdict = world.judge(program, timeout)
        finally:
            world.close()
    else:
        verdict = judge(program, simulate(program.mesh))
    at = f" at: {program.parts[verdict.at].text}" if 0 <= verdict.at < len(program.parts) else ""
    print(f"\n# {verdict.kind}{at}\n# {verdict.detail}")
    if verdict.kind != RIGHT:
        print(f"\n{minimal_text(name)}")
    return 1 if verdict.kind in FAILURES else 0


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    some = partial(count, least=0)
    parser.add_argument("--programs", type=some, default=2000, metavar="N", help="programs on the simulator (2000)")
    parser.add_argument("--gloo", type=some, default=0, metavar="N", help="of these, how many also on real ranks (0)")
    parser.add_argument("--seed", type=int, default=0, help="other programs (0)")
    parser.add_argument("--first", type=some, default=0, metavar="N", help="the number of the first program (0)")
    parser.add_argument("--program", type=_program, metavar="S:N", help="print and run only program N of seed S")
    parser.add_argument("--real", action="store_true", help="with --program: on real ranks")
    parser.add_argument("--shrink", type=some, default=20, metavar="N", help="kinds of problem to make small (20)")
    add_run_arguments(parser, timed="a program")


def _program(text: str) -> str:
    if not re.fullmatch(r"\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not S:N, a seed and a number")
    return text


def chunks(first: int, number: int) -> list[str]:
    """Names of the tasks that together run so many programs."""
    ends = range(first, first + number, CHUNK)
    return [f"{start}-{min(start + CHUNK, first + number) - 1}" for start in ends]


@may_not_begin
def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if no program is wrong or hangs."""
    if given.program is not None:
        return show(given.program, real=given.real, timeout=given.timeout)
    settings = Settings(given.seed, given.timeout)
    how = how_to_run(given, asdict(settings), Result)
    began = time.monotonic()
    names = chunks(given.first, given.programs)[given.stratum[0] :: given.stratum[1]]
    simulated = run_tasks("fuzz", try_simulated, names, settings, result_of, **how)
    real = on_ranks(chunks(given.first, given.gloo)[given.stratum[0] :: given.stratum[1]], settings, how)
    found = classes_of([*simulated, *real])
    made = tables(simulated, real, [row(problem, number) for problem, number in found])
    small = [minimal_text(problem["program"]) for problem, _ in found[: given.shrink] if problem["kind"] != HUNG]
    print("\n\n".join(small))
    about = (
        f"{versions()} Programs {given.first} to {given.first + given.programs - 1} of seed {given.seed}, in "
        f"{time.monotonic() - began:.0f} s; each value, gradient and replica compared with one device."
    )
    listing = "".join(f"\n```python\n{text}\n```\n" for text in ([HEADER, *small] if small else []))
    finish(given, made, "Random programs against one device", lambda title: page(made, title, about) + listing)
    return 1 if any(result.counts.get(kind) for result in (*simulated, *real) for kind in FAILURES) else 0


def on_ranks(parts: Sequence[str], settings: Settings, how: dict[str, Any]) -> list[Result]:
    """Run programs on real ranks, from this process, since those that share the work may not start others."""
    task = OnRanks()
    try:
        names = [f"{size} ranks {part}" for size in RANKS for part in parts]
        return run_tasks("fuzz on ranks", task, names, settings, result_of, **{**how, "jobs": 0})
    finally:
        task.world.close()
