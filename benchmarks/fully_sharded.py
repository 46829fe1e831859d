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

import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import attrgetter

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from race import Call, Row, Table, options_of, report, seconds
from ranks import Times, fake_world, on_gloo, profile, race_on_ranks
from scheduled import Size
from transformer import GPT, Variant, token_ids

NUM_BLOCKS, NUM_RANKS, NUM_ROUNDS, NUM_CALLS = 8, 2, 15, 2
GLOO, HOST = Size(batch=4, seq=64, width=256), Size(batch=1, seq=16, width=64)
PLAIN, TORCH, OWN, WHOLE = "plain", "FSDP2", "shardwise, a batch per rank", "shardwise, DTensors"
TARGET = 1.0
Found = dict[str, Times]


def model(size: Size) -> nn.Module:
    torch.manual_seed(0)
    return GPT(size, Variant(), num_blocks=NUM_BLOCKS)


def sharded(fully_shard: Callable[..., object], size: Size, mesh: DeviceMesh) -> nn.Module:
    net = model(size)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def steps(size: Size, mesh: DeviceMesh) -> dict[str, Call]:
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


def _step(net: nn.Module, batch: list) -> Call:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check(steps: dict[str, Call], mesh: DeviceMesh) -> None:
    """All systems train alike."""
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
        average = losses[TORCH].clone()
        dist.all_reduce(average)
        torch.testing.assert_close(losses[OWN], losses[TORCH])
        torch.testing.assert_close(losses[WHOLE].full_tensor(), average / mesh.size())


def on_rank(num_rounds: int, profiled: bool) -> Found:
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    systems = steps(GLOO, mesh)
    check(systems, mesh)
    return _measured(systems, NUM_CALLS, num_rounds, profiled)


def on_host(num_rounds: int, profiled: bool) -> Found:
    torch.set_num_threads(1)
    with fake_world(1, 8):
        systems = steps(HOST, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
        for step in systems.values():
            step()
        return _measured(systems, 5 * NUM_CALLS, num_rounds, profiled)


def _measured(systems: dict[str, Call], num_calls: int, num_rounds: int, profiled: bool) -> Found:
    if not profiled:
        return race_on_ranks(systems, num_calls=num_calls, num_rounds=num_rounds)
    profile(systems, 5)
    return {}


def peaks(num_ranks: int) -> list[Row]:
    """The most memory that a step takes beyond what rests, in MB, on one rank of a fake group."""
    size = Size(batch=1, seq=8, width=256)
    rows = []
    with fake_world(1, num_ranks):
        systems = steps(size, init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",)))
        for name, step in systems.items():
            step()
            step()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                step()
            events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
            rows.append((name, f"{max(accumulate(changes)) / 1e6:.1f}"))
    net = model(size)
    whole, block = (sum(p.numel() * p.element_size() for p in m.parameters()) / 1e6 for m in (net, net.blocks[0]))
    known = (("all parameters", whole), ("parameters of one rank", whole / num_ranks), ("one block", block))
    return [*rows, *((name, f"{size:.1f}") for name, size in known)]


_CLOCKS = attrgetter("wall"), attrgetter("work")
COLUMNS = ("system", "a step", "/ FSDP2", "of CPU time", "/ plain", "target", "")


def _row(name: str, found: Found, at: int) -> Row:
    walls, works = ({other: of(times) for other, times in found.items()} for of in _CLOCKS)
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
    parser = options_of(__doc__, num_rounds=NUM_ROUNDS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    found = on_gloo(NUM_RANKS, on_rank, options.rounds, options.profile)
    host = on_host(options.rounds, options.profile)
    if options.profile:
        return
    tables = [
        _table(f"Two Gloo ranks, width {GLOO.width}, {GLOO.tokens} tokens a rank", found, 0),
        _table(f"Host work: fake group of 8 ranks, width {HOST.width}, {HOST.tokens} tokens", host, 1),
        Table("Peak memory of a step beyond what rests, 8 ranks, 8 tokens, width 256", ("", "MB"), peaks(8)),
    ]
    about = (
        f"One thread a process, float32. Medians of {options.rounds} interleaved rounds, of the slower rank; ratios "
        f"are medians of the rounds' ratios, of wall-clock time on Gloo and of CPU time on the fake group."
    )
    report("fully-sharded", "Fully sharded train steps", about, tables, write=options.write)


if __name__ == "__main__":
    main()
