"""A captured train step of a tensor-parallel block on a GPU, beside the same by hand and by torch's DTensor, compiled.

    python benchmarks/captured_gpu.py                       time on the GPU; minutes, most of them the compilers'
    python benchmarks/captured_gpu.py --write               and write benchmarks/results/captured-gpu-<date>.md
    python benchmarks/captured_gpu.py --device cpu --tiny   tries all of it where there is no GPU

One process is rank 1 of 4 in torch's fake process group, whose collectives return at once. A step is forward, backward
and AdamW (foreach). The blocks are those of real_sizes.py; compiled by torch, that is forward and backward by one
torch.compile and the optimizer's step by another. The systems take turns in short slices; a ratio is the median of the
ratios within the rounds. A missed limit prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from on_device import clock_of
from race import Call, Row, Table, Timing, race, seconds
from real_models import PLAIN, SHARDWISE, TORCH, VARIANTS, Case, Work, whole_block
from real_sizes import NUM_RANKS, fake_mesh, quieten_torch, versions
from scheduled import Size
from transformer import Block

COMPILED = f"{PLAIN}, compiled"
CAPTURED, GRAPH = "captured, Inductor", "captured, CUDA graph"
BEST = "captured, auto"
SIZES = (
    Size(1, 512, 1024, tp=NUM_RANKS),
    Size(1, 4096, 4096, tp=NUM_RANKS),
    Size(1, 4096, 8192, tp=NUM_RANKS),
)
TINY = (Size(1, 16, 64, tp=NUM_RANKS),)
VARIANT = "RMSNorm, no biases"


def limit(size: Size) -> tuple[float, str]:
    """How many times as long as another system a captured step may take."""
    return (1.0, COMPILED) if size.width >= 4096 else (0.15, PLAIN)


# --- The systems ---


def foreach_work(system: str, case: Case, whole: Block) -> Work:
    work = Work(system, case, whole)
    work.optimizer = torch.optim.AdamW(work.parameters, lr=1e-9, weight_decay=0.0, foreach=True)
    return work


def step_of(
    work: Work, block: Callable[[Tensor], Tensor], optimizer_step: Callable[[], Any]
) -> Callable[[Tensor], None]:
    optimizer, gradient = work.optimizer, work.gradient

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        x.grad = None
        block(x).backward(gradient)
        optimizer_step()

    return step


def made(system: str, case: Case, whole: Block) -> Call:
    """A call that makes one step, on the next of some inputs."""
    owner = next(name for name in (TORCH, PLAIN, SHARDWISE) if system.startswith(name) or name == SHARDWISE)
    work = foreach_work(owner, case, whole)
    as_it_is = step_of(work, work.block, work.optimizer.step)
    if system in (PLAIN, TORCH, SHARDWISE):
        step = as_it_is
    elif owner != SHARDWISE:
        step = step_of(work, torch.compile(work.block), torch.compile(work.optimizer.step))
    elif system == CAPTURED:
        step = sw.compile(as_it_is, cuda_graph=False)
    elif system == GRAPH:
        step = sw.compile(as_it_is, cuda_graph=True)
    else:
        step = sw.compile(as_it_is)
    turns = itertools.cycle(work.inputs)
    return lambda: step(next(turns))


def measured(case: Case, num_rounds: int, failures: list[str]) -> dict[str, Timing]:
    whole, calls = whole_block(case), {}
    systems = [PLAIN, COMPILED, TORCH, f"{TORCH}, compiled", SHARDWISE, CAPTURED, BEST]
    for system in [*systems, GRAPH] if case.device.type == "cuda" else systems:
        try:
            call = made(system, case, whole)
            for _ in range(6):  # each of the inputs, captured or compiled
                call()
        except Exception as error:  # whatever a system under test raises
            failures.append(f"{case.size}, {system}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        else:
            calls[system] = call
    return race(calls, num_rounds=num_rounds, clock=clock_of(case.device))


# --- The report ---


def table_of(size: Size, timings: dict[str, Timing]) -> Table:
    columns = ("system", "time", f"x {PLAIN}", f"x {COMPILED}", "limit", "")
    rows = [row_of(size, system, timing, timings) for system, timing in timings.items()]
    return Table(f"{size}, {VARIANT}: train step", columns, rows)


def row_of(size: Size, system: str, timing: Timing, timings: dict[str, Timing]) -> Row:
    ratios = {to: timing.ratio_to(timings[to]) for to in (PLAIN, COMPILED) if to in timings}
    most, of = limit(size)
    judged = (
        (f"≤ {most} x {of}", "pass" if ratios[of] <= most else "MISS") if system == BEST and of in ratios else ("", "")
    )
    return (
        system,
        seconds(timing.median),
        *(f"{ratios[to]:.3f}" if to in ratios else "-" for to in (PLAIN, COMPILED)),
        *judged,
    )


def write_report(out: Path, tables: list[Table], failures: list[str], mesh: DeviceMesh) -> Path:
    today = datetime.date.today()
    path = out / f"captured-gpu-{today}.md"
    text = [f"# Captured steps on a GPU, {today}\n", f"{versions(torch.device(mesh.device_type))}.\n"]
    text += [table.markdown() for table in tables]
    if failures:
        text += ["## Could not be run\n", *(f"- {failure}" for failure in failures), ""]
    path.write_text("\n".join(text))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the report")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run, for trying this out")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quieten_torch()
    warnings.simplefilter("ignore")
    console, failures, tables = Console(width=150), list[str](), []
    with fake_mesh(1, options.device) as mesh:
        console.print(versions(torch.device(options.device)))
        for size in TINY if options.tiny else SIZES:
            dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
            case = Case(size, VARIANTS[VARIANT], mesh, dtype)
            tables.append(table_of(size, measured(case, options.rounds, failures)))
            tables[-1].print(console)
            torch.compiler.reset()
            gc.collect()
        for failure in failures:
            console.print(f"could not be run: {failure}", style="yellow", markup=False)
        if options.write:
            console.print(f"written: {write_report(options.out, tables, failures, mesh).name}")


if __name__ == "__main__":
    sys.exit(main())
