"""A model saved and loaded, against torch.distributed.checkpoint on torch's DTensor in the same run.

    python benchmarks/checkpoints.py                    print the tables
    python benchmarks/checkpoints.py --write            and write benchmarks/results/checkpoints-<date>.md
    python benchmarks/checkpoints.py --width 256        a smaller model
    python benchmarks/checkpoints.py --profile          instead, where the time of the first rank goes

A GPT of 12 blocks and an embedding, 1 GB in float32, its matrices sharded by rows over four ranks of Gloo, one thread
each; norms are replicated. Systems take turns, in another order every round, in one folder, which is emptied between
them. What is written is flushed to the disk by all of them; what is read comes from the system's cache. "A rank's copy"
is how long training waits for a step that is written in the background. A missed target prints MISS; the exit status
stays 0.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from race import Row, Table, Timing, options_of, report, seconds
from ranks import on_gloo

NUM_BLOCKS, NUM_RANKS, NUM_ROUNDS, WIDTH, VOCABULARY = 12, 4, 9, 1216, 32000
TORCH, COPY = "dcp, torch's DTensor", "a rank's copy"
TARGET = 1.1


@dataclass(frozen=True)
class System:
    """Saves into a folder that is not there yet, and loads from it, a model of its own."""

    model: nn.Module
    save: Callable[[Path], object]
    load: Callable[[Path], object]


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, width)}
    for i in range(NUM_BLOCKS):
        found |= {f"{i}_qkv": (3 * width, width), f"{i}_out": (width, width), f"{i}_norm": (width,)}
        found |= {f"{i}_up": (4 * width, width), f"{i}_down": (width, 4 * width), f"{i}_norm2": (width,)}
    return found


def model(width: int, make: Callable[[Tensor, bool], Tensor]) -> nn.Module:
    """`make` makes a tensor of what a rank has of it, which is a part or, of norms, all."""
    torch.manual_seed(dist.get_rank())
    net = nn.Module()
    for name, shape in shapes(width).items():
        is_whole = len(shape) == 1
        local = torch.ones(shape) if is_whole else torch.rand(shape[0] // NUM_RANKS, *shape[1:])
        net.register_parameter(name, nn.Parameter(make(local, is_whole)))
    return net


def systems(width: int, mesh: DeviceMesh) -> dict[str, System]:
    def of_torch(local: Tensor, is_whole: bool) -> Tensor:
        placement = theirs.Replicate() if is_whole else theirs.Shard(0)
        return theirs.DTensor.from_local(local, mesh, [placement])

    def of_ours(local: Tensor, is_whole: bool) -> Tensor:
        return sw.DTensor.from_local(local, mesh, [sw.Replicate() if is_whole else sw.Shard(0)])

    net, ours = model(width, of_torch), model(width, of_ours)
    step = sw.checkpoint.save_step
    return {
        TORCH: System(net, partial(_dcp_save, net), partial(_dcp_load, net)),
        "dcp, shardwise": System(ours, partial(_dcp_save, ours), partial(_dcp_load, ours)),
        "save_step, load_latest": System(
            ours,
            lambda path: step(path, step=1, background=False, model=ours),
            lambda path: sw.checkpoint.load_latest(path, model=ours),
        ),
        "the same, verify=False": System(
            ours,
            lambda path: step(path, step=1, background=False, model=ours),
            lambda path: sw.checkpoint.load_latest(path, verify=False, model=ours),
        ),
        "checkpoint.save, load": System(
            ours,
            lambda path: sw.checkpoint.save(ours, path),
            lambda path: sw.checkpoint.load(ours, path),
        ),
    }


def _dcp_save(net: nn.Module, path: Path) -> None:
    dcp.save(net.state_dict(), checkpoint_id=path)


def _dcp_load(net: nn.Module, path: Path) -> None:
    dcp.load(net.state_dict(), checkpoint_id=path)


def local_sum(net: nn.Module) -> float:
    return sum(float(p.detach().to_local().double().sum()) for p in net.parameters())


def check(found: dict[str, System], folder: Path) -> None:
    """What was saved is what is loaded."""
    for system in found.values():
        right = local_sum(system.model)
        run(lambda path, save=system.save: save(path), folder / "checked")
        with torch.no_grad():
            for p in system.model.parameters():
                p.to_local().zero_()
        run(system.load, folder / "checked")
        assert local_sum(system.model) == right
        clear(folder / "checked")


def run(call: Callable[[Path], object], path: Path) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of all."""
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    call(path)
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    work = torch.tensor(time.process_time() - worked, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return float(took), float(work)


def clear(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()
    dist.barrier()


Samples = list[tuple[float, float]]
Found = dict[str, dict[str, Samples]]


def measure(found: dict[str, System], folder: Path, num_rounds: int) -> Found:
    samples: Found = {name: {"save": [], "load": []} for name in found}
    copies: Samples = []
    order, chance = list(found), random.Random(0)
    for _ in range(num_rounds):
        chance.shuffle(order)
        for name in order:
            samples[name]["save"].append(run(found[name].save, folder / "one"))
            samples[name]["load"].append(run(found[name].load, folder / "one"))
            clear(folder / "one")
        background = partial(sw.checkpoint.save_step, step=1, model=found["checkpoint.save, load"].model)
        copies.append(run(background, folder / "one"))
        sw.checkpoint.wait()
        clear(folder / "one")
    return {**samples, COPY: {"save": copies}}


def on_rank(folder: Path, width: int, num_rounds: int, profile: bool) -> Found:
    warnings.simplefilter("ignore")
    made = systems(width, init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",)))
    check(made, folder)
    if not profile:
        return measure(made, folder, num_rounds)
    _profile(made, folder)
    return {}


def _profile(made: dict[str, System], folder: Path) -> None:
    for name, system in made.items():
        for what in ("save", "load"):
            with cProfile.Profile() as functions:
                run(getattr(system, what), folder / "one")
            if dist.get_rank() == 0:
                print(f"{name}, {what}")
                pstats.Stats(functions).sort_stats("tottime").print_stats(14)
        clear(folder / "one")


def table(what: str, found: Found, num_bytes: int) -> Table:
    base, base_work = timings(found[TORCH][what])
    rows: list[Row] = []
    for name, both in found.items():
        if what not in both:
            continue
        wall, work = timings(both[what])
        ratio, targeted = wall.ratio_to(base), name not in (TORCH, COPY)
        verdict = ("pass" if ratio <= TARGET else "MISS") if targeted else ""
        speed = "" if name == COPY else f"{num_bytes / wall.median / 1e6:.0f} MB/s"
        ratios = f"{ratio:.2f}", f"{wall.minimum / base.minimum:.2f}", f"{work.ratio_to(base_work):.2f}"
        rows.append((name, seconds(wall.median), speed, *ratios, f"{TARGET:.2f}" if targeted else "", verdict))
    columns = "system", "median", "", "/ torch", "best / best", "of CPU time", "target", ""
    return Table(f"To {what}", columns, rows)


def timings(samples: Samples) -> tuple[Timing, Timing]:
    walls, works = zip(*samples, strict=True)
    return Timing(walls), Timing(works)


def main() -> None:
    parser = options_of(__doc__, num_rounds=NUM_ROUNDS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--folder", help="where to write (the system's for temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
        found = on_gloo(NUM_RANKS, on_rank, Path(folder), options.width, options.rounds, options.profile)
    if options.profile:
        return
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes(options.width).values())
    tables = [table(what, found, num_bytes) for what in ("save", "load")]
    about = (
        f"{NUM_RANKS} Gloo ranks, one thread each; {num_bytes / 1e9:.2f} GB in {len(shapes(WIDTH))} tensors. Seconds "
        f"of the slowest rank, and CPU seconds of all ranks; medians of {options.rounds} interleaved rounds. Ratios "
        f"are medians of the rounds' ratios."
    )
    report("checkpoints", "Checkpoints", about, tables, write=options.write)


if __name__ == "__main__":
    main()
