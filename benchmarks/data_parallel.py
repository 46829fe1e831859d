"""A data-parallel train step on real ranks, against DistributedDataParallel in the same run.

    python benchmarks/data_parallel.py            print the table
    python benchmarks/data_parallel.py --write    and write benchmarks/results/data-parallel-<date>.md

Processes joined by Gloo, one thread each. A GPT of 11 blocks, 132 parameters in them: forward, cross entropy, backward,
AdamW. Shardwise has replicated weights and a batch that is sharded, and nothing else; DDP wraps the same model and is
given each rank's rows. Both run in the same processes and take turns, in another order every round. Numbers are those
of the slower rank. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from race import Row, Table, Timing, seconds

NUM_BLOCKS, WIDTH, HEADS, VOCABULARY = 11, 128, 4, 256
ROWS, TOKENS = 8, 64
NUM_ROUNDS, NUM_CALLS = 12, 2
DDP, SHARDWISE, TARGET = "DDP", "shardwise", 1.1
Step = Callable[[], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def _step(module: nn.Module, tokens: Tensor) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_ddp(mesh: DeviceMesh, tokens: Tensor) -> Step:
    return _step(DistributedDataParallel(GPT()), tokens.chunk(mesh.size())[mesh.get_rank()])


def by_layouts(mesh: DeviceMesh, tokens: Tensor) -> Step:
    return _step(sw.distribute_module(GPT(), mesh), sw.distribute_tensor(tokens, mesh, [sw.Shard(0)]))


def measure(steps: dict[str, Step], num_rounds: int) -> dict[str, tuple[float, ...]]:
    """Seconds per step, of the rank that takes longer. All ranks shuffle alike, and begin each slice together."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    order, chance = list(steps), random.Random(0)
    for _ in range(num_rounds):
        chance.shuffle(order)
        for name in order:
            steps[name]()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(NUM_CALLS):
                steps[name]()
            samples[name].append((time.perf_counter() - start) / NUM_CALLS)
    slower = {name: torch.tensor(own, dtype=torch.float64) for name, own in samples.items()}
    for own in slower.values():
        dist.all_reduce(own, dist.ReduceOp.MAX)
    return {name: tuple(own.tolist()) for name, own in slower.items()}


def check(steps: dict[str, Step]) -> None:
    """Both compute the same: DDP's ranks each the loss of their rows."""
    theirs, ours = steps[DDP]().detach(), steps[SHARDWISE]().detach()
    dist.all_reduce(theirs, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    torch.testing.assert_close(ours.full_tensor(), theirs / dist.get_world_size())  # type: ignore[attr-defined]


def rank_main(rank: int, num_ranks: int, folder: str, num_rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1))
    steps = {DDP: by_ddp(mesh, tokens), SHARDWISE: by_layouts(mesh, tokens)}
    for _ in range(3):
        check(steps)
    found = measure(steps, num_rounds)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def row(num_ranks: int, num_rounds: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="data-parallel-") as folder:
        torch.multiprocessing.spawn(rank_main, (num_ranks, folder, num_rounds), nprocs=num_ranks)
        found = {name: Timing(samples) for name, samples in torch.load(f"{folder}/found").items()}
    ratio = found[SHARDWISE].ratio_to(found[DDP])
    times = [seconds(found[name].median) for name in (DDP, SHARDWISE)]
    return (str(num_ranks), *times, f"{ratio:.3f}", str(TARGET), "pass" if ratio <= TARGET else "MISS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args()
    rows = [row(num_ranks, options.rounds) for num_ranks in options.ranks]
    columns = ("ranks", DDP, SHARDWISE, "shardwise / DDP", "target", "")
    table = Table("A data-parallel train step", columns, rows)
    table.print(Console(width=120))
    if options.write:
        today = datetime.date.today()
        head = (
            f"# Data parallelism on real ranks, {today}\n\nPython {platform.python_version()}, torch "
            f"{torch.__version__}, Gloo, one thread a rank, {os.cpu_count()} cores. {NUM_BLOCKS} blocks of width "
            f"{WIDTH}, {ROWS} × {TOKENS} tokens; {options.rounds} interleaved rounds.\n\n"
        )
        path = Path(__file__).parent / "results" / f"data-parallel-{today}.md"
        path.write_text(head + table.markdown())


if __name__ == "__main__":
    main()
