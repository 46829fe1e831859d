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
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardwise.comm import simulate
from shardwise.proof.fuzz.draw import mesh_of
from shardwise.proof.fuzz.families import draw
from shardwise.proof.fuzz.judge import FAILURES, HUNG, INVALID, KINDS, RAISED, RIGHT, Verdict, head, judge
from shardwise.proof.fuzz.program import HEADER, Program
from shardwise.proof.fuzz.ranks import START, Worlds
from shardwise.proof.fuzz.shrink import shrunk
from shardwise.proof.kit import results
from shardwise.proof.kit.command import How, add_run_arguments, count, finish, how_to_run, run_tasks
from shardwise.proof.kit.pool import run_all
from shardwise.proof.kit.report import Table

RANKS = (2, 4)
"""How many real ranks programs run on."""
TOLD = 300
"""Letters of a failure that are kept."""
PATIENCE, TRIES = 10.0, 100
"""Seconds that a program has that is made small on real ranks, and how many are tried: each that hangs takes all."""
SHRINKING = 1800.0
"""Seconds that making a program small may take."""

Judge = Callable[[Program], Verdict]

# Running


@dataclass
class Result(results.Result):
    """What became of a program, "S:N" or "S:N on 2 ranks"."""

    kind: str = ""
    calls: int = 0
    line: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> str:
        return "" if self.kind == RIGHT else self.kind

    def ended(self, why: str, num_parts: int) -> None:
        """A process that dies before the program was drawn was running torch alone."""
        self.kind, self.detail = (HUNG, why) if num_parts else (INVALID, f"while torch alone ran it: {why}")


def drawn(name: str) -> Program:
    seed, number = map(int, name.split()[0].split(":"))
    return draw(seed, number)


def try_program(name: str, judged: Judge) -> Iterator[Result]:
    """Draw a program and judge it, as a task: first it says that it was drawn, then what became of it."""
    program = drawn(name)
    yield Result(name, calls=len(program.parts))
    verdict = judged(program)
    yield Result(name, verdict.kind, 0, line_of(program, verdict), verdict.detail[:TOLD])


def line_of(program: Program, verdict: Verdict) -> str:
    if verdict.kind == RIGHT:
        return ""
    return program.parts[verdict.at].text if 0 <= verdict.at < len(program.parts) else "the end"


def in_simulator(program: Program) -> Verdict:
    return judge(program, simulate(program.mesh))


def on_ranks(names: Sequence[str], how: How) -> list[Result]:
    """Run programs on real ranks: as many at a time as there may be processes for."""
    found: list[Result] = []
    for size in RANKS if names else ():
        mine = [f"{name} on {size} ranks" for name in names if _num_ranks(name) == size]
        more = replace(how, jobs=-(-how.jobs // size), timeout=START + how.timeout)
        with TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as place, closing(Worlds(place)) as worlds:
            judged = partial(worlds.judge, timeout=how.timeout)
            found += run_tasks(f"fuzz on {size} ranks", try_program, mine, judged, Result, more)
    return found


def _num_ranks(name: str) -> int:
    seed, number = map(int, name.split(":"))
    return torch.Size(mesh_of(seed, number)).numel()


# Making small


def smallest(
    program: Program, verdict: Verdict, judged: Judge = in_simulator, *, most: int = 2000
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
        return head(verdict.detail)[:60]
    return " ".join(re.findall("None|replicas|after|requires_grad", verdict.detail))


def minimal_text(name: str) -> str:
    """A program that fails, made small, with what is wrong with it: in the simulator, if it shows there."""
    program = drawn(name)
    with closing(Worlds()) as worlds:
        ways: list[tuple[Judge, int]] = [(in_simulator, 2000)]
        if "ranks" in name:
            ways.append((partial(worlds.judge, timeout=PATIENCE), TRIES))
        for judged, most in ways:
            verdict = judged(program)
            if verdict.kind not in (RIGHT, INVALID):
                small, verdict = smallest(program, verdict, judged, most=most)
                return f"# {name}: {verdict.kind}: {verdict.detail}\n{small.body}"
    return f"# {name}: {verdict.kind}, run by itself\n{program.body}"


def make_small(name: str, settings: None) -> Iterator[str]:
    """As a task: it may end its process."""
    yield minimal_text(name)


def texts_of(names: Sequence[str], jobs: int) -> list[str]:
    """Programs with problems, made small."""
    texts = {}
    for outcome in run_all(make_small, names, None, jobs=jobs, timeout=SHRINKING):
        texts[outcome.name] = (outcome.parts or [f"# {outcome.name}: not made small: {outcome.failure}"])[0]
    return [texts[name] for name in names]


def show(name: str, *, real: bool, timeout: float) -> int:
    """Print one program, run it, and print what is wrong with it, if anything is."""
    program = drawn(name)
    print(program.text)
    with closing(Worlds()) as worlds:
        verdict = worlds.judge(program, timeout) if real else in_simulator(program)
    at = f" at: {line_of(program, verdict)}" if verdict.kind != RIGHT else ""
    print(f"\n# {verdict.kind}{at}\n# {verdict.detail}", flush=True)
    if verdict.kind != RIGHT:
        print(f"\n{minimal_text(f'{name} on ranks' if real else name)}")
    return 1 if verdict.kind in FAILURES else 0


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, partial(count, least=0)
    add("--programs", type=number, default=2000, metavar="N", help="programs on the simulator (2000)")
    add("--gloo", type=number, default=0, metavar="N", help="of these, how many also on real ranks (0)")
    add("--seed", type=int, default=0, help="other programs (0)")
    add("--first", type=number, default=0, metavar="N", help="the number of the first program (0)")
    add("--program", type=_program, metavar="S:N", help="print and run only program N of seed S")
    add("--real", action="store_true", help="with --program: on real ranks")
    add("--shrink", type=number, default=20, metavar="N", help="kinds of problem to make small (20)")
    add_run_arguments(parser, timed="a program")


def _program(text: str) -> str:
    if not re.fullmatch(r"\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not S:N, a seed and a number")
    return text


def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if no program is wrong or hangs."""
    if given.program is not None:
        return show(given.program, real=given.real, timeout=given.timeout)
    how = how_to_run(given, {"seed": given.seed, "timeout": given.timeout}, Result)
    began = time.monotonic()
    most = max(given.programs, given.gloo)
    names = [f"{given.seed}:{given.first + number}" for number in range(most)]
    simulated = run_tasks("fuzz", try_program, names[: given.programs], in_simulator, Result, how)
    real = on_ranks(names[: given.gloo], how)
    found = classes_of([*simulated, *real])
    small = texts_of([first.name for first, _ in found[: given.shrink] if first.kind != INVALID], given.jobs)
    print("\n\n".join(small))
    about = (
        f"Programs {given.first} to {given.first + most - 1} of seed {given.seed}, in "
        f"{time.monotonic() - began:.0f} s; each value, gradient and replica compared with one device."
    )
    listing = "".join(f"\n```python\n{text}\n```\n" for text in ([HEADER, *small] if small else []))
    finish(given, tables(simulated, real, found), "Random programs against one device", about, listing)
    return 1 if any(result.kind in FAILURES for result in (*simulated, *real)) else 0


def classes_of(found: Sequence[Result]) -> list[tuple[Result, int]]:
    """Problems of one kind: the first of them, and how many there are; the worst first."""
    classes: dict[Any, list[Result]] = {}
    for result in found:
        if result.kind != RIGHT:
            classes.setdefault((result.kind, head(result.detail)), []).append(result)
    order = [*FAILURES, RAISED, INVALID]
    return sorted(((same[0], len(same)) for same in classes.values()), key=lambda c: (order.index(c[0].kind), -c[1]))


def tables(
    simulated: Sequence[Result], real: Sequence[Result], problems: Sequence[tuple[Result, int]]
) -> Sequence[Table]:
    summary: list[Sequence[str]] = []
    for where, found in (("simulator", simulated), ("Gloo ranks", real)):
        if found:
            counts = Counter(result.kind for result in found)
            seconds = sum(result.seconds for result in found)
            summary.append((where, f"{len(found)} programs, {sum(result.calls for result in found)} lines"))
            summary += [(f"{counts[kind]} {kind}", text) for kind, text in KINDS.items() if counts[kind]]
            summary.append(("time", f"{seconds:.0f} s of processes, {len(found) / max(seconds, 0.01):.1f} a second"))
    rows = [(first.kind, str(number), first.name, f"{first.line}: {first.detail}") for first, number in problems]
    return [("problems", ("kind", "programs", "the first", "what"), rows), ("random programs", ("", ""), summary)]
