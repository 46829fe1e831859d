"""Run every operator of torch on DTensors, in all layouts, and compare with plain torch.

Each sample of each operator of torch's `op_db`, and of those on lists of tensors, is called through real DTensors on
the simulator: as a function, as a method, in place and with `out=`; with every combination of placements on an axis of
two ranks, or a seeded choice where there are too many, and some on a 2×2 mesh; forward and backward. Each call is
right, or refused (a write that needs another layout raises before it has changed anything), or raised, or wrong; and it
ran sharded or gathered its inputs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch import clear_cache
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.proof.coverage.forms import OUT, Form, Unusable, forms
from shardwise.proof.coverage.judge import ROUNDED, ROUNDING, judge
from shardwise.proof.coverage.reference import Reference
from shardwise.proof.coverage.results import Result, tables
from shardwise.proof.kit.command import How, add_run_arguments, count, finish, how_to_run, pattern, run_tasks
from shardwise.proof.kit.compare import TOLERANCE
from shardwise.proof.kit.placing import mesh_of
from shardwise.proof.kit.samples import NO_TENSOR, VALUELESS, Operator, Sample, operator, operators, seeded

ONE_AXIS, TWO_AXES = (2,), (2, 2)
LARGE = 100_000
"""Samples with more elements are tried in a few layouts only."""

Assignment = tuple[tuple[Placement, ...], ...]
"""For each tensor of a call, its placements."""

Way = tuple[tuple[Placement, ...] | None, ...]
"""The same; None for a tensor for `out=` that gets the placements of the result without it."""


@dataclass(frozen=True)
class Settings:
    """What is tried of each operator. The same settings try the same calls."""

    samples: int | None = None
    assignments: int = 24
    spread: int = 4
    seed: int = 0
    dtype: str = "float32"


# The calls


def options(x: Tensor) -> list[Placement]:
    """The placements of a tensor along one axis."""
    found: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(x.dim()))]
    return [*found, Partial()] if x.is_floating_point() or x.is_complex() else found


def assignments(tensors: Sequence[Tensor], num_axes: int, most: int, chance: random.Random) -> list[Assignment]:
    """Ways to lay tensors out: all, if there are at most so many; else those with one tensor sharded and a choice."""
    each = [list(itertools.product(options(x), repeat=num_axes)) for x in tensors]
    if math.prod(map(len, each)) <= most:
        return list(itertools.product(*each))
    alone = [
        (*(row[0] for row in each[:i]), way, *(row[0] for row in each[i + 1 :]))
        for i in range(len(each))
        for way in each[i][1:]
    ]
    chance.shuffle(alone)
    chosen = dict.fromkeys(alone[: most // 2])
    while len(chosen) < most:
        chosen[tuple(chance.choice(row) for row in each)] = None
    return list(chosen)


def calls(op: Operator, sample: Sample, settings: Settings) -> Iterator[tuple[Form, Sequence[int], Way]]:
    """The calls to try of one sample."""
    large = 8 if sum(x.numel() for x in sample.tensors) > LARGE else 1
    with seeded(f"{op.name}/{sample.index}", settings.seed) as chance:
        for form, fewer in forms(op):
            for shape, most in ((ONE_AXIS, settings.assignments), (TWO_AXES, settings.spread)):
                limit = math.ceil(most / (fewer * large))
                for way in ways(form, sample, len(shape), limit, chance):
                    yield form, shape, way


def ways(form: Form, sample: Sample, num_axes: int, most: int, chance: random.Random) -> Sequence[Way]:
    """Ways to lay out the tensors of a sample written in some form. With `out=`, every other one has its tensors where
    the results would be without it."""
    if not form.has_out:
        return assignments(sample.tensors, num_axes, most, chance)
    try:
        tensors = form.sample(sample).tensors
    except Unusable:
        return []
    num_outs = len(tensors) - len(sample.tensors)
    found: list[Way] = list(assignments(tensors, num_axes, most, chance))
    chance.shuffle(found)
    found = found[:most]
    if form.name == OUT:
        found[::2] = [(*way[:-num_outs], *(None,) * num_outs) for way in found[::2]]
    return list(dict.fromkeys(found))


def cover(name: str, settings: Settings) -> Iterator[Result]:
    """Try one operator; yields, for each sample, what became of it."""
    op = operator(name, settings.dtype)
    clear_cache()
    for sample in op.samples(settings.samples, settings.seed):
        yield cover_sample(op, sample, settings)


def cover_sample(op: Operator, sample: Sample, settings: Settings) -> Result:
    if not sample.tensors:
        return Result(op.name, unusable={NO_TENSOR: 1})
    cases: dict[str, Reference | str] = {}
    result = Result(op.name, samples=1)
    for form, shape, way in calls(op, sample, settings):
        if form.name not in cases:
            cases[form.name] = _case(op, form, sample, settings)
        case = cases[form.name]
        if not isinstance(case, str):
            result.add(_called(case, sample, shape, way))
    usable = [case for case in cases.values() if not isinstance(case, str)]
    if not usable:
        return Result(op.name, unusable={str(cases["function"]): 1})
    result.random = int(usable[0].random)
    return result


def _called(case: Reference, sample: Sample, shape: Sequence[int], way: Way) -> Result:
    """What became of one call."""
    verdict = judge(case, mesh_of(shape), way)
    notes = [verdict.kind, f"ran {verdict.way}"]
    strides, problems = "", []
    if verdict.kind == "right":
        notes += [f"as {case.form.name}", f"gradients {case.has_gradients}", *filter(None, [verdict.detail])]
    if verdict.strides:
        notes.append("other strides")
        strides = f"{case.form.name} {sample} {show_assignment(way)}: {verdict.strides}"
    if verdict.kind in ("raised", "wrong"):
        where = {"sample": sample.index, "call": str(sample), "mesh": list(shape), "placements": show_assignment(way)}
        problems.append({"kind": verdict.kind, "form": case.form.name, "detail": verdict.detail, **where})
    return Result("", counts=dict.fromkeys(notes, 1), strides=strides, problems=problems)


def _case(op: Operator, form: Form, sample: Sample, settings: Settings) -> Reference | str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return make_case(op, form, sample, settings.seed)
    except Unusable as reason:
        return str(reason)


def make_case(op: Operator, form: Form, sample: Sample, seed: int) -> Reference:
    return Reference(form, sample, valueless=op.name in VALUELESS, seed=seed)


def show_assignment(way: Way) -> str:
    """`S0,R P,R =`: for each tensor its placements; `=` for those of the result."""
    letters = {Replicate: "R", Partial: "P"}

    def show(each: Sequence[Placement] | None) -> str:
        if each is None:
            return "="
        return ",".join(f"S{p.dim}" if isinstance(p, Shard) else letters[type(p)] for p in each)

    return " ".join(map(show, way))


def parse_assignment(text: str) -> Way:
    """The inverse of `show_assignment`."""
    letters: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
    return tuple(
        None if each == "=" else tuple(letters.get(p) or Shard(int(p[1:])) for p in each.split(","))
        for each in text.split()
    )


def replay(
    name: str, sample: int, placements: str, *, form: str = "function", seed: int = 0, dtype: str = "float32"
) -> Any:
    """Make one call again, as `coverage` made it, and let its error out; returns the verdict otherwise.

    >>> replay("mm", 0, "S0 R").kind
    'right'
    """
    op, way = operator(name, dtype), parse_assignment(placements)
    chosen = next(given for given in op.samples(seed=seed) if given.index == sample)
    written = next(written for written, _ in forms(op) if written.name == form)
    mesh = mesh_of(ONE_AXIS if way[0] is None or len(way[0]) == 1 else TWO_AXES)
    return judge(make_case(op, written, chosen, seed), mesh, way, let_out=True)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ops", type=pattern, metavar="PATTERN", help="only operators whose whole name matches this expression")
    add("--samples", type=count, metavar="N", help="at most N samples of each operator (all)")
    add("--assignments", type=count, default=24, metavar="N", help="layouts per sample, one axis (24)")
    add("--spread", type=count, default=4, metavar="N", help="layouts per sample on a 2×2 mesh (4)")
    add("--seed", type=int, default=0, help="another choice of data and layouts (0)")
    add("--dtype", default="float32", choices=("float32", "float64"), help="of operators that take it")
    add_run_arguments(parser, timed="a sample")


def run(given: argparse.Namespace) -> int:
    """Run the command; 0 if nothing was wrong and nothing raised."""
    settings = Settings(given.samples, given.assignments, given.spread, given.seed, given.dtype)
    names = [op.name for op in operators(given.ops)]
    results = measure(names, settings, how_to_run(given, asdict(settings), Result))
    rounding = f", or up to {ROUNDING:g} of the largest number {ROUNDED}" if settings.dtype == "float32" else ""
    about = (
        f"Every operator of op_db, and those on lists, {settings.samples or 'all'} samples of each, in "
        f"{settings.dtype} where it is taken, forward and backward, as function, method, in place and with out=; of "
        f"each, up to {settings.assignments} layouts on two ranks and {settings.spread} on 2×2. "
        f"Answers are right within {TOLERANCE[getattr(torch, settings.dtype)]:g} of their size{rounding}."
    )
    finish(given, tables(results), "Every operator against plain torch", about)
    return 1 if any(result.problems for result in results) else 0


def measure(names: Sequence[str], settings: Settings, how: How | None = None) -> list[Result]:
    """Try the named operators; the results are in their order."""

    def untried(name: str) -> Result:
        return Result(name, str(operator(name, settings.dtype).dtype).removeprefix("torch."))

    return run_tasks("coverage", cover, names, settings, untried, how or How())
