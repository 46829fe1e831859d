"""A data-parallel train step on real ranks, against DistributedDataParallel in the same run.

    python benchmarks/data_parallel.py            print the table
    python benchmarks/data_parallel.py --write    and write benchmarks/results/data-parallel-<date>.md

Processes joined by Gloo, one thread each. A GPT of 8 blocks, 133 parameters: forward, cross entropy, backward, AdamW.
Shardwise has replicated weights and a batch that is sharded, and nothing else; DDP wraps the same model and is given
each rank's rows. Both run in the same processes and take turns, in another order every round. Numbers are those of the
slower rank. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from race import Row, Table, options_of, report, seconds
from ranks import Times, on_gloo, race_on_ranks
from scheduled import Size
from transformer import GPT, Variant, token_ids

NUM_BLOCKS, SIZE = 8, Size(batch=8, seq=64, width=128)
NUM_ROUNDS, NUM_CALLS = 12, 2
DDP, SHARDWISE, TARGET = "DDP", "shardwise", 1.1
Step = Callable[[], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SIZE, Variant(), num_blocks=NUM_BLOCKS)


def _step(module: nn.Module, batch: list[Tensor]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_ddp(mesh: DeviceMesh, batch: tuple[Tensor, ...]) -> Step:
    return _step(DistributedDataParallel(model()), [x.chunk(mesh.size())[mesh.get_rank()] for x in batch])


def by_layouts(mesh: DeviceMesh, batch: tuple[Tensor, ...]) -> Step:
    return _step(sw.distribute_module(model(), mesh), [sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in batch])


def check(steps: dict[str, Step]) -> None:
    """Both compute the same: DDP's ranks each the loss of their rows."""
    theirs, ours = steps[DDP]().detach(), steps[SHARDWISE]().detach()
    dist.all_reduce(theirs, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    torch.testing.assert_close(ours.full_tensor(), theirs / dist.get_world_size())  # type: ignore[attr-defined]


def on_rank(num_ranks: int, num_rounds: int) -> dict[str, Times]:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    batch = token_ids(SIZE)
    steps = {DDP: by_ddp(mesh, batch), SHARDWISE: by_layouts(mesh, batch)}
    for _ in range(3):
        check(steps)
    return race_on_ranks(steps, num_calls=NUM_CALLS, num_rounds=num_rounds)


def row(num_ranks: int, num_rounds: int) -> Row:
    found = on_gloo(num_ranks, on_rank, num_ranks, num_rounds)
    ratio = found[SHARDWISE].wall.ratio_to(found[DDP].wall)
    times = [seconds(found[name].wall.median) for name in (DDP, SHARDWISE)]
    return (str(num_ranks), *times, f"{ratio:.3f}", str(TARGET), "pass" if ratio <= TARGET else "MISS")


def main() -> None:
    parser = options_of(__doc__, num_rounds=NUM_ROUNDS)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    rows = [row(num_ranks, options.rounds) for num_ranks in options.ranks]
    columns = ("ranks", DDP, SHARDWISE, "shardwise / DDP", "target", "")
    about = (
        f"Gloo, one thread a rank. {NUM_BLOCKS} blocks of width {SIZE.width}, {SIZE.batch} × {SIZE.seq} tokens; "
        f"{options.rounds} interleaved rounds."
    )
    tables = [Table("A data-parallel train step", columns, rows)]
    report("data-parallel", "Data parallelism on real ranks", about, tables, write=options.write)


if __name__ == "__main__":
    main()
