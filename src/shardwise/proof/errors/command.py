"""Call every operator of torch with bad input, in all layouts, and compare what it raises with plain torch.

Bad calls are torch's own (`error_inputs` of `op_db`), its samples with one thing spoilt (a number, a size, a dtype, an
index), and calls with bad data on one rank only. Wherever the inputs lie, the error must be torch's, of the same type
and in the same words; all ranks must raise it alike; nothing may be communicated before, unless the error is one of
data; and no argument may have been written to.
"""

from __future__ import annotations

import argparse
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.debug import CommDebugMode
from shardwise.dispatch import clear_cache
from shardwise.dispatch.planning.fallback import Gathered
from shardwise.errors import ShardwiseError
from shardwise.layout import Mesh
from shardwise.proof.coverage.command import Assignment, assignments, mesh_of, show_assignment
from shardwise.proof.errors.bad_calls import DATA, Bad, bad_calls, call, same_values
from shardwise.proof.errors.bad_data import BAD_DATA
from shardwise.proof.errors.excuses import reason_for
from shardwise.proof.kit.command import (
    add_run_arguments,
    count,
    finish,
    how_to_run,
    may_not_begin,
    pattern,
    run_tasks,
    some,
    versions,
)
from shardwise.proof.kit.placing import place
from shardwise.proof.kit.pool import Outcome
from shardwise.proof.kit.report import Table, page
from shardwise.proof.kit.samples import operators
from shardwise.proof.kit.together import RanksApart, line, ranks_compared, shards

CHECK = 16
"""Bytes that ranks may exchange to agree on whether data is bad."""

LARGE = 100_000
"""Calls with more elements are tried in two layouts only."""

KINDS: dict[str, str] = {
    "same": "the same error, and nothing moved but a number to agree on it",
    "moved": "the same error, of data that had to be moved to be looked at",
    "late": "the same error, after gathering: torch's function cannot be traced, and looks itself",
    "excused": "an error that cannot be the same, for a reason that is listed",
    "words": "in other words",
    "type": "another type of error",
    "silent": "no error",
    "apart": "ranks do not raise alike",
    "told": "communicated before an error that all ranks could see",
    "wrote": "wrote to an argument before an error that could be seen",
}
"""What may become of a bad call."""

PROBLEMS = tuple(kind for kind in KINDS if kind not in ("same", "moved", "late", "excused"))

LONG = 120
"""Letters of a call that are kept to describe it."""

UNSAFE = ("_segment_reduce.lengths", "_segment_reduce.offsets")
"""Operators that crash for some bad input."""


@dataclass(frozen=True)
class Settings:
    """What is tried of each operator. The same settings try the same calls."""

    samples: int = 1
    layouts: int = 12
    spread: int = 3
    seed: int = 0


# Judging


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a bad call, and if that is a problem, what it looks like."""

    kind: str
    detail: str = ""


def judge(bad: Bad, mesh: Mesh, way: Assignment) -> Verdict:
    """Make a bad call with its inputs laid out so."""
    inputs = [place(x, mesh, where, i) for i, (x, where) in enumerate(zip(bad.sample.tensors, way, strict=True))]
    before = [shard.detach().clone() for x in inputs for shard in shards(x)]
    with warnings.catch_warnings(), CommDebugMode() as comm, ranks_compared():
        warnings.simplefilter("ignore")
        try:
            call(bad.function, bad.sample, inputs)
        except RanksApart as error:
            return Verdict("apart", str(error))
        except Exception as error:
            raised: Exception = error
        else:
            return Verdict("silent", f"no error instead of {line(bad.error)}")
    after = [shard.detach() for x in inputs for shard in shards(x)]
    if not bad.writes and not all(map(same_values, before, after)):
        return Verdict("wrote", line(raised))
    moved = "" if bad.of_data or not comm.comms or _is_of_the_whole(raised) else f"{comm.get_comm_counts()} before "
    if not isinstance(raised, type(bad.error)):
        return Verdict("type", f"{moved}{line(raised)} instead of {line(bad.error)}")
    if said(raised) != said(bad.error) and not isinstance(raised, ShardwiseError):  # ours have their own words
        return Verdict("words", f"{moved}{line(raised)} instead of {line(bad.error)}")
    if moved:
        return Verdict("told", f"{moved}{line(raised)}")
    if not comm.comms or (bad.of_data and all(c.kind == "all_reduce" and c.bytes <= CHECK for c in comm.comms)):
        return Verdict("same")
    return Verdict("moved" if bad.of_data else "late")


def said(error: Exception) -> str:
    """What an error says. Torch names the type of argument it was given, and sometimes where in C++ it comes from."""
    return re.sub("!?DTensor!?|!Tensor!", "Tensor", str(error).split("Exception raised from")[0])


def _is_of_the_whole(error: Exception) -> bool:
    """Whether torch's own function raised it, given all: a call that cannot be traced is gathered first."""
    return any(frame.f_code is Gathered.__call__.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def excused(name: str, verdict: Verdict) -> Verdict:
    """A verdict, but for a difference that is known and has a reason."""
    if verdict.kind not in PROBLEMS:
        return verdict
    reason = reason_for(name, verdict.kind, verdict.detail)
    return verdict if reason is None else Verdict("excused", reason)


def try_operator(name: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Try one operator; yields, for each bad call, what became of it."""
    for bad in bad_calls(name, settings.samples, settings.seed):
        clear_cache()  # a plan may hold for all dtypes, and torch is asked when it is made
        found: dict[str, Any] = {"kinds": Counter(), "problems": [], "excuses": Counter()}
        large = sum(x.numel() for x in bad.sample.tensors) > LARGE
        for shape, most in (((2,), settings.layouts), ((2, 2), settings.spread)):
            chance = random.Random(settings.seed)
            for way in assignments(bad.sample.tensors, len(shape), 1 if large else most, chance):
                verdict = excused(name, judge(bad, mesh_of(shape), way))
                found["kinds"][verdict.kind] += 1
                if verdict.kind == "excused":
                    found["excuses"][verdict.detail] += 1
                if verdict.kind in PROBLEMS:
                    where = f"{str(bad.sample)[:LONG]} {show_assignment(way)[:LONG]}"
                    found["problems"].append({"kind": verdict.kind, "call": where, "detail": verdict.detail})
        yield found


# The results


@dataclass
class Result:
    """What became of the bad calls of one operator."""

    name: str
    calls: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    excuses: dict[str, int] = field(default_factory=dict)
    problems: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """What happened first, if anything bad did."""
        return self.problems[0]["kind"] if self.problems else ""


def result_of(outcome: Outcome) -> Result:
    kinds: Counter[str] = Counter()
    excuses: Counter[str] = Counter()
    problems: dict[tuple[str, str], dict[str, Any]] = {}
    for part in outcome.parts:
        kinds.update(part["kinds"])
        excuses.update(part["excuses"])
        for problem in part["problems"]:
            key = (problem["kind"], re.sub(r"\d+", "#", problem["detail"].split(" before ")[-1]))
            problems.setdefault(key, {**problem, "count": 0})["count"] += 1
    if outcome.failure is not None:
        problems["type", ""] = {"kind": "type", "call": "", "detail": outcome.failure, "count": 1}
    return Result(
        outcome.name,
        len(outcome.parts),
        dict(kinds),
        dict(excuses),
        list(problems.values()),
        round(outcome.seconds, 2),
    )


def tables(results: Sequence[Result]) -> list[Table]:
    """Title, column names and rows of every table that has rows."""
    kinds: Counter[str] = sum((Counter(result.kinds) for result in results), Counter())
    excuses: Counter[str] = sum((Counter(result.excuses) for result in results), Counter())
    problems = [
        (result.name, problem["kind"], str(problem["count"]), f"{problem['call']}: {problem['detail']}")
        for result in results
        for problem in result.problems
    ]
    tried = sum(1 for result in results if result.calls)
    summary = [("operators", f"{tried} of {len(results)} have bad calls: {sum(r.calls for r in results)} in all")]
    summary += [(f"{kinds[kind]} {kind}", text) for kind, text in KINDS.items() if kinds[kind]]
    made: list[Table] = [
        ("excused", ("reason", "calls"), [(reason, str(count)) for reason, count in excuses.most_common()]),
        ("problems", ("operator", "kind", "calls", "the first"), problems),
        ("bad input", ("", ""), summary),
    ]
    return [table for table in made if table[2]]


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", type=pattern, metavar="PATTERN", help="only operators whose whole name matches this expression"
    )
    parser.add_argument("--samples", type=count, default=1, metavar="N", help="samples of each operator to spoil (1)")
    parser.add_argument("--layouts", type=count, default=12, metavar="N", help="layouts of each call on one axis (12)")
    parser.add_argument("--spread", type=count, default=3, metavar="N", help="layouts of each call on a 2×2 mesh (3)")
    parser.add_argument("--seed", type=int, default=0, help="another choice of data and layouts (0)")
    add_run_arguments(parser, timed="a call")


def names_of(pattern: str | None = None, stratum: tuple[int, int] = (0, 1)) -> list[str]:
    """Operators, and calls with bad data, whose whole name matches; of those, the k-th of every n."""
    data = [name for name in (DATA + call for call in BAD_DATA) if pattern is None or re.fullmatch(pattern, name)]
    return [*(op.name for op in operators(pattern) if op.name not in UNSAFE), *data][stratum[0] :: stratum[1]]


@may_not_begin
def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if every bad call raises what torch raises, but for what is excused."""
    settings = Settings(given.samples, given.layouts, given.spread, given.seed)
    names = some(names_of(given.ops, given.stratum), given)
    results = measure(names, settings, **how_to_run(given, asdict(settings), Result))
    about = (
        f"{versions()} Bad calls of every operator of op_db: torch's own, its samples with one thing spoilt "
        f"({settings.samples} of each), and calls with bad data on one rank only; of each, up to {settings.layouts} "
        f"layouts on two ranks and {settings.spread} on 2×2. The error is compared with plain torch's by type and "
        f"text; besides, what was communicated before it, whether all ranks raise it, and whether anything was written."
    )
    made = tables(results)
    finish(given, made, "Bad input against plain torch", lambda title: page(made, title, about))
    return 1 if any(result.problems for result in results) else 0


def measure(names: Sequence[str], settings: Settings, **how: Any) -> list[Result]:
    """Try the named operators; the results are in their order. `how`: as `run_tasks` takes it."""
    return run_tasks("errors", try_operator, names, settings, result_of, **how)
