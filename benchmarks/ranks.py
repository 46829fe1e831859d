"""Steps timed beside each other on all ranks of a group: real ranks, joined by Gloo, or a rank of torch's fake group,
whose collectives return at once and do nothing."""

from __future__ import annotations

import cProfile
import pickle
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from race import Call, Timing

T = TypeVar("T")


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_gloo(num_ranks: int, run: Callable[..., T], *args: object) -> T:
    """What a function of a module, run on so many processes of one thread each, returns on the first of them."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        torch.multiprocessing.spawn(_on_rank, (num_ranks, folder, run, args), nprocs=num_ranks)
        return pickle.loads(Path(folder, "found").read_bytes())


def _on_rank(rank: int, num_ranks: int, folder: str, run: Callable[..., object], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = run(*args)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Times:
    """Seconds per call of the slowest rank: on the wall, and of the process, which what else runs on the machine does
    not lengthen."""

    wall: Timing
    work: Timing


def race_on_ranks(calls: dict[str, Call], *, num_calls: int, num_rounds: int) -> dict[str, Times]:
    """Times the calls in turns. All ranks shuffle alike, in another order every round, and begin each turn together."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    order, chance = list(calls), random.Random(0)
    for _ in range(num_rounds):
        chance.shuffle(order)
        for name in order:
            calls[name]()
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            for _ in range(num_calls):
                calls[name]()
            wall, work = time.perf_counter() - start, time.process_time() - worked
            samples[name].append((wall / num_calls, work / num_calls))
    return {name: _of_slowest(own) for name, own in samples.items()}


def _of_slowest(own: list[tuple[float, float]]) -> Times:
    most = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    wall, work = most.T.tolist()
    return Times(Timing(tuple(wall)), Timing(tuple(work)))


def middle_half(ours: Timing, theirs: Timing) -> str:
    """Of the rounds' ratios."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours.samples, theirs.samples, strict=True)], n=4)
    return f"({low:.2f} to {high:.2f})"


def profile(calls: dict[str, Call], num_calls: int, title: str = "") -> None:
    """Print where the first rank's time goes, op by op and function by function."""
    for name, call in calls.items():
        with torch.profiler.profile() as ops, cProfile.Profile() as functions:
            for _ in range(num_calls):
                call()
        if dist.get_rank() == 0:
            print(f"{name}, {title}{num_calls} calls")
            print(ops.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))
            pstats.Stats(functions).sort_stats("tottime").print_stats(18)
        dist.barrier()
