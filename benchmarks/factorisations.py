"""The GPT of examples/gpt.py for every way to use eight ranks, and four real ones, against one device.

    python benchmarks/factorisations.py            print the table
    python benchmarks/factorisations.py --write    and write benchmarks/results/factorisations-<date>.md

Eight ranks are simulated; four are processes joined by Gloo. A difference is the largest, over all steps, of the losses
and of the gradient norms, as parts of those of one device. The step is captured, too: node by node it is, bit for bit,
the step; after passes it sends no more, and sums of three or more real ranks may be rounded otherwise where collectives
were joined; and what Inductor makes of it is compared. Collectives are those of a step.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import shardwise as sw
from race import Row, Table, report
from ranks import on_gloo
from shardwise.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt

AXES, TOLERANCE = ("dp", "shard", "tp"), 1e-4
WAYS = "captured", "with passes", "by Inductor"
Shape = tuple[int, int, int]


def factorisations(ranks: int) -> Iterator[Shape]:
    """The ways to write a number of ranks as dp × shard × tp.

    >>> list(factorisations(2))
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for dp in divisors:
        for shard in (n for n in divisors if ranks // dp % n == 0):
            yield dp, shard, ranks // dp // shard


@cache
def one_device(steps: int) -> list[tuple]:
    torch.manual_seed(0)
    positions = torch.arange(gpt.TOKENS).expand(gpt.BATCH, -1)
    return gpt.train(gpt.GPT(), gpt.batches(steps), positions)


Found = tuple[list[tuple], dict[str, int]]
"""Losses and gradient norms, and what was communicated."""


def on_mesh(mesh: Any, steps: int, compiled: Callable[[Any], Any] = gpt.as_it_is) -> Found:
    torch.manual_seed(0)
    model = gpt.parallelize(copy.deepcopy(gpt.GPT()), mesh)
    rows = [sw.Shard(0), sw.Shard(0), sw.Replicate()]

    def lay(x: torch.Tensor) -> torch.Tensor:
        return sw.distribute_tensor(x, mesh, rows, src_data_rank=None)

    positions = lay(torch.arange(gpt.TOKENS).expand(gpt.BATCH, -1).contiguous())
    with CommDebugMode() as comm:
        found = gpt.train(model, gpt.batches(steps), positions, lay, compiled)
    return found, dict(comm.get_comm_counts())


def differences(found: list[tuple], expected: list[tuple]) -> tuple[float, float]:
    ours, theirs = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    loss, norm = ((ours - theirs).abs() / theirs.abs()).amax(0).tolist()
    return loss, norm


def all_ways(mesh: Any, steps: int, *more: str) -> list[Found]:
    """As it is; captured, without passes and after them; and by more backends."""
    plain = partial(sw.compile, backend="fx", passes=())
    ways = [gpt.as_it_is, plain, *(partial(sw.compile, backend=name) for name in ("fx", *more))]
    return [on_mesh(mesh, steps, compiled) for compiled in ways]


def on_rank(shape: Shape, steps: int) -> list[Found]:
    return all_ways(sw.init_device_mesh("cpu", shape, mesh_dim_names=AXES), steps, "inductor")


def row(port: str, shape: Shape, steps: int) -> Row:
    ways = on_gloo(4, on_rank, shape, steps) if port == "Gloo" else all_ways(sw.simulate(shape, AXES), steps)
    (found, counts), (captured, _), *others = ways
    loss, norm = differences(found, one_device(steps))
    off_by = [max(differences(other, found)) for other, _ in others]
    sent, after_passes = (sum(x.values()) / steps for x in (counts, others[0][1]))
    met = max(loss, norm, *off_by) <= TOLERANCE and captured == found and after_passes <= sent
    same = ["yes" if captured == found else "MISS", *("yes" if not x else f"{x:.1e}" for x in off_by)]
    per_step = f"{sent:.4g}", f"{after_passes:.4g}"
    columns = f"{found[-1][0]:.5f}", f"{loss:.1e}", f"{norm:.1e}", *same, *["-"] * (3 - len(same)), *per_step
    return port, *map(str, shape), *columns, "pass" if met else "MISS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row("simulated", shape, options.steps) for shape in factorisations(8)]
    rows += [row("Gloo", shape, options.steps) for shape in factorisations(4)]
    columns = ("ranks", *AXES, "last loss", "loss off by", "norm off by", *WAYS, "collectives", "after passes", "")
    title = f"{options.steps} steps of a GPT; one device: {one_device(options.steps)[-1][0]:.5f}"
    tables = [Table(title, columns, rows)]
    report("factorisations", "One GPT on many meshes", "One thread a rank.", tables, write=options.write)


if __name__ == "__main__":
    main()
