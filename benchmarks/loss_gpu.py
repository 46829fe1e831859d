"""Losses over a sharded vocabulary on a GPU: time and memory of one rank's share, beside others.

    python benchmarks/loss_gpu.py --write                and write benchmarks/results/loss-gpu-<date>.md; minutes
    python benchmarks/loss_gpu.py --liger F              beside liger-kernel, whose wheel, or its contents, F is
    python benchmarks/loss_gpu.py --device cpu --tiny    tries all of it where there is no GPU

One process is rank 1 of 8 in torch's fake process group, whose collectives return at once and move nothing; that its
numbers are right, tests/gpu/test_losses.py proves. The systems take turns in short slices, each round in another
order; a ratio is the median of the ratios within the rounds. "A read and a write" copies the local logits. Extra memory
is what a call adds at its peak to what was there before it, gradients included. Captured, a loss and its backward pass
are a CUDA graph, which the host does not slow. Most of the time is the compilers': first several processes run
everything once, so that it is compiled; then one after the other measures, with nothing beside it. A missed target
prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import multiprocessing
import platform
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from on_device import clock_of, measure_memory
from race import Call, Table, Timing, race, seconds
from ranks import fake_world
from shardwise.parallel import cross_entropy, linear_cross_entropy

NUM_RANKS, RANK, WIDTH = 8, 1, 4096
CASE = (8192, 128256)
SHAPES = (
    *((64, 1000), (64, 32000), (64, 128256), (64, 262144)),
    *((1024, 1000), (1024, 32000), (1024, 50257), (1024, 151936)),
    *((4096, 8192), (4096, 50304), (4096, 256000), (8192, 32000)),
    *((16384, 65536), (16384, 128256), (32768, 128256), (32768, 262144)),
)
HOST_BOUND = 1 << 28
"""Of fewer logits a loss takes the host longer than the device: these are captured, too."""
CHUNKS = (256, 512, 1024, 2048)
TOKENS = (4096, 8192, 16384, 32768)
COPY, PLAIN, TORCH, LIGER = "a read and a write", "plain, local size", "torch's loss_parallel", "liger-kernel"
OURS, Z_LOSS, IN_PLACE = "F.cross_entropy", "with z-loss", "gradient in place of logits"
OURS_CAPTURED, IN_PLACE_CAPTURED = f"{OURS}, captured", f"{IN_PLACE}, captured"
SHOWN = OURS, IN_PLACE, OURS_CAPTURED
HEAD = "linear_cross_entropy"
LIMITS = {OURS: (0.45e-3, 1.05), IN_PLACE: (0.30e-3, 0.05)}
HEAD_LIMIT, SHAPE_LIMIT = (5.5e-3, 0.20e9), 1.5


@dataclass
class Bench:
    """What is measured on, and what could not be run."""

    mesh: DeviceMesh
    num_rounds: int
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def runnable(self, systems: dict[str, Callable[[], Program]]) -> dict[str, Callable[[], Program]]:
        """Those that run at all: one failure must not hide the others."""
        found = {}
        for name, start in systems.items():
            try:
                start().run()
                found[name] = start
            except Exception as error:  # whatever a library under test raises
                self.failures.append(
                    f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
        return found

    def times(self, systems: dict[str, Callable[[], Program]]) -> dict[str, Timing]:
        programs = {name: start() for name, start in systems.items()}
        runs: dict[str, Call] = {name: program.run for name, program in programs.items()}
        return race(runs, num_rounds=self.num_rounds, clock=clock_of(self.device))

    def extra(self, start: Callable[[], Program]) -> int:
        """Bytes beyond what is there before a call."""
        if self.device.type != "cuda":
            return 0

        def begun() -> tuple[Call, Call]:
            program = start()
            return program.run, program.forget

        return measure_memory(begun).work


@dataclass
class Program:
    """A loss and its backward pass, and the leaves whose gradients it leaves."""

    loss: Callable[[], Tensor]
    leaves: list[Tensor]

    def run(self) -> None:
        self.forget()
        self.loss().backward()

    def forget(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


class Fresh(torch.autograd.Function):
    """The same memory as a result that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Captured(Program):
    """The same, as a captured program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.loss, program.leaves)
        self.compiled = sw.compile(lambda: self.loss().backward(), cuda_graph="auto")

    def run(self) -> None:
        self.forget()
        self.compiled()


class Copy:
    """One read and one write."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.out = x, torch.empty_like(x)

    def run(self) -> None:
        self.out.copy_(self.x)

    def forget(self) -> None:
        """It leaves nothing."""


def logits_of(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, -(-classes // NUM_RANKS), device=device).to(dtype)


def targets_of(rows: int, classes: int, device: torch.device) -> Tensor:
    return torch.randint(classes, (rows,), device=device)


# Cross entropy


def losses(bench: Bench, rows: int, classes: int, dtype: torch.dtype, liger: Any) -> dict[str, Callable[[], Any]]:
    target = targets_of(rows, classes, bench.device)
    local = target % -(-classes // NUM_RANKS)
    made = partial(logits_of, rows, classes, dtype, bench.device)

    def plain() -> Program:
        x = made().requires_grad_()
        return Program(lambda: F.cross_entropy(x, local), [x])

    def ours(loss: Callable[..., Tensor], fresh: bool = False, **options: Any) -> Program:
        whole = sw.DTensor.from_local(target, bench.mesh, [sw.Replicate()])
        leaf = made().requires_grad_()
        shape = (rows, classes)
        if not fresh:
            x = sw.DTensor.from_local(leaf.detach(), bench.mesh, [sw.Shard(1)], shape=shape).requires_grad_()
            return Program(lambda: loss(x, whole, **options), [x])

        def of_result() -> Tensor:
            x = sw.DTensor.from_local(Fresh.apply(leaf), bench.mesh, [sw.Shard(1)], shape=shape)
            return loss(x, whole, **options)

        return Program(of_result, [leaf])

    systems: dict[str, Callable[[], Any]] = {
        COPY: lambda: Copy(made()),
        PLAIN: plain,
        OURS: partial(ours, F.cross_entropy),
        Z_LOSS: partial(ours, cross_entropy, z_loss=1e-4),
        IN_PLACE: partial(ours, cross_entropy, fresh=True, inplace_backward=True),
        OURS_CAPTURED: lambda: Captured(ours(F.cross_entropy)),
        IN_PLACE_CAPTURED: lambda: Captured(ours(cross_entropy, fresh=True, inplace_backward=True)),
        TORCH: partial(with_torch, bench, made, target, (rows, classes)),
    }
    if liger is not None:
        systems[LIGER] = partial(with_liger, liger, made, target)
    return systems


def with_torch(bench: Bench, made: Callable[[], Tensor], target: Tensor, shape: tuple[int, int]) -> Program:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    x = DTensor.from_local(made(), bench.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
    x, whole = x.requires_grad_(), DTensor.from_local(target, bench.mesh, [Replicate()], run_check=False)

    class InContext(Program):
        def run(self) -> None:
            self.forget()
            with loss_parallel():
                self.loss().backward()

    return InContext(lambda: F.cross_entropy(x, whole), [x])


def with_liger(liger: Any, made: Callable[[], Tensor], target: Tensor) -> Program:
    x = made().unsqueeze(1).requires_grad_()
    function = importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy").LigerVocabParallelCEFunction
    given = target.unsqueeze(1), dist.group.WORLD, -100, 0.0, "pytorch", "global"
    return Program(lambda: function.apply(x, *given).mean(), [x])


def cross_entropies(bench: Bench, case: tuple[int, int], liger: Any) -> Table:
    rows, classes = case
    systems = bench.runnable(losses(bench, rows, classes, torch.bfloat16, liger))
    timings = bench.times(systems)
    whole = logits_of(rows, classes, torch.bfloat16, torch.device("meta")).nbytes
    table = []
    for name, timing in timings.items():
        extra = bench.extra(systems[name])
        time_limit, memory_limit = LIMITS.get(name, (None, None))
        held = time_limit is None or (timing.median <= time_limit and extra <= memory_limit * whole)
        table.append(
            (
                name,
                seconds(timing.median),
                f"{timing.ratio_to(timings[COPY]):.2f}",
                f"{extra / whole:.2f}",
                "" if time_limit is None else f"{seconds(time_limit)}, {memory_limit:.2f}",
                "" if time_limit is None else "pass" if held else "MISS",
            )
        )
    title = f"Cross entropy, {rows} × {classes:,} classes over {NUM_RANKS} ranks, bfloat16, forward and backward"
    return Table(title, ("system", "time", "/ read and write", "extra / logits", "limits", ""), table)


def shapes(bench: Bench, cases: tuple[tuple[int, int], ...]) -> Table:
    table = []
    for rows, classes in cases:
        for dtype in (torch.float32, torch.bfloat16):
            systems = losses(bench, rows, classes, dtype, None)
            shown = [name for name in SHOWN if name != OURS_CAPTURED or rows * classes < HOST_BOUND]
            systems = bench.runnable({name: systems[name] for name in (COPY, PLAIN, *shown)})
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()  # others need room, too
            timings = bench.times(systems)
            ratios = {name: timing.ratio_to(timings[COPY]) for name, timing in timings.items()}
            table.append(
                (
                    f"{rows} × {classes:,}",
                    str(dtype).removeprefix("torch."),
                    seconds(timings[COPY].median),
                    *(f"{ratios[name]:.2f}" if name in ratios else "" for name in (PLAIN, *SHOWN)),
                    f"{SHAPE_LIMIT}",
                    "pass" if ratios.get(OURS, 99) <= SHAPE_LIMIT else "MISS",
                )
            )
    columns = ("tokens × classes", "", "a read and a write", "plain", *SHOWN, "limit", "")
    return Table("Other shapes, as multiples of a read and a write", columns, table)


# A head and its loss


def heads(bench: Bench, rows: int, classes: int, width: int, liger: Any) -> dict[str, Callable[[], Any]]:
    local, device = -(-classes // NUM_RANKS), bench.device
    target = targets_of(rows, classes, device)

    def inputs() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x, layer = torch.randn(rows, width, device=device), torch.randn(local, width, device=device) / width**0.5
        return x.bfloat16().requires_grad_(), layer.bfloat16().requires_grad_()

    def products() -> Program:
        x, layer = inputs()
        grad = torch.ones(rows, local, device=device, dtype=x.dtype)

        def run() -> Tensor:
            with torch.no_grad():
                _ = x @ layer.t(), grad @ layer, grad.t() @ x
            return torch.zeros((), requires_grad=True)

        return Program(run, [])

    def materialised() -> Program:
        x, layer = inputs()
        return Program(lambda: F.cross_entropy(F.linear(x, layer), target % local), [x, layer])

    def ours(**options: Any) -> Program:
        x, layer = (each.detach() for each in inputs())
        x = sw.DTensor.from_local(x, bench.mesh, [sw.Replicate()]).requires_grad_()
        shape = (classes, width)
        layer = sw.DTensor.from_local(layer, bench.mesh, [sw.Shard(0)], shape=shape).requires_grad_()
        whole = sw.DTensor.from_local(target, bench.mesh, [sw.Replicate()])
        return Program(lambda: linear_cross_entropy(x, layer, whole, **options), [x, layer])

    systems: dict[str, Callable[[], Any]] = {
        "three products of matrices": products,
        "materialised logits, plain": materialised,
        HEAD: ours,
        **{f"{HEAD}, chunks of {chunk}": partial(ours, chunk_size=chunk) for chunk in CHUNKS if chunk <= rows},
        f"{HEAD}, added up in float32": partial(ours, acc_dtype=torch.float32),
        f"{HEAD}, a loss for each row": lambda: summed(ours(reduction="none")),
    }
    if liger is not None:
        systems[f"{LIGER}, fused, in portable form"] = partial(with_ligers_head, inputs, target)
    return systems


def summed(program: Program) -> Program:
    return Program(lambda: program.loss().sum(), program.leaves)


def with_ligers_head(inputs: Callable[[], tuple[Tensor, Tensor]], target: Tensor) -> Program:
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    x, layer = inputs()
    loss = module._apply_tp_fallback
    return Program(lambda: loss(x, layer, target, 1.0, -100, False, dist.group.WORLD).mean(), [x, layer])


def head_table(bench: Bench, case: tuple[int, int], width: int, liger: Any) -> Table:
    systems = bench.runnable(heads(bench, *case, width, liger))
    timings = bench.times(systems)
    first = timings["three products of matrices"]
    table, gradients = [], 2 * width * (case[0] + -(-case[1] // NUM_RANKS))
    for name, timing in timings.items():
        extra = bench.extra(systems[name])
        beyond = "" if timing is first else f"{(extra - gradients) / 1e9:.3f} GB"
        held = timing.median <= HEAD_LIMIT[0] and extra <= HEAD_LIMIT[1]
        limits = (f"{seconds(HEAD_LIMIT[0])}, 0.20 GB", "pass" if held else "MISS") if name == HEAD else ("", "")
        each = seconds(timing.median), f"{timing.ratio_to(first):.2f}", f"{extra / 1e9:.3f} GB", beyond
        table.append((name, *each, *limits))
    title = f"A head and its loss: {case[0]} × {width} × {case[1]:,} classes over {NUM_RANKS} ranks, bfloat16"
    return Table(title, ("system", "time", "/ products", "extra, with gradients", "without", "limits", ""), table)


def growth(bench: Bench, tokens: tuple[int, ...], classes: int, width: int) -> Table:
    table = []
    for rows in tokens:
        extra = bench.extra(heads(bench, rows, classes, width, None)[HEAD])
        gradients = 2 * width * (rows + -(-classes // NUM_RANKS))
        table.append((f"{rows}", f"{extra / 1e6:.1f}", f"{gradients / 1e6:.1f}", f"{(extra - gradients) / 1e6:.1f}"))
    return Table("Memory by tokens, in megabytes", ("tokens", "extra", "gradients", "the rest"), table)


# The command


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    kind: str
    options: argparse.Namespace
    liger: Path | None
    shapes: tuple[tuple[int, int], ...] = ()

    def tables(self, bench: Bench) -> list[Table]:
        tiny, liger = self.options.tiny, None
        if self.liger is not None:
            sys.path.insert(0, str(self.liger))
            liger = importlib.import_module("liger_kernel")
        case = (64, 1000) if tiny else CASE
        width, tokens = (32, (64, 128)) if tiny else (WIDTH, TOKENS)
        if self.kind == "loss":
            return [cross_entropies(bench, case, liger)]
        if self.kind == "head":
            return [head_table(bench, case, width, liger), growth(bench, tokens, case[1], width)]
        return [shapes(bench, self.shapes)]


def measured(job: Job) -> tuple[list[Table], list[str]]:
    """Its tables, and what could not be run."""
    warnings.filterwarnings("ignore", message=".*DTensor.*")
    torch.set_num_threads(1)
    with fake_world(RANK, NUM_RANKS):
        mesh = init_device_mesh(job.options.device, (NUM_RANKS,), mesh_dim_names=("tp",))
        bench = Bench(mesh, job.options.rounds)
        return job.tables(bench), bench.failures


def jobs_of(options: argparse.Namespace, liger: Path | None) -> list[Job]:
    cases = ((8, 100), (16, 257)) if options.tiny else SHAPES
    n = options.jobs
    parts = [Job("shapes", options, None, cases[at::n]) for at in range(n) if cases[at::n]]
    return [Job("loss", options, liger), Job("head", options, liger), *parts]


def joined(tables: list[Table]) -> list[Table]:
    """Tables of one title as one, with rows in the order of the shapes."""
    found: dict[str, Table] = {}
    for table in tables:
        before = found.get(table.title)
        found[table.title] = table if before is None else replace(before, rows=before.rows + table.rows)
    order = [f"{rows} × {classes:,}" for rows, classes in SHAPES]
    for table in found.values():
        table.rows.sort(key=lambda row: order.index(row[0]) if row[0] in order else 0)
    return sorted(found.values(), key=lambda table: table.title)


@contextlib.contextmanager
def unpacked(wheel: Path | None) -> Iterator[Path | None]:
    """The folder that a library is in, unpacked: Triton reads the source of its programs from files."""
    with tempfile.TemporaryDirectory() as folder:
        if wheel is not None and wheel.is_file():
            zipfile.ZipFile(wheel).extractall(folder)
        yield Path(folder) if wheel is not None and wheel.is_file() else wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the report")
    parser.add_argument("--liger", type=Path, help="the wheel of liger-kernel, or a folder with its contents")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run, for trying this out")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per measurement")
    parser.add_argument("--jobs", type=int, default=5, help="processes that compile shapes; two more, the rest")
    options = parser.parse_args()
    console, tables, failures = Console(width=180), list[Table](), list[str]()
    with unpacked(options.liger) as liger:
        jobs = jobs_of(options, liger)
        once = argparse.Namespace(**{**vars(options), "rounds": 1})
        with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(measured, [replace(job, options=once) for job in jobs]))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for found, failed in pool.map(measured, jobs):
                tables, failures = joined([*tables, *found]), [*failures, *failed]
                for table in found:
                    table.print(console)
                if options.write:  # as they come, so that a run that is cut short has what it has measured
                    write(options, tables, failures)
    for failure in failures:
        console.print(f"could not be run: {failure}", style="yellow", markup=False)


def write(options: argparse.Namespace, tables: list[Table], failures: list[str]) -> None:
    today = datetime.date.today()
    on_cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if on_cuda else "CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    versions += f", Triton {importlib.import_module('triton').__version__}" if on_cuda else ""
    text = f"# Losses over a sharded vocabulary, {today}\n\n{versions}, {device}; rank {RANK} of {NUM_RANKS} in a fake "
    text += f"group; {options.rounds} interleaved rounds.\n\n" + "\n".join(table.markdown() for table in tables)
    if failures:
        text += "\n## Could not be run\n\n" + "\n".join(f"- {failure}" for failure in failures) + "\n"
    (options.out / f"loss-gpu-{today}.md").write_text(text)


if __name__ == "__main__":
    main()
