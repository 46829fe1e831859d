"""A fully sharded train step, against torch's FSDP2 in the same run.

    python benchmarks/fully_sharded.py            print the tables
    python benchmarks/fully_sharded.py --write    and write benchmarks/results/fully-sharded-<date>.md
    python benchmarks/fully_sharded.py --profile  instead, where a rank's time goes, function by function

A GPT of eight blocks (133 parameters), each block a group of its own: forward, backward and AdamW. First on two real
ranks, joined by Gloo, one thread each; then in one process of torch's fake process group, whose collectives do nothing,
at a small width: what is left is the host's work. Systems take turns, in another order every round. "Plain" is one
device with one rank's batch, and nothing communicated. CPU time is that of the process, which what else runs on the
machine does not lengthen. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import os
import platform
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.multiprocessing
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from race import Row, Table, Timing, seconds
from scheduled import Size
from transformer import GPT, Variant, token_ids

NUM_BLOCKS, NUM_RANKS, NUM_ROUNDS, NUM_CALLS = 8, 2, 15, 2
GLOO, HOST = Size(batch=4, seq=64, width=256), Size(batch=1, seq=16, width=64)
PLAIN, TORCH, OWN, WHOLE = "plain", "FSDP2", "shardwise, a batch per rank", "shardwise, DTensors"
TARGET = 1.0
Step = Callable[[], object]
Found = dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


def model(size: Size) -> nn.Module:
    torch.manual_seed(0)
    return GPT(size, Variant(), num_blocks=NUM_BLOCKS)


def sharded(fully_shard: Callable[..., object], size: Size, mesh: DeviceMesh) -> nn.Module:
    net = model(size)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def steps(size: Size, mesh: DeviceMesh) -> dict[str, Step]:
    """One train step of each system, with the same batches."""
    torch.manual_seed(1)
    size_of_all = Size(batch=size.batch * mesh.size(), seq=size.seq, width=size.width)
    whole = token_ids(size_of_all)
    own = [x.chunk(mesh.size())[mesh.get_rank()].contiguous() for x in whole]
    split = [sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in whole]
    return {
        PLAIN: _step(model(size), own),
        TORCH: _step(sharded(theirs.fully_shard, size, mesh), own),
        OWN: _step(sharded(sw.fully_shard, size, mesh), own),
        WHOLE: _step(sharded(sw.fully_shard, size, mesh), split),
    }


def _step(net: nn.Module, batch: list) -> Step:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check(steps: dict[str, Step], mesh: DeviceMesh) -> None:
    """All systems train alike."""
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
        average = losses[TORCH].clone()
        dist.all_reduce(average)
        torch.testing.assert_close(losses[OWN], losses[TORCH])
        torch.testing.assert_close(losses[WHOLE].full_tensor(), average / mesh.size())


def measure(steps: dict[str, Step], num_calls: int, num_rounds: int, num_ranks: int) -> Found:
    """Seconds per step, on the wall and of this process, of the rank that takes longer."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order, chance = list(steps), random.Random(0)
    for _ in range(num_rounds):
        chance.shuffle(order)
        for name in order:
            steps[name]()
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            for _ in range(num_calls):
                steps[name]()
            wall, work = time.perf_counter() - start, time.process_time() - worked
            samples[name].append((wall / num_calls, work / num_calls))
    found = {}
    for name, own in samples.items():
        longer = torch.tensor(own, dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(longer, dist.ReduceOp.MAX)
        wall, work = longer.T.tolist()
        found[name] = (tuple(wall), tuple(work))
    return found


def on_gloo(rank: int, folder: str, num_rounds: int, profile: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    systems = steps(GLOO, mesh)
    check(systems, mesh)
    if profile:
        _profile(systems, rank)
    else:
        found = measure(systems, NUM_CALLS, num_rounds, NUM_RANKS)
        if rank == 0:
            torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def on_host(num_rounds: int, profile: bool) -> Found:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    systems = steps(HOST, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
    for step in systems.values():
        step()
    if profile:
        _profile(systems, 0)
    found = {} if profile else measure(systems, 5 * NUM_CALLS, num_rounds, 1)
    dist.destroy_process_group()
    return found


def _profile(systems: dict[str, Step], rank: int) -> None:
    for name, step in systems.items():
        with torch.profiler.profile() as ops, cProfile.Profile() as functions:
            for _ in range(5):
                step()
        if rank == 0:
            print(f"{name}, 5 steps")
            print(ops.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))
            pstats.Stats(functions).sort_stats("tottime").print_stats(18)
        dist.barrier()


def peaks(num_ranks: int) -> list[Row]:
    """The most memory that a step takes beyond what rests, in MB, on one rank of a fake group."""
    size = Size(batch=1, seq=8, width=256)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=num_ranks)
    systems = steps(size, init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",)))
    rows = []
    for name, step in systems.items():
        step()
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        rows.append((name, f"{max(accumulate(changes)) / 1e6:.1f}"))
    dist.destroy_process_group()
    net = model(size)
    whole, block = (sum(p.numel() * p.element_size() for p in m.parameters()) / 1e6 for m in (net, net.blocks[0]))
    known = (("all parameters", whole), ("parameters of one rank", whole / num_ranks), ("one block", block))
    return [*rows, *((name, f"{size:.1f}") for name, size in known)]


COLUMNS = ("system", "a step", "/ FSDP2", "of CPU time", "/ plain", "target", "")


def _row(name: str, found: Found, at: int) -> Row:
    walls, works = ({other: Timing(own[i]) for other, own in found.items()} for i in range(2))
    judged = (walls, works)[at]
    ratio, targeted = judged[name].ratio_to(judged[TORCH]), name in (OWN, WHOLE)
    verdict = ("pass" if ratio <= TARGET else "MISS") if targeted else ""
    return (
        name,
        seconds(walls[name].median),
        f"{walls[name].ratio_to(walls[TORCH]):.2f}",
        f"{works[name].ratio_to(works[TORCH]):.2f}",
        f"{walls[name].ratio_to(walls[PLAIN]):.2f}",
        f"{TARGET:.2f}" if targeted else "",
        verdict,
    )


def _table(title: str, found: Found, at: int) -> Table:
    return Table(title, COLUMNS, list(map(partial(_row, found=found, at=at), found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fully-sharded-") as folder:
        torch.multiprocessing.spawn(on_gloo, (folder, options.rounds, options.profile), nprocs=NUM_RANKS)
        found = None if options.profile else torch.load(f"{folder}/found")
    host = on_host(options.rounds, options.profile)
    if found is None:
        return
    tables = [
        _table(f"Two Gloo ranks, width {GLOO.width}, {GLOO.tokens} tokens a rank", found, 0),
        _table(f"Host work: fake group of 8 ranks, width {HOST.width}, {HOST.tokens} tokens", host, 1),
    ]
    tables.append(Table("Peak memory of a step beyond what rests, 8 ranks, 8 tokens, width 256", ("", "MB"), peaks(8)))
    for table in tables:
        table.print(Console(width=160))
    if options.write:
        _write(tables)


def _write(tables: list[Table]) -> None:
    today = datetime.date.today().isoformat()
    about = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"one thread a process, float32. Medians of {NUM_ROUNDS} interleaved rounds, of the slower rank; ratios are "
        f"medians of the rounds' ratios, of wall-clock time on Gloo and of CPU time on the fake group."
    )
    path = Path(__file__).parent / "results" / f"fully-sharded-{today}.md"
    body = "\n".join(table.markdown() for table in tables)
    path.write_text(
        f"# Fully sharded train steps, {today}\n\n`python benchmarks/fully_sharded.py --write`: {about}\n\n{body}"
    )


if __name__ == "__main__":
    main()
