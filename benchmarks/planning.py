"""What the first call for a new shape costs beyond the next one: the time to plan it, for every operator of torch.

    python benchmarks/planning.py                    print the tables (ten minutes)
    python benchmarks/planning.py --write            and write benchmarks/results/planning-<date>.md
    python benchmarks/planning.py --ops 'nn.*'       only operators whose name matches
    python benchmarks/planning.py --profile einsum   instead, where the time of one operator's plans goes

Every operator of torch's `op_db` is called on DTensors, some samples of each, in two layouts: axis i of the mesh shards
dim i, or dim i from the end, of every tensor that has it. Before each first call all plans, paths and sizes are
forgotten, so that it finds what a new shape would find; the second call, which moves the same data, is subtracted. The
dearest call of each operator is measured three times over. Everything runs in one process on one thread, as rank 1 in
torch's fake process group, whose collectives return at once, and times are those of the processor, so that whatever
else runs beside it hardly counts. Calls that are refused are left out. "Traced" is the part that it takes to run the
function on meta tensors, in torch; "ops" is how many aten ops that gives.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import datetime
import gc
import json
import pstats
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from overhead import FIRST_CALL_MESHES, FIRST_CALL_TARGETS, RANK, versions
from race import Row, Table, seconds
from ranks import fake_world
from shardwise.dispatch.planning import first_call as dispatch_call
from shardwise.proof.kit.samples import Sample, all_operators, operators, replaced
from shardwise.redistribute import windows
from shardwise.tensor import DTensor

LIMIT_ANY = 0.1
"""Seconds: no call takes longer to plan, on any mesh up to three axes."""

NUM_REPEATS = 5
NUM_SHOWN = 25

COMMON = (
    *("mm", "add", "softmax", "cat", "gather", "scatter", "index_select", "__getitem__", "cumsum", "sort", "einsum"),
    *("nn.functional.linear", "nn.functional.layer_norm", "nn.functional.cross_entropy", "nn.functional.conv2d"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.embedding", "nn.functional.batch_norm"),
    *("nn.functional.gelu", "nn.functional.max_pool2d", "nn.functional.interpolate.bilinear", "linalg.solve"),
)
"""Operators shown whatever they cost."""

LAYOUTS: dict[str, Callable[[int, int], int]] = {
    "leading": lambda axis, ndim: axis,
    "trailing": lambda axis, ndim: ndim - 1 - axis,
}
"""The dim that an axis shards, if a tensor has it."""


# --- One operator --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds to plan one call."""

    operator: str
    call: str
    planned: float
    traced: float
    num_ops: int


class Watch:
    """Inside, tells how long the calls were traced, and to how many aten ops."""

    def __init__(self) -> None:
        self.seconds, self.num_ops = 0.0, 0
        self._trace_call = dispatch_call.trace_call

    def __enter__(self) -> Watch:
        dispatch_call.trace_call = self._timed  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dispatch_call.trace_call = self._trace_call

    def _timed(self, *args: Any) -> Any:
        start = time.thread_time()
        num_ops = 1  # of a function whose results depend on data: it is planned by hand, and what that calls, in turn
        try:
            trace = self._trace_call(*args)
            num_ops = len(trace.calls)
        finally:
            self.seconds += time.thread_time() - start
            self.num_ops += num_ops
        return trace


def forget(caches: Sequence[Any]) -> None:
    """As if no call had been planned and no layout moved."""
    sw.clear_cache()
    for cached in caches:
        cached.cache_clear()


def memories() -> list[Any]:
    """All bounded caches of Shardwise's own; what is known of an op, whatever its shapes, is kept elsewhere. Looking
    for them, through all of torch's modules, empties the processor's own caches: not to be done before every call."""
    parts = [vars(module) for name, module in sys.modules.items() if re.match(r"shardwise\.(?!proof)", name)]
    return list({id(x): x for part in parts for x in part.values() if hasattr(x, "cache_clear")}.values())


def calls_of(mesh: DeviceMesh, name: str, num_samples: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Some calls of an operator on DTensors, in words and as they are."""
    (op,) = operators(re.escape(name))
    if op.name.startswith("_segment_reduce"):  # a collective that returns at once leaves numbers that are none
        return
    for sample in op.samples(num_samples):
        if any(x.layout is not torch.strided for x in sample.tensors):
            continue
        for layout, dim_of in LAYOUTS.items():
            yield f"{sample}, {layout} dims", call_on(mesh, op.function, sample, dim_of)


def call_on(mesh: DeviceMesh, function: Callable, sample: Sample, dim_of: Callable[[int, int], int]) -> Callable:
    images = {id(x): placed(x, mesh, dim_of) for x in sample.tensors}
    args, kwargs = replaced(sample.args, images), replaced(sample.kwargs, images)
    return lambda: function(*args, **kwargs)


def placed(x: torch.Tensor, mesh: DeviceMesh, dim_of: Callable[[int, int], int]) -> DTensor:
    dims = [dim_of(axis, x.ndim) for axis in range(mesh.ndim)]
    placements = [sw.Shard(dim) if 0 <= dim < x.ndim else sw.Replicate() for dim in dims]
    return sw.distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad)


def cost_of(name: str, words: str, call: Callable[[], object]) -> Cost | None:
    """The best of some first calls less the best of some next ones; None where there is nothing to plan, or the call is
    refused."""
    firsts, nexts, traced, num_ops = [], [], [], 0
    caches = memories()
    for _ in range(NUM_REPEATS):
        forget(caches)
        with Watch() as watch:
            try:
                firsts.append(timed(call))
                traced.append(watch.seconds)
                num_ops = watch.num_ops
                nexts.append(timed(call))
            except Exception:  # whatever it is, it is no plan
                return None
    return Cost(name, words, min(firsts) - min(nexts), min(traced), num_ops) if num_ops else None


def timed(call: Callable[[], object]) -> float:
    windows.clear()  # or the next call would share the moves of the first
    start = time.thread_time()
    call()
    return time.thread_time() - start


def print_costs(num_axes: int, pattern: str, num_samples: int) -> None:
    """The dearest call of every operator, as lines of JSON."""
    shape = FIRST_CALL_MESHES[num_axes]
    with fake_world(RANK, torch.Size(shape).numel()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y", "z")[:num_axes])
        torch.mm(*(sw.distribute_tensor(torch.randn(8, 8), mesh, [sw.Shard(0)] * num_axes) for _ in range(2)))
        gc.collect()
        gc.freeze()
        gc.disable()
        for op in operators(pattern):
            dearest = dearest_of(op.name, dict(calls_of(mesh, op.name, num_samples)))
            gc.collect(0)
            if dearest is not None:
                print(json.dumps(dataclasses.asdict(dearest)), flush=True)


def dearest_of(name: str, calls: dict[str, Callable[[], object]]) -> Cost | None:
    """The dearest of some calls. The most of many times is whichever was disturbed the most: so the dearest is measured
    again, until one has twice been the dearest."""
    found = {words: cost_of(name, words, call) for words, call in calls.items()}
    costs = {words: cost for words, cost in found.items() if cost is not None}
    again: set[str] = set()
    while costs:
        words = max(costs, key=lambda words: costs[words].planned)
        if words in again:
            return costs[words]
        again.add(words)
        more = [costs[words], *(cost_of(name, words, calls[words]) for _ in range(2))]
        costs[words] = min((cost for cost in more if cost is not None), key=lambda cost: cost.planned)
    return None


# --- All of them ---------------------------------------------------------------------------------


def measured(num_axes: int, options: argparse.Namespace) -> dict[str, Cost]:
    """The dearest call of every operator, measured in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--mesh", str(num_axes)]
    command += ["--ops", options.ops, "--samples", str(options.samples)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        print(f"stopped with {run.returncode} on {num_axes} axes; what follows is incomplete", file=sys.stderr)
    costs = [Cost(**json.loads(line)) for line in run.stdout.splitlines()]
    return {cost.operator: cost for cost in costs}


Costs = dict[int, dict[str, Cost]]


def quantile_table(costs: Costs) -> Table:
    rows: list[Row] = []
    for num_axes, found in costs.items():
        limit = FIRST_CALL_TARGETS[num_axes].limit * 1e-3
        single = [cost for cost in found.values() if cost.num_ops == 1]
        beyond = [cost.planned - cost.traced for cost in single]
        for what, times, goal in (
            ("all operators", [cost.planned for cost in found.values()], LIMIT_ANY),
            ("of one aten op, tracing left out", beyond, limit),
        ):
            if len(times) > 1:
                rows.append((f"{' x '.join(map(str, FIRST_CALL_MESHES[num_axes]))}: {what}", *judged(times, goal)))
    return Table("Time to plan a call", ("measure", "calls", "median", "90%", "99%", "max", "target", ""), rows)


def over_limit(costs: Costs) -> Table:
    """The calls of one aten op that take longer than the limit of their mesh, and how long without tracing."""
    rows: list[Row] = []
    for num_axes, found in costs.items():
        limit = FIRST_CALL_TARGETS[num_axes].limit * 1e-3
        single = sorted(found.values(), key=lambda cost: cost.traced - cost.planned)
        for cost in single:
            if cost.num_ops == 1 and cost.planned - cost.traced > limit:
                took = seconds(cost.planned - cost.traced)
                rows.append((cost.operator, str(num_axes), took, seconds(limit), shortened(cost.call)))
    return Table("Over the limit", ("op", "axes", "tracing left out", "limit", "call"), rows)


def judged(times: Sequence[float], goal: float) -> Row:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    missed = sum(t > goal for t in times)
    verdict = "pass" if not missed else f"MISS ({missed})"
    shown = (seconds(t) for t in (cuts[49], cuts[89], cuts[98], max(times)))
    return (str(len(times)), *shown, f"≤ {seconds(goal)}", verdict)


COLUMNS = ("op", "ops", "1 axis", "traced", "2 axes", "3 axes", "traced", "call")


def operator_rows(costs: Costs, names: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        of = {num_axes: found.get(name) for num_axes, found in costs.items()}
        last = next(cost for cost in reversed(of.values()) if cost is not None)
        planned = {num_axes: seconds(cost.planned) if cost else "" for num_axes, cost in of.items()}
        traced = {num_axes: seconds(cost.traced) if cost else "" for num_axes, cost in of.items()}
        times = (planned.get(1, ""), traced.get(1, ""), planned.get(2, ""), planned.get(3, ""), traced.get(3, ""))
        rows.append((name, str(last.num_ops), *times, shortened(last.call)))
    return rows


def shortened(text: str, length: int = 48) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[: length - 1]}…"


def worst_first(costs: Costs) -> list[str]:
    names = {name: None for found in costs.values() for name in found}
    return sorted(names, key=lambda name: -max(found[name].planned for found in costs.values() if name in found))


def tables_of(costs: Costs) -> list[Table]:
    order = worst_first(costs)
    common = [name for name in order if name in COMMON]
    return [
        quantile_table(costs),
        *(table for table in [over_limit(costs)] if table.rows),
        Table("The dearest", COLUMNS, operator_rows(costs, order[:NUM_SHOWN])),
        Table("Everyday ones", COLUMNS, operator_rows(costs, common)),
    ]


def write_report(tables: Sequence[Table], costs: Costs, options: argparse.Namespace) -> Path:
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"planning-{today}.md"
    path.parent.mkdir(exist_ok=True)
    about = (__doc__ or "").split("\n\n", 2)[2].replace("\n", " ").strip()
    count = max(len(found) for found in costs.values())
    text = [
        f"# Planning, {today}\n",
        f"{versions([])}, shardwise {sw.__version__}. Of {len(all_operators())} operators {count} have something to "
        f"plan; {options.samples} samples of each; of these and both layouts the dearest; best of {NUM_REPEATS}.\n",
        f"{about}\n",
        *(table.markdown() for table in tables),
    ]
    path.write_text("\n".join(text))
    return path


def profile(name: str, num_samples: int) -> None:
    """Where the time goes, over all calls of one operator on three axes."""
    with fake_world(RANK, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
        watched = cProfile.Profile()
        for _, call in calls_of(mesh, name, num_samples):
            try:
                call()
                caches = memories()
                for _ in range(NUM_REPEATS):
                    forget(caches)
                    watched.runcall(call)
            except Exception as error:  # refused, most likely: the others show the same
                print(f"left out: {error}", file=sys.stderr)
        pstats.Stats(watched).sort_stats("cumulative").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--ops", default=".*", help="operators, by a regular expression for the whole name")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator")
    parser.add_argument("--axes", type=int, nargs="*", default=[1, 2, 3], help="numbers of axes of the meshes to try")
    parser.add_argument("--profile", metavar="OP", help="profile the plans of one operator")
    parser.add_argument("--mesh", type=int, choices=FIRST_CALL_MESHES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.profile:
        return profile(options.profile, options.samples)
    if options.mesh:
        return print_costs(options.mesh, options.ops, options.samples)
    costs = {num_axes: measured(num_axes, options) for num_axes in options.axes}
    tables = tables_of(costs)
    console = Console()
    console.width = max(console.width, 170)
    for table in tables:
        table.print(console)
    if options.write:
        path = write_report(tables, costs, options)
        console.print(f"written: {path.relative_to(Path(__file__).parent.parent)}")
    return None


if __name__ == "__main__":
    main()
