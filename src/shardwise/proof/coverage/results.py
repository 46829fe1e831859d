"""What became of the calls of operators, and how it is told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.proof.coverage.judge import ROUNDED
from shardwise.proof.kit import results
from shardwise.proof.kit.report import Table, by_reason, share

NO_DTYPE = "takes no dtype that the CPU can compute with"
NO_SAMPLES = "torch has no samples of it"
VALUELESS = "draws random numbers, or leaves memory as it is: values not compared"

GRADIENTS = ("compared", "without values", "none", "refused by torch")
"""What gradients a call may have; "without values" are those of random calls."""


@dataclass
class Result(results.Result):
    """What became of the calls of one operator, or of those of one sample of it."""

    dtype: str = ""
    samples: int = 0
    random: int = 0  # samples whose values cannot be compared
    unusable: dict[str, int] = field(default_factory=dict)  # samples that were not tried, by the reason
    counts: dict[str, int] = field(default_factory=dict)  # calls, by what became of them and by what was compared
    strides: str = ""  # the first right call whose result has other strides than torch's
    problems: list[dict[str, Any]] = field(default_factory=list)  # the first of each kind, wrong ones first
    seconds: float = 0.0

    @property
    def note(self) -> str:
        """Why it was not tried."""
        if self.samples or self.counts:
            return ""
        return (
            NO_DTYPE if self.dtype == "None" else max(self.unusable, key=self.unusable.__getitem__, default=NO_SAMPLES)
        )

    @property
    def valueless(self) -> bool:
        """Whether no sample has a value to compare."""
        return 0 < self.samples == self.random

    @property
    def status(self) -> str:
        return self.problems[0]["kind"] if self.problems else ""

    @property
    def calls(self) -> int:
        return sum(self.counts.get(kind, 0) for kind in ("right", "refused", "raised", "wrong"))

    def add(self, part: Result) -> None:
        super().add(part)
        first: dict[Any, dict[str, Any]] = {}
        for problem in self.problems:  # those that differ in numbers only are one
            detail = re.sub(r"[\d.]+(e[-+]\d+)?", "#", problem["detail"].split(" as [")[0])
            first.setdefault((problem["kind"], problem["form"], detail), problem)
        self.problems = sorted(first.values(), key=lambda problem: problem["kind"] != "wrong")

    def ended(self, why: str, num_parts: int) -> None:
        problem = {"kind": "raised", "form": "function", "detail": why, "sample": num_parts}
        self.add(Result(self.name, counts={"raised": 1}, problems=[problem]))


def tables(results: Sequence[Result]) -> list[Table]:
    excluded = [(r.note or VALUELESS, r.name) for r in results if r.note or r.valueless]
    strides = [(r.name, str(r.counts["other strides"]), r.strides) for r in results if r.strides]
    return [
        ("not tried, or not compared by value", ("reason", "operators"), by_reason(excluded)),
        ("other strides than torch's", ("operator", "calls", "the first"), strides),
        ("problems", ("operator", "calls", "wrong", "raised", "the first"), problem_rows(results)),
        ("coverage", ("", ""), summary(results)),
    ]


def problem_rows(results: Sequence[Result]) -> list[tuple[str, str, str, str, str]]:
    """Operators with problems, the wrong ones first: name, calls, wrong, raised, and the first problem."""
    bad = sorted((r for r in results if r.problems), key=lambda r: (-r.counts.get("wrong", 0), r.name))
    return [
        (r.name, str(r.calls), str(r.counts.get("wrong", 0)), str(r.counts.get("raised", 0)), _first_problem(r))
        for r in bad
    ]


def _first_problem(result: Result) -> str:
    first = result.problems[0]
    where = f"{first['call']} {first['placements']}: " if "call" in first else ""
    return f"{'' if first['form'] == 'function' else first['form'] + ' '}{where}{first['detail']}"


def summary(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The run in a few lines."""
    tried = [result for result in results if not result.note]
    compared = [result for result in tried if not result.valueless]
    calls = sum((Counter(result.counts) for result in tried), Counter())
    forms = [key for key in calls if key.startswith("as ")]
    return [
        ("operators", f"{len(results)}, of which {len(compared)} are compared by value"),
        ("right throughout", share([r for r in compared if not r.problems], compared)),
        ("sometimes raised", share([r for r in compared if r.counts.get("raised")], compared)),
        ("sometimes wrong", share([r for r in compared if r.counts.get("wrong")], compared)),
        ("random or uninitialised", f"{len(tried) - len(compared)}, judged by shape, dtype and agreement of replicas"),
        ("calls", ", ".join(f"{calls[kind]} {kind}" for kind in ("right", "refused", "raised", "wrong"))),
        ("right as", ", ".join(f"{form.removeprefix('as ')} {calls[form]}" for form in forms)),
        ("their gradients", ", ".join(f"{calls[f'gradients {kind}']} {kind}" for kind in GRADIENTS)),
        ("of them", f"{calls[ROUNDED]} {ROUNDED}"),
        ("with a sharded input", f"{calls['ran sharded']} ran sharded, {calls['ran gathered']} gathered"),
        ("other strides than torch's", share([r for r in tried if r.strides], tried)),
        ("time", f"{sum(r.seconds for r in results):.0f} s of processes"),
    ]
