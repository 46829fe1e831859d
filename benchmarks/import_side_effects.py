"""What shardwise costs a plain program: torch's own operations in processes without it, with it imported, and with a
DTensor alive; and what the import itself takes.

    python benchmarks/import_side_effects.py           print the tables (two minutes)
    python benchmarks/import_side_effects.py --write   and write benchmarks/results/import-side-effects-<date>.md

Three processes live side by side and are timed in turns, every round in another order; ratios are medians of the ratios
within a round. Imports and first calls are those of fresh processes, in turns too. All times are those of the
processor, on one thread, so that whatever else runs beside it hardly counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from race import Row, Table, Timing, race, seconds

ALONE, IMPORTED, ALIVE = "torch alone", "shardwise imported", "a DTensor alive"
SYSTEMS = (ALONE, IMPORTED, ALIVE)
FRESH_PROCESSES = 7
LIMIT = 1.05
"""Times as long: what plain operations may take beside shardwise."""


# In the processes that are timed


def operations() -> dict[str, Callable[[], Any]]:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.set_num_threads(1)
    x, number, other = torch.ones(4, 4), torch.ones(()), torch.ones(4, 4)
    weight = torch.ones(4, 4, requires_grad=True)
    module, model = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    def set_data() -> None:
        x.data = other

    return {
        "x.item()": number.item,
        "x + x": lambda: x + x,
        "x[0]": lambda: x[0],
        "x.data = y": set_data,
        "torch.tensor(1.0)": lambda: torch.tensor(1.0),
        "torch.tensor([1.0, 2.0])": lambda: torch.tensor([1.0, 2.0]),
        "F.linear": lambda: nn.functional.linear(x, weight),
        "F.layer_norm": lambda: nn.functional.layer_norm(x, (4,)),
        "a module": lambda: module(x),
        "forward and backward": lambda: module(x).sum().backward(),
        "Function.apply": lambda: Doubled.apply(weight),
        "a checkpoint": lambda: checkpoint(module, weight, use_reentrant=False).sum().backward(),
        "torch.func.grad": lambda: torch.func.grad(lambda y: y.sum())(x),
        "AdamW.step of 20 tensors": optimizer.step,
        "Normal.rsample": lambda: torch.distributions.Normal(x, x, validate_args=False).rsample(),
    }


def serve(system: str) -> None:
    """Time what is asked for: a line names an operation and how often to run it, another says how long it took."""
    kept = prepare(system)
    known = operations()
    for line in sys.stdin:
        name, count = json.loads(line)
        call = known[name]
        start = time.process_time()
        for _ in range(count):
            call()
        print((time.process_time() - start) / count, flush=True)
    del kept


def prepare(system: str) -> Any:
    if system == ALONE:
        return None
    import torch

    import shardwise as sw

    if system == IMPORTED:
        return None
    x = sw.distribute_tensor(torch.ones(4, 4), sw.simulate((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
    (x * 2).sum().backward()
    return x


FIRST = """
import time
now = time.process_time
times = [now()]
import torch; times.append(now())
import shardwise as sw; times.append(now())
x = sw.distribute_tensor(torch.ones(4, 4), sw.simulate((2,), ("tp",)), [sw.Shard(0)]); times.append(now())
x * 2; times.append(now())
print(*(after - before for before, after in zip(times, times[1:])))
"""


# Timing them


class Worker:
    """A process that is asked to run operations."""

    def __init__(self, system: str) -> None:
        command = [sys.executable, __file__, "--serve", system]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def time(self, name: str, count: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([name, count]), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def operation_table(num_rounds: int) -> Table:
    workers = {system: Worker(system) for system in SYSTEMS}
    try:
        rows = [operation_row(name, workers, num_rounds) for name in operations()]
    finally:
        for worker in workers.values():
            worker.stop()
    return Table("Plain operations", ("measure", *SYSTEMS, "imported ÷ alone", "alive ÷ alone", "verdict"), rows)


def operation_row(name: str, workers: dict[str, Worker], num_rounds: int) -> Row:
    def clock(call: Any, count: int) -> float:
        return call.worker.time(name, count)

    timings = race({k: Asked(worker, name) for k, worker in workers.items()}, num_rounds=num_rounds, clock=clock)
    ratios = [timings[system].ratio_to(timings[ALONE]) for system in (IMPORTED, ALIVE)]
    met = "pass" if max(ratios) <= LIMIT else "MISS"
    return (name, *(seconds(timings[k].median) for k in SYSTEMS), *(f"{ratio:.2f}" for ratio in ratios), met)


class Asked:
    """One operation of one process."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name

    def __call__(self) -> object:
        return self.worker.time(self.name, 1)


def first_table() -> Table:
    runs = [first_times() for _ in range(FRESH_PROCESSES)]
    what = ("import torch", "import shardwise, after it", "the first mesh and DTensor", "the first call, x * 2")
    timings = [Timing(samples) for samples in zip(*runs, strict=True)]
    rows = [(name, seconds(t.median), seconds(t.minimum)) for name, t in zip(what, timings, strict=True)]
    return Table("The first time, in a fresh process", ("measure", "median", "least"), rows)


def first_times() -> tuple[float, ...]:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


def write_report(tables: list[Table], num_rounds: int) -> Path:
    import torch

    from overhead import processor

    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"import-side-effects-{today}.md"
    python = ".".join(map(str, sys.version_info[:3]))
    text = [
        f"# What shardwise costs a plain program, {today}\n",
        f"Python {python}, torch {torch.__version__}, {processor()}, one thread. Three processes side by side, "
        f"{num_rounds} interleaved rounds, {FRESH_PROCESSES} fresh processes for the first times; times of the "
        f"processor, ratios are medians of the ratios within each round; {LIMIT} is the most that passes.\n",
        *(table.markdown() for table in tables),
    ]
    path.write_text("\n".join(text))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds per operation")
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    console = Console()
    console.width = max(console.width, 120)
    tables = [operation_table(options.rounds), first_table()]
    for table in tables:
        table.print(console)
    if options.write:
        console.print(f"Written to {write_report(tables, options.rounds)}")


if __name__ == "__main__":
    main()
