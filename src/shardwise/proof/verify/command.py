"""Judge every sharding rule by brute force: sound, if all it claims is true; complete, if all that is true is claimed.

*Sound*: every strategy that a rule lists gives the right value and gradient when it is forced. *Complete*: every way to
run the op itself on shards that gives the truth is among the strategies.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.proof.kit.command import (
    How,
    add_run_arguments,
    count,
    finish,
    how_to_run,
    pattern,
    run_tasks,
)
from shardwise.proof.kit.results import CannotRun
from shardwise.proof.kit.samples import Operator, operators, spread
from shardwise.proof.verify import catalogue
from shardwise.proof.verify.calls import DRAWN, UNWRITTEN, excluded, made_again, record
from shardwise.proof.verify.case import Case
from shardwise.proof.verify.extra import EXTRA, extra_calls
from shardwise.proof.verify.forced import Impossible, Trial, concrete, failure, has_terms, misfit, show_ins, trials
from shardwise.proof.verify.gaps import reason_for
from shardwise.proof.verify.oracle import Truth, truths, worth
from shardwise.proof.verify.verdicts import OpReport, tables
from shardwise.rules import AxisPlacement, Strategy, rule_for
from shardwise.terminal import progress

# Judging


def verify(op: Any, samples: Iterable[Any]) -> OpReport:
    """Judge the rule of an op, of one's own for instance, by some samples: each a tuple of arguments, or a pair of such
    a tuple and a dict of keyword arguments.

    >>> import torch
    >>> verify(torch.mm, [(torch.randn(5, 4), torch.randn(4, 3))]).status
    'verified'
    """
    report = OpReport("")
    for args, kwargs in map(arguments_of, samples):
        for case in record(op, args, kwargs):
            report.name = report.name or case.op
            if case.op == report.name:
                report.add(judge_call(case))
    return report


def arguments_of(sample: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a sample."""
    if not isinstance(sample, (tuple, list)):
        raise TypeError(f"a sample is a tuple of arguments, not a {type(sample).__name__}")
    if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample[0], sample[1]
    return tuple(sample), {}


def judge_call(case: Case) -> OpReport:
    """Judge a rule by one call."""
    report = OpReport(case.op, has_rule=rule_for(case.call.op) is not None)
    reason = excluded(case.call) or _unrepeatable(case)
    if reason is None:
        report.calls = 1
        _judge(case, report, failure)
        _judge_completeness(case, report)
    else:
        report.excluded[reason] = 1
        if reason not in (DRAWN, UNWRITTEN) or not report.has_rule:
            return report
        report.shapes = 1
        _judge(case, report, partial(misfit, replicas=reason == DRAWN))
    report.ways = catalogue.ways(case.call, concrete(case))
    return report


def _unrepeatable(case: Case) -> str | None:
    try:
        case.expected  # noqa: B018
    except Exception as error:
        return _not_again(error)
    return None


def _not_again(error: Exception) -> str:
    return f"cannot be called again on its own: {type(error).__name__}"


def _judge(case: Case, report: OpReport, failing: Callable[[Case, Trial], str | None]) -> None:
    tried: set[Strategy] = set()

    def note(strategy: str, problem: str) -> None:
        found = {"call": str(case), "strategy": strategy, "problem": problem}
        report.unsound.append({**found, "from": case.origin})

    for trial in trials(case):
        try:
            problem = failing(case, trial)
        except Impossible:
            continue
        report.trials += 1
        tried.update(trial.chosen)
        if problem is not None:
            note(str(trial), problem)
    for way in concrete(case):
        if way not in tried and has_terms(case, way):
            note(f"{show_ins(way.ins)} -> {show_ins(way.outs)}", "could not be tried in any way")


def _judge_completeness(case: Case, report: OpReport) -> None:
    if not case.is_answered:
        return
    claims = concrete(case)
    for truth in truths(case):
        report.true += 1
        if is_claimed(truth, claims):
            report.claimed += 1
        else:
            true = f"{show_ins(truth.ins)} -> {show_ins(truth.outs)}"
            found = {"call": str(case), "true": true, "reason": reason_for(case.call, truth)}
            report.gaps.append({**found, "from": case.origin})


def is_claimed(truth: Truth, claims: Sequence[Strategy]) -> bool:
    """Whether a strategy has these inputs, and outputs that are as good: whole beats sharded beats pending."""
    return any(
        way.ins == truth.ins and all(_as_good(a, b) for a, b in zip(way.outs, truth.outs, strict=False))
        for way in claims
    )


def _as_good(claimed: AxisPlacement, true: AxisPlacement) -> bool:
    return claimed == true or worth(claimed) > worth(true) or (worth(claimed) == worth(true) == 0)


# Collecting calls


@dataclass(frozen=True)
class Settings:
    """What is judged. The same settings judge the same calls."""

    ops: str | None = None
    names: tuple[str, ...] = ()
    samples: int | None = 12
    calls: int = 16
    seed: int | None = None


def calls_of(operator: Operator, limit: int | None) -> list[Case]:
    """The aten calls that an operator's samples make."""
    found: list[Case] = []
    for sample in operator.samples(limit):
        for enabled in (True, False):  # functions may do otherwise where no gradient is wanted
            try:
                with torch.set_grad_enabled(enabled):
                    found += record(operator.function, sample.args, sample.kwargs, f"{operator.name}{sample}")
            except Exception:  # a sample that this build of torch cannot run
                continue
    return found


def collect(settings: Settings, *, quiet: bool = True) -> dict[str, list[Case]]:
    """The distinct aten calls to judge, by op name: some of every op that the settings name."""
    found: dict[str, dict[tuple, Case]] = {}

    def keep(calls: Iterable[Case]) -> None:
        for case in calls:
            if not settings.names or any(_is_called(case.op, name) for name in settings.names):
                found.setdefault(case.op, {}).setdefault(case.key, case)

    unknown = _missing(settings.names, {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()})
    if unknown:
        raise CannotRun(f"no op is called {', '.join(unknown)}")
    if settings.ops is None:
        for name in sorted(EXTRA):
            if not settings.names or any(_is_called(name, wanted) for wanted in settings.names):
                keep(extra_calls(name))
    if not settings.names or _missing(settings.names, found):
        sources = _sources(settings)
        with progress("recording", len(sources), quiet=quiet) as advance:
            for operator in sources:
                keep(calls_of(operator, settings.samples))
                advance(what=operator.name)
    uncalled = _missing(settings.names, found)
    if uncalled or not found:
        ops = ", ".join(uncalled) or "any op that has rules"
        raise CannotRun(f"no sample makes a call of {ops}")
    return {op: _chosen(list(calls.values()), settings) for op, calls in found.items()}


def _chosen(calls: list[Case], settings: Settings) -> list[Case]:
    """The calls by which an op is judged: evenly spread over all, or drawn, each by itself, whatever the rest is."""
    if settings.seed is None:
        return [calls[i] for i in spread(len(calls), settings.calls)]
    drawn = sorted(calls, key=lambda call: random.Random(f"{settings.seed} {call.key}").random())
    return drawn[: settings.calls]


def _sources(settings: Settings) -> list[Operator]:
    """The operators to record: for named ops those of the same name, if torch has samples of all of them."""
    chosen = [op for op in operators(settings.ops) if not op.is_list]  # those have no rules
    bare = [name.split("::")[-1].strip("_") for name in settings.names]
    like = [op for op in chosen if any(_plain_name(op.name).endswith(name) for name in bare)]
    known = {_plain_name(op.name) for op in like}
    return like if bare and all(any(n.endswith(name) for n in known) for name in bare) else chosen


def _is_called(op: str, name: str) -> bool:
    """Whether a user means this op: by its whole name, or by what it is called in torch (softmax: aten::_softmax)."""
    return op == name if "::" in name else op.split("::")[1].strip("_") == name.strip("_")


def _missing(names: Iterable[str], ops: Iterable[str]) -> list[str]:
    """The names that a user has given and that none of the ops is called."""
    return [name for name in names if not any(_is_called(op, name) for op in ops)]


def _plain_name(name: str) -> str:
    return re.sub(r"^(nn\.functional|linalg|special|fft)\.", "", name).strip("_")


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="OP", help="only these ops: add, aten::add, mylib::op (all)")
    add("--ops", type=pattern, metavar="PATTERN", help="only calls by operators of op_db whose name matches")
    add("--samples", type=count, default=12, metavar="N", help="samples per operator of op_db (12)")
    add("--calls", type=count, default=16, metavar="N", help="calls judged per op (16)")
    add("--seed", type=int, metavar="N", help="choose these calls at random (evenly spread over all)")
    add("--write-docs", type=Path, metavar="FILE", help="write the catalogue of rules to FILE")
    add_run_arguments(parser, timed="a call")


def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if every rule is sound."""
    began = time.monotonic()
    settings = Settings(given.ops, tuple(given.names), given.samples, given.calls, given.seed)
    how = how_to_run(given, {**asdict(settings), "names": given.names}, OpReport)
    reports = measure(settings, how)
    if given.write_docs is not None:
        given.write_docs.write_text(catalogue.render({report.name: report for report in reports}))
    about = (
        f"Calls from up to {settings.samples} samples of each operator of op_db, and of ops that these do not call, "
        f"but at most {settings.calls} calls of each op. "
        f"{time.monotonic() - began:.0f} s with {given.jobs} processes."
    )
    finish(given, tables(reports), "Sharding rules, judged by brute force", about)
    return 0 if all(report.sound for report in reports) else 1


def measure(settings: Settings, how: How) -> list[OpReport]:
    """Judge the ops that the settings name, in the order of their names."""
    return judge_all(collect(settings, quiet=how.quiet), how)


def judge_all(calls: Mapping[str, Sequence[Case]], how: How) -> list[OpReport]:
    """Judge ops by some calls of each, in the order of their names."""
    saved = {name: _saved(calls[name]) for name in sorted(calls)}
    return run_tasks("verify", judge_saved, list(saved), saved, OpReport, how)


def _saved(calls: Sequence[Case]) -> list[bytes]:
    """What can be saved of some calls: a few take objects that live in one process only."""
    found = []
    for case in calls:
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
            found.append(pickle.dumps(case.portable()))
    return found


def judge_saved(name: str, saved: Mapping[str, Sequence[bytes]]) -> Iterator[OpReport]:
    """Judge one op by its saved calls; yields what each of them gave."""
    with warnings.catch_warnings(action="ignore"):
        for portable in saved[name]:
            try:
                case = made_again(pickle.loads(portable))
            except Exception as error:  # it looks at strides that a copy does not have, or lives in one process only
                yield OpReport(name, excluded={_not_again(error): 1})
            else:
                yield judge_call(case)
