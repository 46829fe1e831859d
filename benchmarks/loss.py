"""Losses over a sharded vocabulary on a CPU: time and memory of one rank's share, beside plain torch on the local size.

    python benchmarks/loss.py            about four minutes
    python benchmarks/loss.py --write    and write benchmarks/results/loss-<date>.md

As benchmarks/loss_gpu.py does it: one process is rank 1 of 8 in torch's fake process group, and the systems take turns
in short slices. Time is the processor's, so that others on the machine count for less; a ratio is the median of the
ratios within the rounds. Memory is what torch's allocator tells its profiler: the most that a loss and its backward
pass add, gradients included. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from loss_gpu import HEAD, IN_PLACE, NUM_RANKS, OURS, PLAIN, RANK, Bench, Program, heads, losses, targets_of
from race import Call, Table, options_of, race, report, seconds, work_per_call
from ranks import fake_world

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from saved import on_cpu

SHAPES = ((64, 1000), (64, 32000), (256, 8000), (512, 32000), (1024, 128256), (4096, 32000))
SHAPES_OF_BATCHES = ((64, 125), (64, 4000), (512, 4000), (512, 32000))
TOKENS, CLASSES, WIDTH = (2048, 4096, 8192), 32000, 256
MATERIALISED = "materialised logits, plain"
LIMIT = 1.1


def peak(start: Callable[[], Program]) -> int:
    program = start()
    program.run()
    program.forget()
    return on_cpu(program.run)[1]


def cross_entropies(bench: Bench) -> Table:
    table = []
    for rows, classes in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            systems = losses(bench, rows, classes, dtype, None)
            systems = {name: systems[name] for name in (PLAIN, OURS, IN_PLACE)}
            programs = {name: start() for name, start in systems.items()}
            runs: dict[str, Call] = {name: program.run for name, program in programs.items()}
            timings = race(runs, num_rounds=bench.num_rounds, clock=work_per_call)
            ratios = [timings[name].ratio_to(timings[PLAIN]) for name in (OURS, IN_PLACE)]
            whole = rows * -(-classes // NUM_RANKS) * dtype.itemsize
            table.append(
                (
                    f"{rows} × {classes:,}",
                    str(dtype).removeprefix("torch."),
                    seconds(timings[PLAIN].median),
                    *(f"{ratio:.2f}" for ratio in ratios),
                    *(f"{peak(systems[name]) / whole:.2f}" for name in (PLAIN, OURS, IN_PLACE)),
                    "pass" if ratios[0] <= LIMIT else "MISS",
                )
            )
    memory = [f"{name}, memory" for name in ("plain", "ours", "in place")]
    columns = ("tokens × classes", "", "plain", "ours / plain", "in place / plain", *memory, f"limit {LIMIT}")
    title = "Cross entropy, forward and backward: time, and memory as multiples of the local logits"
    return Table(title, columns, table)


def losses_of_batches(bench: Bench) -> Table:
    """Of a data parallel program: a rank has some of the rows, and all classes of these."""
    table = []
    for rows, classes in SHAPES_OF_BATCHES:
        for reduction in ("mean", "sum"):
            target, logits = targets_of(rows, classes, bench.device), torch.randn(rows, classes)
            leaf = logits.requires_grad_()
            x, whole = (sw.DTensor.from_local(v, bench.mesh, [sw.Shard(0)]) for v in (logits.detach(), target))
            x.requires_grad_()
            plain = Program(partial(F.cross_entropy, leaf, target, reduction=reduction), [leaf])
            ours = Program(partial(F.cross_entropy, x, whole, reduction=reduction), [x])
            timings = race({PLAIN: plain.run, OURS: ours.run}, num_rounds=bench.num_rounds, clock=work_per_call)
            row = f"{rows} × {classes:,}", reduction, seconds(timings[PLAIN].median)
            table.append((*row, f"{timings[OURS].ratio_to(timings[PLAIN]):.2f}"))
    columns = ("rows × classes of a rank", "", "plain", "ours / plain")
    return Table(f"Rows over {NUM_RANKS} ranks, and classes whole, forward and backward, float32", columns, table)


def head_losses(bench: Bench) -> Table:
    table = []
    for rows in TOKENS:
        systems = heads(bench, rows, CLASSES, WIDTH, None)
        systems = {name: systems[name] for name in (MATERIALISED, HEAD)}
        programs = {name: start() for name, start in systems.items()}
        runs: dict[str, Call] = {name: program.run for name, program in programs.items()}
        timings = race(runs, num_rounds=bench.num_rounds, clock=work_per_call)
        gradients = 2 * WIDTH * (rows + -(-CLASSES // NUM_RANKS))
        most = [peak(systems[name]) - gradients for name in (MATERIALISED, HEAD)]
        plain, ours = (timings[name] for name in (MATERIALISED, HEAD))
        sizes = [f"{size / 1e6:.1f} MB" for size in (gradients, *most)]
        table.append((f"{rows}", seconds(plain.median), f"{ours.ratio_to(plain):.2f}", *sizes))
    columns = ("tokens", MATERIALISED, "ours / plain", "gradients", "the rest, plain", "the rest, ours")
    return Table(
        f"A head and its loss: width {WIDTH}, {CLASSES:,} classes over {NUM_RANKS} ranks, bfloat16", columns, table
    )


def main() -> None:
    options = options_of(__doc__, num_rounds=9).parse_args()
    torch.set_num_threads(1)
    with fake_world(RANK, NUM_RANKS):
        bench = Bench(init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",)), options.rounds)
        tables = [cross_entropies(bench), losses_of_batches(bench), head_losses(bench)]
    about = f"One thread; rank {RANK} of {NUM_RANKS} in a fake group; {options.rounds} interleaved rounds."
    report("loss", "Losses over a sharded vocabulary on a CPU", about, tables, write=options.write)


if __name__ == "__main__":
    main()
