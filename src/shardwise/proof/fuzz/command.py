"""Run random programs on DTensors and on one device, and compare all values and gradients.

Programs are 5 to 25 calls on tensors in random layouts; number N of seed S is the same program everywhere, and
`--program S:N` prints it. They run on the simulator and on real ranks (Gloo). What fails is made as small as possible.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardwise.comm import simulate
from shardwise.proof.fuzz.draw import mesh_of
from shardwise.proof.fuzz.families import draw
from shardwise.proof.fuzz.judge import FAILURES, HUNG, INVALID, KINDS, RAISED, RIGHT, Verdict, judge
from shardwise.proof.fuzz.program import HEADER, Program
from shardwise.proof.fuzz.ranks import START, Worlds
from shardwise.proof.fuzz.shrink import shrunk
from shardwise.proof.kit.command import (
    How,
    add_run_arguments,
    count,
    finish,
    how_to_run,
    may_not_begin,
    run_tasks,
    versions,
)
from shardwise.proof.kit.pool import Outcome, Task, run_all
from shardwise.proof.kit.report import Table, page

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
    """Run the programs of a task in the simulator."""
    return _tried(name, settings, in_simulator)


def in_simulator(program: Program) -> Verdict:
    return judge(program, simulate(program.mesh))


class OnRanks:
    """Runs the programs of tasks on real ranks. They are started by the process that is given the task."""

    def __init__(self, place: str) -> None:
        self.worlds = Worlds(place)

    def __call__(self, name: str, settings: Settings) -> Iterator[dict[str, Any]]:
        return _tried(name, settings, lambda program: self.worlds.judge(program, settings.timeout))


def _tried(name: str, settings: Settings, judged: Callable[[Program], Verdict]) -> Iterator[dict[str, Any]]:
    for number in programs_of(name, settings.seed):
        program = draw(settings.seed, number)
        yield {"kind": DRAWN}
        yield described(settings.seed, number, program, judged(program))


DRAWN = "drawn"
"""Told before a program is judged: a process that dies sooner was running torch alone."""


def programs_of(name: str, seed: int) -> list[int]:
    """The programs of a task: "0-24" all of them, "2 ranks 0-24" those on two ranks."""
    *where, ends = name.split()
    first, last = map(int, ends.split("-"))
    numbers = range(first, last + 1)
    return [n for n in numbers if not where or torch.Size(mesh_of(seed, n)).numel() == int(where[0])]


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
    rest: str = ""  # the task of those that were not run
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """What happened, if anything bad did."""
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS if kind != RIGHT and self.counts.get(kind))


def result_of(outcome: Outcome, seed: int) -> Result:
    parts = [part for part in outcome.parts if part["kind"] != DRAWN]
    problems = [part for part in parts if part["kind"] != RIGHT]
    rest = ""
    if outcome.failure is not None:
        numbers = programs_of(outcome.name, seed)
        number, *left = numbers[len(parts) :] or numbers[-1:]
        problems.append(_ended(f"{seed}:{number}", outcome))
        rest = " ".join([*outcome.name.split()[:-1], f"{left[0]}-{left[-1]}"]) if left else ""
    for problem in problems:
        problem["real"] = "ranks" in outcome.name
    counts = Counter(part["kind"] for part in parts if part["kind"] == RIGHT)
    counts.update(problem["kind"] for problem in problems)
    calls = sum(part["calls"] for part in parts)
    return Result(outcome.name, dict(counts), calls, problems, rest, round(outcome.seconds, 2))


def _ended(program: str, outcome: Outcome) -> dict[str, Any]:
    """What became of the program that ended a process, or kept it too long."""
    is_ours = bool(outcome.parts) and outcome.parts[-1]["kind"] == DRAWN
    why = f"{outcome.failure}" if is_ours else f"while torch alone ran it: {outcome.failure}"
    return {"kind": HUNG if is_ours else INVALID, "program": program, "line": "", "detail": why, "class": why}


def run_programs(title: str, task: Task, names: Sequence[str], settings: Settings, how: How) -> list[Result]:
    """The results of tasks. Where a program ended one, those that come after it are a task of their own."""
    results = run_tasks(title, task, names, settings, partial(result_of, seed=settings.seed), how)
    rest = [result.rest for result in results if result.rest]
    return results + (run_programs(title, task, rest, settings, how) if rest else [])


def on_ranks(parts: Sequence[str], settings: Settings, how: How) -> list[Result]:
    """Run programs on real ranks: as many at a time as there may be processes for."""
    found: list[Result] = []
    with TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as place:
        for size in RANKS if parts else ():
            task, names = OnRanks(place), [f"{size} ranks {part}" for part in parts]
            worlds = replace(how, jobs=-(-how.jobs // size), timeout=START + settings.timeout)
            try:
                found += run_programs(f"fuzz on {size} ranks", task, names, settings, worlds)
            finally:
                task.worlds.close()
    return found


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


def smallest(
    program: Program, verdict: Verdict, judged: Callable[[Program], Verdict] = in_simulator, *, most: int = 2000
) -> tuple[Program, Verdict]:
    """The smallest program that fails as this one does, and how it does."""

    def fails(candidate: Program) -> bool:
        found = judged(candidate)
        return found.kind == verdict.kind and _cause(found) == _cause(verdict)

    small = shrunk(program, fails, most=most)
    return small, judged(small)


def _cause(verdict: Verdict) -> str:
    """What shrinking must not change: the error; of wrong values, whether they are wrong or should not be."""
    if verdict.kind == RAISED:
        return verdict.head[:60]
    return " ".join(re.findall("None|replicas|after|requires_grad", verdict.detail))


def minimal_text(name: str, *, real: bool = False) -> str:
    """A program that fails, made small, with what is wrong with it: in the simulator, if it shows there."""
    seed, number = map(int, name.split(":"))
    program = draw(seed, number)
    verdict = in_simulator(program)
    if verdict.kind not in (RIGHT, INVALID):
        return _told(name, *smallest(program, verdict))
    worlds = Worlds()
    try:
        if real and (verdict := worlds.judge(program, PATIENCE)).kind not in (RIGHT, INVALID):
            judged = partial(worlds.judge, timeout=PATIENCE)
            return _told(f"{name} on real ranks", *smallest(program, verdict, judged, most=TRIES))
    finally:
        worlds.close()
    return f"# {name}: {verdict.kind}, run by itself\n{program.body}"


def _told(name: str, small: Program, how: Verdict) -> str:
    return f"# {name}: {how.kind}: {how.detail}\n{small.body}"


PATIENCE = 10.0
"""Seconds that a program has that is made small on real ranks, where each try that hangs takes all of them."""
TRIES = 100
SHRINKING = 1800.0
"""Seconds that making a program small may take."""


def make_small(name: str, settings: Settings) -> Iterator[str]:
    """Make a program small, as a task: it may end its process."""
    yield minimal_text(name.removesuffix(REAL), real=name.endswith(REAL))


REAL = " on ranks"


def texts_of(problems: Sequence[dict[str, Any]], settings: Settings, jobs: int) -> list[str]:
    """Programs with problems, made small."""
    names = [problem["program"] + (REAL if problem["real"] else "") for problem in problems]
    texts = {}
    for outcome in run_all(make_small, names, settings, jobs=jobs, timeout=SHRINKING):
        texts[outcome.name] = (outcome.parts or [f"# {outcome.name}: not made small: {outcome.failure}"])[0]
    return [texts[name] for name in names]


def show(name: str, *, real: bool, timeout: float) -> int:
    """Print one program, run it, and print what is wrong with it, if anything is."""
    seed, number = map(int, name.split(":"))
    program = draw(seed, number)
    print(program.text)
    worlds = Worlds()
    try:
        verdict = worlds.judge(program, timeout) if real else in_simulator(program)
    finally:
        worlds.close()
    at = f" at: {program.parts[verdict.at].text}" if 0 <= verdict.at < len(program.parts) else ""
    print(f"\n# {verdict.kind}{at}\n# {verdict.detail}", flush=True)
    if verdict.kind != RIGHT:
        print(f"\n{minimal_text(name, real=real)}")
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
    simulated = run_programs("fuzz", try_simulated, names, settings, how)
    real = on_ranks(chunks(given.first, given.gloo)[given.stratum[0] :: given.stratum[1]], settings, how)
    found = classes_of([*simulated, *real])
    made = tables(simulated, real, [row(problem, number) for problem, number in found])
    known = [problem for problem, _ in found[: given.shrink] if problem["kind"] != INVALID]
    small = texts_of(known, settings, given.jobs)
    print("\n\n".join(small))
    last = given.first + max(given.programs, given.gloo) - 1
    about = (
        f"{versions()} Programs {given.first} to {last} of seed {given.seed}, in "
        f"{time.monotonic() - began:.0f} s; each value, gradient and replica compared with one device."
    )
    listing = "".join(f"\n```python\n{text}\n```\n" for text in ([HEADER, *small] if small else []))
    finish(given, made, "Random programs against one device", lambda title: page(made, title, about) + listing)
    return 1 if any(result.counts.get(kind) for result in (*simulated, *real) for kind in FAILURES) else 0
