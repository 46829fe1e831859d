"""One rank's share of a model of a billion parameters on a GPU: fully sharded over a fake group, against plain torch.

    python benchmarks/fully_sharded_gpu.py --write    and write benchmarks/results/fully-sharded-gpu-<date>.md

Rank 1 of 8 in torch's fake process group, whose collectives return at once and move nothing. Parameters in bfloat16,
the same batch for all; a step is forward, cross entropy, backward and AdamW (foreach). "Plain" holds the whole model
and steps on all of it, the others on an eighth: the ratio to plain gains by that. Peak is the most memory allocated in
a step, all included. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

import shardwise as sw
from on_device import clock_of
from race import RESULTS, Table, options_of, race, report, seconds
from ranks import fake_world

NUM_RANKS, TARGET = 8, 1.05
PLAIN, TORCH, SHARDWISE, LAYOUTS = "plain", "FSDP2", "shardwise, a batch per rank", "shardwise, DTensors"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def model(sizes: tuple[int, ...], device: str) -> GPT:
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(*sizes).to(torch.bfloat16)


def sharded(fully_shard: Callable[..., Any], net: GPT, mesh: DeviceMesh) -> GPT:
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    return net


def step_of(net: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, foreach=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def made(system: str, sizes: tuple[int, ...], mesh: DeviceMesh, tokens: Tensor) -> Callable[[], Tensor]:
    net = model(sizes, mesh.device_type)
    if system == LAYOUTS:
        tokens = sw.DTensor.from_local(tokens, mesh, [sw.Shard(0)])
    shard = {PLAIN: None, TORCH: torch_fully_shard}.get(system, sw.fully_shard)
    return step_of(net if shard is None else sharded(shard, net, mesh), tokens)


def peak(start: Callable[[], Callable[[], Tensor]]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    step = start()
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def main() -> None:
    parser = options_of(__doc__, num_rounds=7)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the report")
    parser.add_argument("--tiny", action="store_true", help="a size that a CPU can run, for trying this out")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    sizes, rows, length = ((64, 2, 2, 256), 2, 16) if options.tiny else ((2048, 16, 18, 32768), 4, 2048)
    with fake_world(1, NUM_RANKS):
        mesh = init_device_mesh(device, (NUM_RANKS,), mesh_dim_names=("dp",))
        tokens = torch.randint(sizes[-1], (rows, length + 1), device=device)
        systems = (PLAIN, TORCH, SHARDWISE, LAYOUTS)
        starts = {system: partial(made, system, sizes, mesh, tokens) for system in systems}
        peaks = {system: peak(start) if device == "cuda" else 0 for system, start in starts.items()}
        steps = {system: start() for system, start in starts.items()}
        timings = race(steps, num_rounds=options.rounds, clock=clock_of(torch.device(device)))
    table = []
    for system, timing in timings.items():
        ratio = timing.ratio_to(timings[PLAIN])
        verdict = ("pass" if ratio <= TARGET else "MISS") if system.startswith("shardwise") else ""
        memory = f"{peaks[system] / 2**30:.2f} GiB"
        table.append((system, seconds(timing.median), f"{ratio:.3f}", memory, str(TARGET) if verdict else "", verdict))
    params = sum(p.numel() for p in model(sizes, "meta").parameters())
    size = f"A step of {params / 1e9:.2f} billion parameters, {rows} × {length} tokens"
    tables = [Table(size, ("system", "a step", "/ plain", "peak", "target", ""), table)]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = f"{name}, bfloat16; rank 1 of {NUM_RANKS} in a fake group; {options.rounds} interleaved rounds."
    report(
        "fully-sharded-gpu",
        "One rank's share of a fully sharded model",
        about,
        tables,
        write=options.write,
        out=options.out,
    )


if __name__ == "__main__":
    main()
