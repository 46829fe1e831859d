"""Call every operator of torch with bad input, in all layouts, and compare what it raises with plain torch.

Bad calls are torch's own (`error_inputs` of `op_db`), its samples with one thing spoilt (a number, a size, a dtype, an
index), and calls with bad data on one rank only. Wherever the inputs lie, the error must be torch's, of the same type
and in the same words; all ranks must raise it alike; nothing may be communicated before, unless the error is one of
data; and no argument may have been written to.
"""

from __future__ import annotations

import argparse
import platform
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.debug import CommDebugMode
from shardwise.dispatch import call, clear_cache
from shardwise.dispatch.fallback import Gathered
from shardwise.layout import Mesh
from shardwise.proof.bad_data import BAD_DATA
from shardwise.proof.coverage import Assignment, assignments, mesh_of, show_assignment
from shardwise.proof.placing import place
from shardwise.proof.pool import Outcome, run_all
from shardwise.proof.progress import Progress
from shardwise.proof.report import Table, page, print_tables
from shardwise.proof.results import Store
from shardwise.proof.samples import NoSamplesError, Operator, Sample, operator, operators, replaced, seeded
from shardwise.proof.spoiling import spoilt
from shardwise.proof.together import RanksApart, line, ranks_compared, shards

DATA = "data: "
"""What the names of calls with bad data begin with."""

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
"""What may become of a bad call. From "words" on it is a problem."""

PROBLEMS = ("words", "type", "silent", "apart", "told", "wrote")

EXCUSES: dict[str, str] = {
    r"InPlaceError: .* instead of": "a write that the layout does not allow is refused first",
    r"refer to a single memory location": "out= that overlaps an input: results are complete before they are written",
    r"invalid combination of arguments - got": "torch names the type of argument that it was given",
    r"a view of a leaf Variable": "the simulator takes an alias of rank 0's shard",
    r"embedding_bag: no error instead of IndexError: index": "offsets of bags that decrease: torch reads elsewhere",
    r"could not convert to type <class": "a number in a tensor, which torch reads later",
    r"^(pca|svd)_lowrank: .* before": "the sample multiplies matrices before it calls the operator",
    r"^(_unsafe_masked_index|nn.functional.linear_cross).* before": "it has no trace: torch looks at the whole",
    r"\[-?nan, -?nan\] is not finite": "the sign of a NaN",
    r"failed to converge .*error code": "LAPACK's error code for NaNs depends on where they lie in memory",
    r"most recent call first": "the text holds a stack of C++ frames",
}
"""Differences that stay, by name and what the two errors look like, with the reason."""

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


@dataclass(frozen=True)
class Bad:
    """A call that torch refuses: what it says, and whether the data is to blame, or already shapes and numbers are."""

    function: Callable[..., Any]
    sample: Sample
    error: Exception
    of_data: bool
    writes: bool  # before it refuses


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    detail: str = ""


# The calls


def bad_calls(name: str, settings: Settings) -> Iterator[Bad]:
    """The bad calls of an operator: torch's own, and spoilt samples; of these, one for each error."""
    if name.startswith(DATA):
        function, tensors = BAD_DATA[name.removeprefix(DATA)]
        bad = refused(function, Sample(0, tensors))
        assert bad is not None, f"torch does not refuse {name}"
        yield replace(bad, of_data=True)
        return
    op = operator(name)
    for sample in _given(op, settings.seed):
        if (bad := refused(op.function, sample)) is not None:
            yield bad
    seen: set[str] = set()
    for sample in _spoilt(op, settings):
        bad = refused(op.function, sample)
        if bad is not None and (text := re.sub(r"\d+", "#", str(bad.error))) not in seen:
            seen.add(text)
            yield bad


def _given(op: Operator, seed: int) -> list[Sample]:
    if op.info.error_inputs_func is None:
        return []
    with seeded(op.name, seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = [bad.sample_input for bad in op.info.error_inputs("cpu", set_seed=False)]
    return [Sample(i, (bad.input, *bad.args), dict(bad.kwargs)) for i, bad in enumerate(given)]


def _spoilt(op: Operator, settings: Settings) -> Iterator[Sample]:
    for sample in op.samples(settings.samples, settings.seed):
        if _can_shard(sample):
            yield from spoilt(sample)


def _can_shard(sample: Sample) -> bool:
    return bool(sample.tensors) and all(
        x.layout is torch.strided and x.device.type == "cpu" and not x.is_quantized for x in sample.tensors
    )


def refused(function: Callable[..., Any], sample: Sample) -> Bad | None:
    """A call that torch refuses, if it does, in the same words each time."""
    if not _can_shard(sample):
        return None
    images = [_copy(x) for x in sample.tensors]
    first, again = _error(function, sample, images), _error(function, sample, [_copy(x) for x in sample.tensors])
    if first is None or str(first) != str(again):
        return None
    others = [
        _error(function, sample, [image(x).requires_grad_(x.requires_grad) for x in sample.tensors])
        for image in (torch.zeros_like, torch.ones_like, _noise)
    ]
    of_data = any(str(other) != str(first) for other in others)
    return Bad(function, sample, first, of_data, writes=not all(map(_same, sample.tensors, images)))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _noise(x: Tensor) -> Tensor:
    """Other numbers; as matrices they are regular."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros_like(x)
    return torch.linspace(0.1, 0.9, x.numel(), dtype=torch.float64).reshape(x.shape).cos().pow(9).to(x.dtype)


def _error(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _call(function, sample, images)
    except Exception as error:
        return error.with_traceback(None)
    return None


def _call(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Any:
    by_id = {id(x): image for x, image in zip(sample.tensors, images, strict=True)}
    with seeded("call", 0):
        return function(*replaced(sample.args, by_id), **replaced(sample.kwargs, by_id))


# Judging


def judge(bad: Bad, mesh: Mesh, way: Assignment) -> Verdict:
    """Make a bad call with its inputs laid out so."""
    inputs = [place(x, mesh, where, i) for i, (x, where) in enumerate(zip(bad.sample.tensors, way, strict=True))]
    before = [shard.detach().clone() for x in inputs for shard in shards(x)]
    with warnings.catch_warnings(), CommDebugMode() as comm, ranks_compared():
        warnings.simplefilter("ignore")
        try:
            _call(bad.function, bad.sample, inputs)
        except RanksApart as error:
            return Verdict("apart", str(error))
        except Exception as error:
            raised: Exception = error
        else:
            return Verdict("silent", f"no error instead of {line(bad.error)}")
    if not isinstance(raised, type(bad.error)):
        return Verdict("type", f"{line(raised)} instead of {line(bad.error)}")
    if str(raised).replace("DTensor", "Tensor") != str(bad.error):  # torch names the type it was given
        return Verdict("words", f"{line(raised)} instead of {line(bad.error)}")
    after = [shard.detach() for x in inputs for shard in shards(x)]
    if not bad.of_data and not bad.writes and not all(map(_same, before, after)):
        return Verdict("wrote", line(raised))
    if not comm.comms or (bad.of_data and all(c.kind == "all_reduce" and c.bytes <= CHECK for c in comm.comms)):
        return Verdict("same")
    if bad.of_data or comm.fallbacks or _is_gathered():
        return Verdict("moved" if bad.of_data else "late")
    return Verdict("told", f"{comm.get_comm_counts()} before {line(raised)}")


def _is_gathered() -> bool:
    """Whether some call since the cache was cleared could not be traced: then torch is asked when all is gathered."""
    plans: list[Any] = []
    for kept in call._plans.values():
        plans += kept.plans.values() if isinstance(kept, call.Variants) else [kept]
    return any(isinstance(getattr(plan, "plan", plan), Gathered) for plan in plans)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)  # torch compares no more than 64 dims
    return bool(((a == b) | ((a != a) & (b != b))).all())


def excuse(name: str, verdict: Verdict) -> Verdict:
    """A verdict, but for a difference that is known and has a reason."""
    if verdict.kind not in PROBLEMS:
        return verdict
    found = [reason for pattern, reason in EXCUSES.items() if re.search(pattern, f"{name}: {verdict.detail}")]
    return Verdict("excused", found[0]) if found else verdict


def try_operator(name: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Try one operator; yields, for each bad call, what became of it."""
    for bad in bad_calls(name, settings):
        clear_cache()  # a plan may hold for all dtypes, and torch is asked when it is made
        found: dict[str, Any] = {"kinds": Counter(), "problems": [], "excuses": Counter()}
        large = sum(x.numel() for x in bad.sample.tensors) > LARGE
        for shape, most in (((2,), settings.layouts), ((2, 2), settings.spread)):
            chance = random.Random(settings.seed)
            for way in assignments(bad.sample.tensors, len(shape), 1 if large else most, chance):
                verdict = excuse(name, judge(bad, mesh_of(shape), way))
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
    parser.add_argument("--ops", metavar="PATTERN", help="only operators whose whole name matches this expression")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="samples of each operator to spoil (1)")
    parser.add_argument("--layouts", type=int, default=12, metavar="N", help="layouts of each call on one axis (12)")
    parser.add_argument("--spread", type=int, default=3, metavar="N", help="layouts of each call on a 2×2 mesh (3)")
    parser.add_argument("--seed", type=int, default=0, help="another choice of data and layouts (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 0: this one (2)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds a call may take (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as they come")
    parser.add_argument("--write-report", type=Path, metavar="FILE", help="write the results to FILE as a dated page")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def names_of(pattern: str | None = None, stratum: tuple[int, int] = (0, 1)) -> list[str]:
    """Operators, and calls with bad data, whose whole name matches; of those, the k-th of every n."""
    data = [name for name in (DATA + call for call in BAD_DATA) if pattern is None or re.fullmatch(pattern, name)]
    return [*(op.name for op in operators(pattern) if op.name not in UNSAFE), *data][stratum[0] :: stratum[1]]


def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if every bad call raises what torch raises, but for what is excused."""
    settings = Settings(given.samples, given.layouts, given.spread, given.seed)
    try:
        names = names_of(given.ops)
    except NoSamplesError as error:
        print(error, file=sys.stderr)
        return 2
    if not names:
        print(f"no operator is called {given.ops}", file=sys.stderr)
        return 2
    store = Store(given.json, asdict(settings), kind=Result)
    results = measure(names, settings, store=store, jobs=given.jobs, timeout=given.timeout, quiet=given.quiet)
    print_tables(tables(results))
    if given.write_report is not None:
        about = (
            f"Python {platform.python_version()}, torch {torch.__version__}. Bad calls of every operator of op_db: "
            f"torch's own, its samples with one thing spoilt ({settings.samples} of each), and calls with bad data on "
            f"one rank only; of each, up to {settings.layouts} layouts on two ranks and {settings.spread} on 2×2. The "
            f"error is compared with plain torch's by type and text; besides, what was communicated before it, whether "
            f"all ranks raise it, and whether anything was written."
        )
        title = f"Bad input against plain torch, {date.today()}"
        given.write_report.write_text(page(tables(results), title, about))
    return 1 if any(result.problems for result in results) else 0


def measure(
    names: Sequence[str],
    settings: Settings,
    *,
    store: Store | None = None,
    jobs: int = 0,
    timeout: float = 120.0,
    quiet: bool = True,
) -> list[Result]:
    """Try the named operators; the results are in their order."""
    done: dict[str, Result] = {}
    with Progress("errors", len(names), quiet=quiet) as progress:
        for outcome in run_all(try_operator, names, settings, jobs=jobs, timeout=timeout):
            result = done[outcome.name] = result_of(outcome)
            progress.advance(f"{outcome.name} {result.problems[0]['kind'] if result.problems else ''}")
            if store is not None:
                store.add(result)
    return [done[name] for name in names]
