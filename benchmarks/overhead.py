"""What Shardwise costs per call, against plain torch and against torch's own DTensor.

    python benchmarks/overhead.py              print the tables
    python benchmarks/overhead.py --write      and write benchmarks/results/overhead-<date>.md
    python benchmarks/overhead.py --profile    instead, the block op by op and function by function

Everything runs in one process on one thread, as rank 1 of 4 in torch's fake process group, whose
collectives return at once: what is left is the cost of the library. The systems take turns in short
slices, so that noise on the machine hits all of them alike. "Plain" is the same model on ordinary
tensors of the sizes that one rank computes. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib
import json
import logging
import platform
import resource
import subprocess
import sys
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import block as blocks
from block import Training
from op_profile import profile
from race import Call, Row, Table, Timing, race, seconds
from ranks import fake_world

PLAIN, TORCH, TORCH_STYLES = "plain", "torch DTensor", "torch styles"
SHARDWISE, SHARDWISE_STYLES = "shardwise", "shardwise styles"

NUM_RANKS = 4
RANK = 1  # not 0: that one keeps what others must mask
SIZES = blocks.Sizes()
NUM_FIRST_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Library:
    """A distributed-tensor library: its tensors, its debug tools, and its module styles, if any."""

    name: str
    tensors: ModuleType
    debug: ModuleType
    parallel: ModuleType | None
    finds_pending_sums: bool

    def block(self, mesh: DeviceMesh) -> blocks.Model:
        if self.finds_pending_sums:
            return blocks.by_hand(self.tensors, mesh, SIZES)
        whole = [self.tensors.Replicate()]

        def reduce(x: Any) -> torch.Tensor:
            return x.redistribute(placements=whole)

        return blocks.by_hand(self.tensors, mesh, SIZES, reduce=reduce)


def load_libraries() -> list[Library]:
    tensor = torch.distributed.tensor
    found = [Library(TORCH, tensor, tensor.debug, tensor.parallel, finds_pending_sums=False)]
    try:
        shardwise = importlib.import_module("shardwise")
        debug = importlib.import_module("shardwise.debug")
    except Exception as error:  # the others can be measured all the same
        print(f"shardwise is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return found
    try:
        parallel = importlib.import_module("shardwise.parallel")
    except ImportError:
        parallel = None
    return [*found, Library(SHARDWISE, shardwise, debug, parallel, finds_pending_sums=True)]


@dataclasses.dataclass(frozen=True)
class Target:
    """At most `limit` times `of`'s median, or at most `limit` milliseconds when `of` is None."""

    limit: float
    of: str | None = None

    def __str__(self) -> str:
        return f"≤ {self.limit:g} ms" if self.of is None else f"≤ {self.limit:g}x {self.of.split()[0]}"

    def is_met(self, timing: Timing, timings: dict[str, Timing]) -> bool:
        if self.of is None:
            return timing.median <= self.limit * 1e-3
        return timing.ratio_to(timings[self.of]) <= self.limit


def verdict(met: bool) -> str:
    return "pass" if met else "MISS"


class Bench:
    """Runs the measurements and notes what a library could not run."""

    def __init__(self, libraries: list[Library], *, num_rounds: int, num_steps: int) -> None:
        self.libraries = libraries
        self.num_rounds = num_rounds
        self.num_steps = num_steps
        self.failures: list[str] = []

    def attempt(self, what: str, system: str, action: Callable[[], Any]) -> Any:
        """The action's result, or None and a note: one failure must not hide the other results."""
        try:
            return action()
        except Exception as error:  # whatever a library under test raises
            self.failures.append(f"{what}, {system}: {type(error).__name__}: {error}")
            return None

    def timing_rows(self, what: str, makers: dict[str, Callable[[], Call]], target: Target | None) -> list[Row]:
        """Makes each system's call, tries it, and races those that work."""

        def working(make: Callable[[], Call]) -> Call:
            call = make()
            call()
            return call

        calls = {system: self.attempt(what, system, partial(working, make)) for system, make in makers.items()}
        timings = race({k: call for k, call in calls.items() if call}, num_rounds=self.num_rounds)
        return rows_of_timings(what, timings, target)


def rows_of_timings(what: str, timings: dict[str, Timing], target: Target | None) -> list[Row]:
    def ratio(system: str, to: str) -> str:
        return f"{timings[system].ratio_to(timings[to]):.2f}" if to in timings else "-"

    rows: list[Row] = []
    for system, timing in timings.items():
        judged = target if system == SHARDWISE else None
        rows.append(
            (
                what if not rows else "",
                system,
                seconds(timing.median),
                seconds(timing.minimum),
                ratio(system, PLAIN),
                ratio(system, TORCH),
                str(judged or ""),
                verdict(judged.is_met(timing, timings)) if judged else "",
            )
        )
    return rows


TIMING_COLUMNS = ("measure", "system", "median", "min", "x plain", "x torch", "target", "")


# --- 1: single ops -------------------------------------------------------------------------------


def op_table(bench: Bench, mesh: DeviceMesh) -> Table:
    local = 8 // NUM_RANKS
    adds = {PLAIN: lambda: add(torch.randn(local, 8), torch.randn(local, 8))}
    linears = {PLAIN: lambda: linear(torch.randn(8, 8), torch.randn(local, 8), torch.randn(local))}
    for library in bench.libraries:
        adds[library.name] = partial(sharded_add, library, mesh)
        linears[library.name] = partial(sharded_linear, library, mesh)
    rows = bench.timing_rows("a + b", adds, Target(0.5, TORCH))
    with torch.no_grad():
        rows += bench.timing_rows("linear, no_grad", linears, None)
    return Table("Single ops: 8x8, split over 4 ranks", TIMING_COLUMNS, rows)


def add(a: torch.Tensor, b: torch.Tensor) -> Call:
    return lambda: a + b


def sharded_add(library: Library, mesh: DeviceMesh) -> Call:
    distribute, split = library.tensors.distribute_tensor, library.tensors.Shard(0)
    return add(distribute(torch.randn(8, 8), mesh, [split]), distribute(torch.randn(8, 8), mesh, [split]))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    return lambda: F.linear(x, weight, bias)


def sharded_linear(library: Library, mesh: DeviceMesh) -> Call:
    distribute, split = library.tensors.distribute_tensor, library.tensors.Shard(0)
    return linear(
        distribute(torch.randn(8, 8), mesh, [library.tensors.Replicate()]),
        distribute(torch.randn(8, 8), mesh, [split]),
        distribute(torch.randn(8), mesh, [split]),
    )


# --- 2 and 3: the transformer block --------------------------------------------------------------


def build_models(bench: Bench, mesh: DeviceMesh) -> dict[str, Training]:
    builders = {PLAIN: partial(blocks.plain, SIZES, NUM_RANKS)}
    for library in bench.libraries:
        builders[library.name] = partial(library.block, mesh)
        if hasattr(library.parallel, "parallelize_module"):
            styles = TORCH_STYLES if library.name == TORCH else SHARDWISE_STYLES
            builders[styles] = partial(blocks.by_styles, library.tensors, library.parallel, mesh, SIZES)
    models = {}
    for system, build in builders.items():
        model = bench.attempt("building the block", system, build)
        if model is not None:
            models[system] = Training.of(model)
    return models


def block_table(bench: Bench, models: dict[str, Training]) -> Table:
    def method(name: str) -> dict[str, Callable[[], Call]]:
        return {system: partial(getattr, training, name) for system, training in models.items()}

    rows = bench.timing_rows("forward + backward", method("forward_backward"), Target(1.40, PLAIN))
    rows += bench.timing_rows("train step, AdamW foreach", method("step"), Target(1.35, PLAIN))
    with torch.no_grad():
        rows += bench.timing_rows("forward, no_grad", method("forward"), Target(2.0, PLAIN))
    title = "Transformer block: width 64, 4 heads, 2 x 8 tokens, tensor parallel over 4 ranks"
    return Table(title, TIMING_COLUMNS, rows)


# --- 4: the first call for a new shape -----------------------------------------------------------

FIRST_CALL_MESHES = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}
FIRST_CALL_TARGETS = {1: Target(1.0), 2: Target(2.0), 3: Target(4.0)}


def first_call_table(bench: Bench) -> Table:
    rows: list[Row] = []
    for num_axes, target in FIRST_CALL_TARGETS.items():
        what = f"mm on a mesh of {' x '.join(map(str, FIRST_CALL_MESHES[num_axes]))}"
        command = [sys.executable, "-W", "ignore", __file__, "--first-call", str(num_axes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            bench.failures.append(f"{what}: {done.stderr.strip().splitlines()[-1]}")
            continue
        answer = json.loads(done.stdout.splitlines()[-1])
        bench.failures += answer["failures"]
        timings = {system: Timing(tuple(samples)) for system, samples in answer["samples"].items()}
        rows += rows_of_timings(what, timings, target)
    return Table("First call for a new shape", TIMING_COLUMNS, rows)


def print_first_calls(bench: Bench, num_axes: int) -> None:
    """Runs in a process of its own, for its world has another size than the other measurements'."""
    mesh = init_device_mesh("cpu", FIRST_CALL_MESHES[num_axes], mesh_dim_names=("i", "j", "k")[:num_axes])
    num_warmups = 3
    what = f"first call of mm on {num_axes} axes"
    samples: dict[str, list[float]] = {}
    for number in range(1, num_warmups + NUM_FIRST_CALLS + 1):
        for library in list(bench.libraries):
            action = partial(first_call, library, mesh, num_rows=8 * number)
            elapsed = bench.attempt(what, library.name, action)
            if elapsed is None:
                bench.libraries.remove(library)
            elif number > num_warmups:
                samples.setdefault(library.name, []).append(elapsed)
    print(json.dumps({"samples": samples, "failures": bench.failures}))


def first_call(library: Library, mesh: DeviceMesh, *, num_rows: int) -> float:
    """Seconds of `a @ b`, with one factor of `ik, kj -> ij` on each axis of the mesh."""
    whole, shard = library.tensors.Replicate(), library.tensors.Shard
    on_axis = [(shard(0), whole), (whole, shard(1)), (shard(1), shard(0))][: mesh.ndim]
    placements_a, placements_b = zip(*on_axis, strict=True)
    a = library.tensors.distribute_tensor(torch.randn(num_rows, 16), mesh, placements_a)
    b = library.tensors.distribute_tensor(torch.randn(16, 24), mesh, placements_b)
    start = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - start


# --- 5: memory -----------------------------------------------------------------------------------

PYTHON_HEAP, RESIDENT = "growth of Python's heap, bytes", "growth of resident memory, bytes"
CACHE_SIZE, CACHE_MISSES = "growth of the plan cache", "misses of the plan cache"
ALIVE = "parameters alive after deletion"
MEMORY_LIMITS = {
    PYTHON_HEAP: 32 * 1024,  # one small object kept per step would be more
    RESIDENT: 1024 * 1024,
    CACHE_SIZE: 0,
    CACHE_MISSES: 0,
    ALIVE: 0,
}


def memory_table(bench: Bench, mesh: DeviceMesh) -> Table:
    """Plain torch is measured too: its growth is the noise of the measurement."""
    builders = {PLAIN: partial(blocks.plain, SIZES, NUM_RANKS)}
    builders |= {library.name: partial(library.block, mesh) for library in bench.libraries}
    cache_infos = {library.name: getattr(library.tensors, "cache_info", None) for library in bench.libraries}
    rows: list[Row] = []
    for system, build in builders.items():
        action = partial(memory_growth, build, cache_infos.get(system), num_steps=bench.num_steps)
        for what, value in (bench.attempt("memory", system, action) or {}).items():
            limit = MEMORY_LIMITS[what]
            judged = (f"≤ {limit:,}", verdict(value <= limit)) if system == SHARDWISE else ("", "")
            rows.append((what, system, f"{value:,}", *judged))
    title = f"Memory over {bench.num_steps} equal train steps of the block"
    return Table(title, ("measure", "system", "found", "target", ""), rows)


def memory_growth(
    build: Callable[[], blocks.Model], cache_info: Callable[[], Any] | None, *, num_steps: int
) -> dict[str, int]:
    training = Training.of(build())
    parameters = [weakref.ref(parameter) for parameter in training.parameters]
    tracemalloc.start()
    try:
        for _ in range(num_steps // 2):  # until free lists and allocators have settled
            training.step()
        before = usage(cache_info)
        for _ in range(num_steps):
            training.step()
        after = usage(cache_info)
    finally:
        tracemalloc.stop()
    del training
    gc.collect()
    alive = sum(parameter() is not None for parameter in parameters)
    return {what: after[what] - before[what] for what in after} | {ALIVE: alive}


def usage(cache_info: Callable[[], Any] | None) -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    caches = {}
    if cache_info is not None:
        info = cache_info()
        caches = {CACHE_SIZE: info.size, CACHE_MISSES: info.misses}
    return {
        PYTHON_HEAP: tracemalloc.get_traced_memory()[0],
        RESIDENT: pages * resource.getpagesize(),
        **caches,
    }


# --- 6 and 7: communication ----------------------------------------------------------------------


def comm_table(bench: Bench, models: dict[str, Training]) -> Table:
    square = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
    rows: list[Row] = []
    for library in bench.libraries:
        pending, split = library.tensors.Partial(), library.tensors.Shard(0)
        measures: dict[str, Callable[[], list[CommRow]]] = {
            "block": partial(block_comms, library, models),
            "(P, P) -> (R, R)": partial(redistribute_comms, library, square, pending),
            "[S0, S0] -> [R, R]": partial(redistribute_comms, library, square, split),
        }
        for what, measure in measures.items():
            for part, counts, wanted in bench.attempt(what, library.name, measure) or []:
                found = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
                judged = (wanted, verdict(is_wanted(counts, wanted)))
                rows.append(
                    (f"{what} {part}".strip(), library.name, found)
                    + (judged if library.name == SHARDWISE else ("", ""))
                )
    return Table("Collectives", ("measure", "system", "found", "target", ""), rows)


CommRow = tuple[str, dict[str, int], str]
TWO_ALL_REDUCES, ONE_COLLECTIVE = "2 all_reduce, no other", "1 collective"


def is_wanted(counts: dict[str, int], wanted: str) -> bool:
    if wanted == TWO_ALL_REDUCES:
        return counts == {"all_reduce": 2}
    return sum(counts.values()) == 1


def block_comms(library: Library, models: dict[str, Training]) -> list[CommRow]:
    """In Megatron's way: forward, an all-reduce after each row-split projection; backward, one
    before each group of column-split projections.
    """
    training = models[library.name]
    training.forward_backward()
    with library.debug.CommDebugMode() as forward:
        loss = training.loss()
    with library.debug.CommDebugMode() as backward:
        loss.backward()
    return [
        ("forward", comm_counts(forward), TWO_ALL_REDUCES),
        ("backward", comm_counts(backward), TWO_ALL_REDUCES),
    ]


def redistribute_comms(library: Library, mesh: DeviceMesh, placement: Any) -> list[CommRow]:
    tensors = library.tensors
    x = tensors.DTensor.from_local(torch.randn(8, 8), mesh, [placement, placement])
    with library.debug.CommDebugMode() as comm:
        x.redistribute(placements=[tensors.Replicate(), tensors.Replicate()])
    return [("", comm_counts(comm), ONE_COLLECTIVE)]


def comm_counts(comm: Any) -> dict[str, int]:
    """Counts by the collective's bare name; torch's keys are operators, `c10d_functional.name`."""
    counts = {str(kind).rpartition(".")[2]: n for kind, n in comm.get_comm_counts().items() if n}
    assert sum(counts.values()) == comm.get_total_counts()
    return counts


# --- The report ----------------------------------------------------------------------------------


def versions(libraries: list[Library]) -> str:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for library in libraries:
        if library.name == SHARDWISE:
            parts.append(f"shardwise {getattr(library.tensors, '__version__', 'unreleased')}")
    return ", ".join([*parts, f"{processor()}, one thread"])


def processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def summary(tables: list[Table], bench: Bench) -> str:
    if all(library.name != SHARDWISE for library in bench.libraries):
        return "Targets: none judged, for shardwise was not measured."
    verdicts = [row[-1] for table in tables for row in table.rows]
    failed = f", {len(bench.failures)} measurements failed" if bench.failures else ""
    return f"Targets: {verdicts.count('pass')} pass, {verdicts.count('MISS')} MISS{failed}."


def write_report(tables: list[Table], bench: Bench) -> Path:
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"overhead-{today}.md"
    path.parent.mkdir(exist_ok=True)
    text = [
        f"# Overhead, {today}\n",
        f"{versions(bench.libraries)}. Fake process group, rank {RANK} of {NUM_RANKS}; "
        f"{bench.num_rounds} interleaved rounds; ratios are medians of the ratios within each round.\n",
        f"{summary(tables, bench)}\n",
        *(table.markdown() for table in tables),
    ]
    if bench.failures:
        text += ["## Could not be run\n", *(f"- {failure}" for failure in bench.failures), ""]
    path.write_text("\n".join(text))
    return path


def quieten_torch() -> None:
    """Hides two remarks of torch's on what is measured here on purpose."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--profile", action="store_true", help="show where the block's time goes")
    parser.add_argument("--rounds", type=int, default=60, help="interleaved rounds per measurement")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the memory measurement")
    parser.add_argument("--first-call", type=int, choices=FIRST_CALL_MESHES, help=argparse.SUPPRESS)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    quieten_torch()
    console = Console()
    console.width = max(console.width, 112)
    bench = Bench(load_libraries(), num_rounds=options.rounds, num_steps=options.steps)

    if options.first_call:
        with fake_world(RANK, torch.Size(FIRST_CALL_MESHES[options.first_call]).numel()):
            print_first_calls(bench, options.first_call)
        return

    with fake_world(RANK, NUM_RANKS):
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        models = build_models(bench, mesh)
        tables: list[Table] = []
        if options.profile:
            by_hand = {system: models[system] for system in (PLAIN, TORCH, SHARDWISE) if system in models}
            profile(by_hand, console, num_rounds=options.rounds)
        else:
            console.print(versions(bench.libraries))
            for measure in (
                lambda: op_table(bench, mesh),
                lambda: block_table(bench, models),
                lambda: first_call_table(bench),
                lambda: comm_table(bench, models),
                lambda: memory_table(bench, mesh),
            ):
                tables.append(measure())
                tables[-1].print(console)
            console.print(summary(tables, bench))
    for failure in bench.failures:
        console.print(f"could not be run: {failure}", style="yellow", markup=False)
    if options.write and tables:
        path = write_report(tables, bench)
        console.print(f"written: {path.relative_to(Path(__file__).parent.parent)}")


if __name__ == "__main__":
    main()
