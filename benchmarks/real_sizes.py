"""A tensor-parallel transformer block at the sizes people train, against the same written by hand on plain tensors.

    python benchmarks/real_sizes.py                       time and peak memory on the GPU; minutes
    python benchmarks/real_sizes.py --write --json F      and write results/real-sizes-<date>.md, and every sample
    python benchmarks/real_sizes.py --profile             instead, the kernels of one size, counted and compared
    python benchmarks/real_sizes.py --device cpu --tiny   tries all of it where there is no GPU

One process is rank 1 of 4 in torch's fake process group, whose collectives return at once. "By hand" is Megatron's
block: plain tensors of the sizes that one rank computes, the same all-reduces in the same places. The systems take
turns in short slices, each round in another order; a ratio is the median of the ratios within the rounds. A missed
limit prints MISS; the exit status stays 0, unless `--check` is given.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from on_device import Kernels, Memory, clock_of, host_seconds, kernels_of, measure_memory
from race import Call, Row, Table, Timing, race, seconds
from ranks import fake_world
from real_models import PLAIN, PROGRAMS, SHARDWISE, SYSTEMS, TORCH, VARIANTS, Case, Work, whole_block
from scheduled import Size
from transformer import Block

NUM_RANKS = 4
SIZES = (
    Size(1, 4096, 4096, tp=NUM_RANKS),
    Size(4, 1024, 4096, tp=NUM_RANKS),
    Size(1, 4096, 8192, tp=NUM_RANKS),
    Size(1, 512, 1024, tp=NUM_RANKS),
    Size(1, 16, 64, tp=NUM_RANKS),
)
TINY = (Size(1, 16, 64, tp=NUM_RANKS), Size(4, 8, 128, tp=NUM_RANKS))
PEAK_LIMIT = 1.02


def time_limit(size: Size) -> float | None:
    """How many times as long as by hand Shardwise may take; toy sizes are measured in benchmarks/overhead.py."""
    if size.width >= 4096:
        return 1.05
    return 1.3 if size.width >= 1024 else None


# --- Measuring ---


@dataclass
class Result:
    """What one program took in one case, in each system that could run it."""

    size: Size
    variant: str
    program: str
    timings: dict[str, Timing]
    host: dict[str, Timing] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)

    def judged(self) -> list[tuple[float, float]]:
        """What Shardwise took, as a multiple of what it took by hand, beside the limit of that."""
        limit, found = time_limit(self.size), []
        if limit is not None and SHARDWISE in self.timings:
            found.append((self.timings[SHARDWISE].ratio_to(self.timings[PLAIN]), limit))
        if limit is not None and SHARDWISE in self.memory:
            found.append((self.memory[SHARDWISE].peak / self.memory[PLAIN].peak, PEAK_LIMIT))
        return found


@dataclass
class Bench:
    mesh: DeviceMesh
    num_rounds: int
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def case(self, size: Size, variant: str) -> Case:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Case(size, VARIANTS[variant], self.mesh, dtype)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result, or None and a note: one failure must not hide the other results."""
        try:
            return action()
        except Exception as error:  # whatever a library under test raises
            self.failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None

    def measure(self, size: Size, variant: str) -> list[Result]:
        case, what = self.case(size, variant), f"{size}, {variant}"
        whole = whole_block(case)
        works = self.works(what, case, whole)
        results = [
            Result(size, variant, program, *self.times({s: getattr(work, name) for s, work in works.items()}))
            for program, name in PROGRAMS.items()
        ]
        systems = list(works)
        works.clear()
        if self.device.type == "cuda":
            for result in results:
                name = PROGRAMS[result.program]
                result.memory = {s: measure_memory(partial(started, s, case, whole, name)) for s in systems}
        return results

    def works(self, what: str, case: Case, whole: Block) -> dict[str, Work]:
        """Of the systems that can run every program."""

        def working(system: str) -> Work:
            work = Work(system, case, whole)
            for name in PROGRAMS.values():
                getattr(work, name)()
            return work

        found = {system: self.attempt(f"{what}, {system}", partial(working, system)) for system in SYSTEMS}
        return {system: work for system, work in found.items() if work is not None}

    def times(self, calls: dict[str, Call]) -> tuple[dict[str, Timing], dict[str, Timing]]:
        clock = clock_of(self.device)
        timings = race(calls, num_rounds=self.num_rounds, clock=clock)
        if self.device.type != "cuda":
            return timings, {}
        return timings, race(calls, num_rounds=max(3, self.num_rounds // 5), clock=host_seconds)


def started(system: str, case: Case, whole: Block, name: str) -> tuple[Call, Call]:
    work = Work(system, case, whole)
    return getattr(work, name), work.forget_gradients


def check_numbers(bench: Bench, sizes: Sequence[Size]) -> None:
    """What is timed must be the same computation. On rank 0, where nothing is masked, and with sums left undone, as the
    fake group leaves them, both have the same numbers."""
    for size, variant in itertools.product(sizes, VARIANTS):
        case = bench.case(size, variant)
        tolerance = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
        bench.attempt(f"{size}, {variant}, the numbers", partial(same_numbers, case, tolerance))


def same_numbers(case: Case, tolerance: float) -> None:
    whole = whole_block(case)
    expected, found = (numbers(Work(system, case, whole)) for system in (PLAIN, SHARDWISE))
    for name, want in expected.items():
        if name.endswith("key.bias"):
            continue  # attention does not change with it: its gradient is nothing but rounding
        error = torch.dist(found[name].double(), want.double()) / want.double().norm()
        if not error <= tolerance:
            raise ArithmeticError(f"{name} is off by {error:.1e}")


def numbers(work: Work) -> dict[str, Tensor]:
    """The output and all gradients, as this rank has them."""
    x = work.inputs[0]
    out = work.block(x)
    out.backward(work.gradient)
    named = {"output": out.detach(), "the input's gradient": x.grad}
    named |= {f"the gradient of {name}": parameter.grad for name, parameter in work.block.named_parameters()}
    return {name: each.to_local() if isinstance(each, sw.DTensor) else each for name, each in named.items()}


# --- Tables ---

COLUMNS = ("measure", "system", "time", "x by hand", "limit", "host", "peak", "x by hand", "limit", "beyond state", "")


def table_of(results: list[Result]) -> Table:
    first = results[0]
    rows = [row for result in results for row in rows_of(result)]
    return Table(f"{first.size}, {first.variant}", COLUMNS, rows)


def rows_of(result: Result) -> list[Row]:
    return [row_of(result, system, first=system == next(iter(result.timings))) for system in result.timings]


def row_of(result: Result, system: str, *, first: bool) -> Row:
    judged = system == SHARDWISE and time_limit(result.size) is not None
    timing, memory = result.timings[system], result.memory.get(system)
    return (
        result.program if first else "",
        system,
        seconds(timing.median),
        f"{timing.ratio_to(result.timings[PLAIN]):.3f}",
        f"{time_limit(result.size)}" if judged else "",
        seconds(result.host[system].median) if system in result.host else "",
        megabytes(memory.peak) if memory else "",
        f"{memory.peak / result.memory[PLAIN].peak:.3f}" if memory else "",
        f"{PEAK_LIMIT}" if judged and memory else "",
        f"{memory.work / result.memory[PLAIN].work:.3f}" if memory else "",
        verdict(result) if judged else "",
    )


def verdict(result: Result) -> str:
    return "pass" if all(found <= limit for found, limit in result.judged()) else "MISS"


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def kernel_table(title: str, plain: Kernels, ours: Kernels, *, limit: int) -> Table:
    """Those that differ in number first, the rest by time."""

    def order(name: str) -> tuple[bool, float]:
        return plain.counts[name] == ours.counts[name], -max(plain.seconds[name], ours.seconds[name])

    rows: list[Row] = []
    for name in sorted(plain.counts | ours.counts, key=order)[:limit]:
        extra = ours.counts[name] - plain.counts[name]
        counts = (str(plain.counts[name]), str(ours.counts[name]), f"{extra:+d}" if extra else "")
        rows.append((name[:100], *counts, seconds(plain.seconds[name]), seconds(ours.seconds[name])))
    total = [str(kernels.counts.total()) for kernels in (plain, ours)]
    extra = ours.counts.total() - plain.counts.total()
    times = [seconds(sum(kernels.seconds.values())) for kernels in (plain, ours)]
    rows.append(("all", *total, f"{extra:+d}" if extra else "", *times))
    return Table(title, ("op", PLAIN, SHARDWISE, "extra", f"time {PLAIN}", f"time {SHARDWISE}"), rows)


def show_kernels(bench: Bench, size: Size, console: Console) -> None:
    for variant in VARIANTS:
        case = bench.case(size, variant)
        whole, found = whole_block(case), {}
        for system in (PLAIN, SHARDWISE):
            found[system] = kernels_of(Work(system, case, whole).forward_backward, bench.device)
        title = f"Kernels of forward + backward: {size}, {variant}"
        kernel_table(title, found[PLAIN], found[SHARDWISE], limit=40).print(console)


# --- The report ---


def versions(device: torch.device) -> str:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    parts.append(torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread")
    return ", ".join(parts)


def summary(results: list[Result], failures: list[str]) -> str:
    verdicts = [verdict(result) for result in results if result.judged()]
    failed = f", {len(failures)} could not be run or compared" if failures else ""
    return f"Limits: {verdicts.count('pass')} pass, {verdicts.count('MISS')} MISS{failed}."


def write_report(results: list[Result], tables: list[Table], bench: Bench, rank: int, folder: Path) -> Path:
    today = datetime.date.today().isoformat()
    path = folder / f"real-sizes-{today}.md"
    dtype = bench.case(results[0].size, results[0].variant).dtype
    text = [
        f"# A tensor-parallel block at real sizes, {today}\n",
        f"{versions(bench.device)}, {str(dtype).removeprefix('torch.')}. Fake process group, rank {rank} of "
        f"{NUM_RANKS}; {bench.num_rounds} interleaved rounds; ratios are medians of the ratios in each round. "
        'Sizes are batch × tokens × width. "Host" is how long the host takes to launch a call. "Peak" includes '
        'parameters, inputs, optimizer state; "beyond state" is the ratio of what the program adds to them.\n',
        f"{summary(results, bench.failures)}\n",
        *(table.markdown() for table in tables),
    ]
    if bench.failures:
        text += ["## Could not be run or compared\n", *(f"- {failure}" for failure in bench.failures), ""]
    path.write_text("\n".join(text))
    return path


def raw(results: list[Result], bench: Bench, rank: int) -> dict[str, Any]:
    return {
        "versions": versions(bench.device),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "rank": rank,
        "failures": bench.failures,
        "results": [asdict(result) for result in results],
    }


# --- The command ---


@contextmanager
def fake_mesh(rank: int, device: str) -> Iterator[DeviceMesh]:
    with fake_world(rank, NUM_RANKS):
        yield init_device_mesh(device, (NUM_RANKS,), mesh_dim_names=("tp",))


def quieten_torch() -> None:
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the report")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--profile", action="store_true", help="compare the kernels of one size instead")
    parser.add_argument("--check", action="store_true", help="exit with 1 if Shardwise misses a limit or fails")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run, for trying this out")
    parser.add_argument(
        "--size", type=int, action="append", help="only the size of this number, from 0; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds per measurement")
    # Not 0 by default: that one keeps what others must mask.
    parser.add_argument("--rank", type=int, default=1, choices=range(NUM_RANKS))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    quieten_torch()
    console = Console()
    console.width = max(console.width, 150)
    sizes = TINY if options.tiny else SIZES
    sizes = sizes if options.size is None else tuple(sizes[number] for number in options.size)
    if options.profile:
        with fake_mesh(options.rank, options.device) as mesh:
            show_kernels(Bench(mesh, options.rounds), sizes[0], console)
        return 0
    with fake_mesh(0, options.device) as mesh:
        checked = Bench(mesh, options.rounds)
        check_numbers(checked, sizes)
    results, tables = [], []
    with fake_mesh(options.rank, options.device) as mesh:
        bench = Bench(mesh, options.rounds, checked.failures)
        console.print(versions(bench.device))
        for size, variant in itertools.product(sizes, VARIANTS):
            measured = bench.measure(size, variant)
            results += measured
            tables.append(table_of(measured))
            tables[-1].print(console)
            if options.write:  # after each size, so that a run that is cut short has what it has measured
                path = write_report(results, tables, bench, options.rank, options.out)
            gc.collect()
    console.print(summary(results, bench.failures))
    for failure in bench.failures:
        console.print(f"could not be run or compared: {failure}", style="yellow", markup=False)
    if options.json:
        options.json.write_text(json.dumps(raw(results, bench, options.rank)))
    if options.write:
        console.print(f"written: {path}")
    failed = any(TORCH not in failure for failure in bench.failures)
    return int(options.check and (failed or any(verdict(result) == "MISS" for result in results)))


if __name__ == "__main__":
    sys.exit(main())
