"""Layouts, collectives and bytes as they were frozen: a change that is to change nothing leaves them as they are.

    python benchmarks/goldens.py                 compare everything with what is frozen; 1 if something differs
    python benchmarks/goldens.py calls           only a part: calls, schedules, verify
    python benchmarks/goldens.py --only linear   only what has this in its name
    python benchmarks/goldens.py --freeze        freeze what is there now (benchmarks/goldens/*.json)

`calls`: of the calls in golden_calls.py, in several layouts on meshes of one and two axes: the layouts of results and
gradients, and every collective in order, with the bytes that one rank brings. `schedules`: the collectives of the
programs of schedules.py at small sizes. `verify`: what `shardwise verify` finds out about every rule, by few calls of
each op. One record is one line of the files, so that `git diff` reads well after `--freeze`. Torch decides on some of
it: freeze and compare with the version in constraints.txt.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwise as sw
from golden_calls import CALLS, NAMES, PARAMETERS, TENSORS
from scheduled import run_on
from schedules import PROGRAMS, missing
from shardwise.debug import Comm, CommDebugMode

FOLDER = Path(__file__).parent / "goldens"

Record = dict[str, str]
Golden = dict[str, dict[str, Record]]
"""What was recorded, by subject (a call, a program, a namespace of ops) and by case (layouts, a size, an op)."""

Way = dict[str, tuple[sw.Placement, ...]]
"""A placement along each mesh axis for each input."""

ABSENT = frozenset(program.name for program in PROGRAMS if missing(program.needs))
"""Programs that cannot run here, for want of a package. What is frozen of them stays."""

# --- Calls ---


class MeshOf(NamedTuple):
    shape: tuple[int, ...]
    names: tuple[str, ...]
    num_ways: int
    """In how many ways at most a call is laid out on it."""

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in zip(self.names, self.shape))


MESHES = (MeshOf((2,), ("tp",), 5), MeshOf((4,), ("tp",), 1), MeshOf((2, 2), ("dp", "tp"), 3))


def inputs_of(expression: str) -> list[str]:
    named = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    return [name for name in TENSORS if name in named]


def axis_placements(x: Tensor) -> list[sw.Placement]:
    partial = [sw.Partial()] if x.is_floating_point() else []
    return [sw.Replicate(), *map(sw.Shard, range(x.dim())), *partial]


def ways_of(expression: str, mesh: MeshOf) -> Iterator[Way]:
    """All layouts of a call's inputs but the wholly replicated, or some of them, always the same."""
    names = inputs_of(expression)
    digits = [(name, axis_placements(TENSORS[name]())) for name in names for _ in mesh.shape]
    numbers: Iterable[int] = range(1, math.prod(len(options) for _, options in digits))
    if len(numbers) > mesh.num_ways:
        numbers = sorted(random.Random(f"{expression} {mesh}").sample(numbers, mesh.num_ways))
    for number in numbers:
        way: Way = dict.fromkeys(names, ())
        for name, options in digits:
            number, digit = divmod(number, len(options))
            way[name] += (options[digit],)
        yield way


def run_call(expression: str, mesh: MeshOf, way: Way) -> Record:
    """What a call does when it is planned; and what it communicates `again`, if that is something else."""
    sw.clear_cache()
    first, second = run_once(expression, mesh, way), run_once(expression, mesh, way)
    different = {name for name in {**first, **second} if first.get(name) != second.get(name)}
    return first | {f"{name}, again": second.get(name, "-") for name in sorted(different)}


def run_once(expression: str, mesh: MeshOf, way: Way) -> Record:
    torch.manual_seed(0)
    on = sw.simulate(mesh.shape, mesh.names)
    inputs: dict[str, Tensor] = {}
    leaves: list[Tensor] = []
    for name, placements in way.items():
        leaf = sw.distribute_tensor(TENSORS[name](), on, placements)
        if leaf.is_floating_point() or leaf.is_complex():
            leaves.append(leaf.requires_grad_())
        inputs[name] = leaf if name in PARAMETERS else leaf.clone()
    record: Record = {}
    results: list[Any] = []
    with CommDebugMode() as forward, noting_errors(record):
        results = tree_leaves(eval(expression, NAMES | inputs))
    record |= {"out": "; ".join(map(shown, results)), "forward": sequence(forward.comms)}
    record |= {"gathered": ", ".join(forward.get_fallback_counts())}
    differentiable = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if differentiable:
        with CommDebugMode() as backward, noting_errors(record):
            sum((x.real if x.is_complex() else x).sum() for x in differentiable).backward()
        record |= {"backward": sequence(backward.comms), "gradients": "; ".join(shown(leaf.grad) for leaf in leaves)}
    return {name: text for name, text in record.items() if text}


@contextmanager
def noting_errors(record: Record) -> Iterator[None]:
    try:
        yield
    except (NameError, AttributeError):  # an expression that cannot run is nothing to freeze
        raise
    except Exception as error:
        record["raises"] = type(error).__name__


def shown(x: Any) -> str:
    if isinstance(x, sw.DTensor):
        return str(x.layout_on_mesh)
    return f"plain {x.shape}" if isinstance(x, Tensor) else repr(x)


def sequence(comms: Iterable[Comm]) -> str:
    """Collectives in order: kind, axes, the bytes that a rank brings, and how often in a row."""
    told = (f"{comm.kind}@{','.join(comm.axes)} {comm.bytes}" for comm in comms)
    runs = ((text, len(list(run))) for text, run in itertools.groupby(told))
    return ", ".join(text if count == 1 else f"{text} ×{count}" for text, count in runs)


def cases_of(only: str = "") -> Iterator[tuple[str, str, MeshOf, Way]]:
    """Every call in every layout, with its name and that of the layout."""
    for family, expressions in CALLS.items():
        for expression in expressions:
            for mesh in MESHES:
                for way in ways_of(expression, mesh):
                    told = (f"{name}={','.join(map(str, where))}" for name, where in way.items())
                    subject, case = f"{family}: {expression}", f"{mesh}: {' '.join(told)}"
                    if is_meant(subject, case, only):
                        yield subject, case, mesh, way


def record_calls(only: str = "") -> Golden:
    golden: Golden = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subject, case, mesh, way in cases_of(only):
            golden.setdefault(subject, {})[case] = run_call(subject.partition(": ")[2], mesh, way)
    return golden


# --- Programs and rules ---


def record_schedules(only: str = "") -> Golden:
    golden: Golden = {}
    for program in PROGRAMS:
        sizes = [size for size in program.sizes if size.is_tiny and is_meant(program.name, str(size), only)]
        golden[program.name] = {str(size): communicated(run_on("recording", program, size).comm) for size in sizes}
    return golden


def communicated(comm: CommDebugMode) -> Record:
    directions = {"forward": False, "backward": True}
    told = {name: sequence(c for c in comm.comms if c.backward is is_back) for name, is_back in directions.items()}
    totals = ", ".join(f"{count} {kind}" for kind, count in sorted(comm.get_comm_counts().items()))
    return {"totals": f"{totals or 'nothing'}: {sum(c.bytes for c in comm.comms)} bytes", **told}


VERIFY = ("--samples", "6", "--calls", "4", "--seed", "0", "--jobs", "1", "--quiet")
"""Every rule, by few calls: two minutes on one core. `make verify` judges by more. The seed draws
each call by itself: they stay the same when others go with their rules."""


def record_verify(only: str = "") -> Golden:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verify.json"
        command = [sys.executable, "-m", "shardwise.cli", "verify", *VERIFY, "--json", str(file)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, env=env, capture_output=True, check=False)  # its status is 1 where a rule is unsound
        results = json.loads(file.read_text())["results"]
    golden: Golden = {}
    for name, report in results.items():
        namespace, _, op = name.partition("::")
        if is_meant(namespace, op, only):
            golden.setdefault(namespace, {})[op] = judged(report)
    return golden


def judged(report: dict[str, Any]) -> Record:
    """What was found out about one rule: whether it is sound, how complete, and what it lists."""
    counts = ("calls", "trials", "shapes", "true", "claimed")
    record = {
        "unsound": "; ".join(f"{found['call']} {found['strategy']}" for found in report["unsound"]),
        "failure": report["failure"],
        "judged": ", ".join(f"{report[name]} {name}" for name in counts if report[name]),
        "ways": " | ".join(filter(None, report["ways"])),
        "no rule": "" if report["has_rule"] else "gathered",
    }
    return {name: text for name, text in record.items() if text}


# --- Frozen, compared ---

PARTS: Mapping[str, Callable[[str], Golden]] = {
    "calls": record_calls,
    "schedules": record_schedules,
    "verify": record_verify,
}


class Difference(NamedTuple):
    subject: str
    case: str
    field: str
    frozen: str
    now: str


def differences(frozen: Golden, now: Golden) -> Iterator[Difference]:
    """Every field of every record that is not the same in both."""
    for subject in {**frozen, **now}:
        before, after = frozen.get(subject, {}), now.get(subject, {})
        for case in {**before, **after}:
            if case not in before or case not in after:
                yield Difference(
                    subject, case, "", *("there" if case in records else "-" for records in (before, after))
                )
                continue
            a, b = before[case], after[case]
            for field in {**a, **b}:
                if a.get(field) != b.get(field):
                    yield Difference(subject, case, field, a.get(field, "-"), b.get(field, "-"))


def load(part: str) -> Golden:
    path = FOLDER / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(part: str, golden: Golden) -> Path:
    """Write a part in the order of names, a line for each record."""
    subjects = []
    for subject, records in sorted(golden.items()):
        lines = [f"{written(case)}: {written(record)}" for case, record in sorted(records.items())]
        subjects.append(f"{written(subject)}: {{\n" + ",\n".join(lines) + "\n}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{part}.json"
    path.write_text("{\n" + ",\n".join(subjects) + "\n}\n")
    return path


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- The command ---


def is_meant(subject: str, case: str, only: str) -> bool:
    """Whether a record can be made here, and was asked for."""
    return only in f"{subject} {case}" and subject not in ABSENT


def part_of(golden: Golden, only: str, *, meant: bool = True) -> Golden:
    """The records that are meant, or the others."""
    return {
        subject: {case: record for case, record in records.items() if is_meant(subject, case, only) is meant}
        for subject, records in golden.items()
    }


def merged(golden: Golden, others: Golden) -> Golden:
    found = {subject: golden.get(subject, {}) | others.get(subject, {}) for subject in {**golden, **others}}
    return {subject: records for subject, records in found.items() if records}


def freeze(part: str, now: Golden, only: str) -> Path:
    """Write what was recorded, beside what was frozen before and not recorded now."""
    return save(part, merged(now, part_of(load(part), only, meant=False)))


def compare(part: str, now: Golden, only: str, console: Console, limit: int = 40) -> bool:
    """Whether a part is as it was frozen; says what is not."""
    found = list(differences(part_of(load(part), only), now))
    records = {(difference.subject, difference.case) for difference in found}
    console.print(f"{part}: {sum(map(len, now.values()))} recorded, {len(records)} differ from what is frozen")
    if found:
        table = Table(title=f"{part}, frozen and now", title_justify="left", show_lines=True)
        for column in ("of", "case", "what", "frozen", "now"):
            table.add_column(column, overflow="fold")
        for difference in found[:limit]:
            table.add_row(*map(escape, difference))
        console.print(table)
    if len(found) > limit:
        console.print(f"and {len(found) - limit} more differences: --limit shows them")
    return not found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only calls, programs and ops that have this in their name"
    )
    parser.add_argument("--freeze", action="store_true", help="freeze what is there now")
    parser.add_argument("--limit", type=int, default=40, metavar="N", help="differences to show of each part (40)")
    options = parser.parse_args()
    if unknown := set(options.parts).difference(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")

    torch.set_num_threads(1)
    console = Console()
    same = True
    for part in options.parts or PARTS:
        now = PARTS[part](options.only)
        if options.freeze:
            console.print(f"frozen: {freeze(part, now, options.only).name}")
        else:
            same &= compare(part, now, options.only, console, options.limit)
    if ABSENT:
        console.print(f"left out, for want of a package: {', '.join(sorted(ABSENT))}", style="yellow")
    sys.exit(not same)


if __name__ == "__main__":
    main()
