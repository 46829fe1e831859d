"""What a rank reads and what memory it takes to load a model from safetensors files, and to save it.

    python benchmarks/checkpoint_loading.py            print the table
    python benchmarks/checkpoint_loading.py --write    and write benchmarks/results/checkpoint-loading-<date>.md

Four processes joined by Gloo. The model is a stack of transformer layers' weights; the files hold it in float32, as it
is, or transposed and with queries, keys and values fused. Counted are the bytes that a rank reads over those that its
shards need, headers included, and how far its memory rises above what it had before, at the peak, beside the
largest tensor's shard. Targets: 1.05, and the largest shard + 64 MB. A missed target prints MISS; the exit status stays
0.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import From, load, load_latest, save, save_step

SIZE, LAYERS, WIDTH, VOCABULARY = 4, 4, 1024, 16384
MB = 2**20
KEYS = ("q", "k", "v")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            for name in KEYS:
                setattr(layer, name, nn.Linear(WIDTH, WIDTH))
            layer.up, layer.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.layers.append(layer)


def rows(name: str) -> list[sw.Placement]:
    return [sw.Shard(0), sw.Shard(0)]


def columns(name: str) -> list[sw.Placement]:
    return [sw.Shard(1), sw.Shard(1)]


def megatron(name: str) -> list[sw.Placement]:
    return [sw.Replicate(), sw.Shard(1 if "down" in name else 0)]


def both(name: str) -> list[sw.Placement]:
    return [sw.Shard(0), sw.Shard(1)]


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As GPT-2 has it: transposed, queries, keys and values in one."""
    made = {"tokens.weight": state["tokens.weight"]}
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            parts = [state[f"layers.{i}.{name}.{kind}"] for name in KEYS]
            made[f"h.{i}.qkv.{kind}"] = torch.cat(parts).t().contiguous() if kind == "weight" else torch.cat(parts)
            for name in ("up", "down"):
                x = state[f"layers.{i}.{name}.{kind}"]
                made[f"h.{i}.{name}.{kind}"] = x.t().contiguous() if kind == "weight" else x
    return made


FROM_FUSED: dict[str, Any] = {
    **{f"layers.*.{n}.weight": From("h.*.qkv.weight", make=lambda w, i=i: w.T.chunk(3)[i]) for i, n in enumerate(KEYS)},
    **{f"layers.*.{n}.bias": From("h.*.qkv.bias", make=lambda b, i=i: b.chunk(3)[i]) for i, n in enumerate(KEYS)},
    **{f"layers.*.{n}.weight": From(f"h.*.{n}.weight", make=lambda w: w.T) for n in ("up", "down")},
    **{f"layers.*.{n}.bias": f"h.*.{n}.bias" for n in ("up", "down")},
}


@dataclass(frozen=True)
class Measured:
    """Of one rank: bytes, seconds."""

    num_read: int
    needed: int
    peak: int
    largest: int
    seconds: float


def memory(name: str) -> int:
    """This process's memory now (`VmRSS`) or at its highest (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def at_the_peak(do: Callable[[], Any]) -> tuple[Any, int, float]:
    """What is returned, how far the memory rises, and how long it takes."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, and is kept for later, is not there
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.perf_counter()
    result = do()
    return result, memory("VmHWM") - before, time.perf_counter() - began


def place(net: nn.Module, mesh: Any, where: Callable[[str], list[sw.Placement]]) -> nn.Module:
    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for key, x in list(part._parameters.items()):
            if x is not None and x.dim() > 1:
                laid = sw.distribute_tensor(x.detach(), mesh, where(name), src_data_rank=None)
                part._parameters[key] = nn.Parameter(laid)

    return sw.distribute_module(net, mesh, lay)


def shards_of(net: nn.Module) -> list[Tensor]:
    return [x.to_local() if isinstance(x, sw.DTensor) else x for x in net.state_dict().values()]


CASES: dict[str, tuple[Callable[[str], list[sw.Placement]], str, torch.dtype, Any]] = {
    "rows": (rows, "plain", torch.float32, None),
    "columns": (columns, "plain", torch.float32, None),
    "tensor parallel": (megatron, "plain", torch.float32, None),
    "both, into bfloat16": (both, "plain", torch.bfloat16, None),
    "rows, fused and transposed": (rows, "fused", torch.float32, FROM_FUSED),
    "columns, fused and transposed": (columns, "fused", torch.float32, FROM_FUSED),
}


def measured(mesh: Any, folder: Path, name: str) -> Measured:
    where, file, dtype, keys = CASES[name]
    torch.manual_seed(0)
    net = place(Net().to(dtype), mesh, where)
    expected = [x.clone() for x in shards_of(net)]
    path = folder / f"{file}.safetensors"
    load(net, path, keys=keys)  # what is kept for later is there
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    loaded, peak, seconds = at_the_peak(lambda: load(net, path, keys=keys))
    assert all(map(torch.equal, shards_of(net), expected)), name
    sizes = [x.numel() for x in expected]
    return Measured(loaded.num_bytes, 4 * sum(sizes), peak, max(sizes) * dtype.itemsize, seconds)


def saved(mesh: Any, folder: Path, name: str) -> Measured:
    """What is read is written here."""
    net = place(Net(), mesh, rows)
    sizes = [4 * x.numel() for x in shards_of(net)]
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save(net, folder / "saved.safetensors"),
        "save_step": lambda: save_step(folder / "steps", step=1, model=net, background=False),
        "save_step, in the background": lambda: save_step(folder / "steps", step=1, model=net).wait(),
        "load_latest": lambda: load_latest(folder / "steps", model=net),
    }
    calls[name]()
    _, peak, seconds = at_the_peak(calls[name])
    return Measured(sum(sizes), sum(sizes), peak, max(sizes), seconds)


SAVES = ("save", "save_step", "save_step, in the background", "load_latest")


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = Path(folder)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if rank == 0:
        torch.manual_seed(0)
        state = Net().state_dict()
        save_file(state, where / "plain.safetensors")
        save_file(fused(state), where / "fused.safetensors")
        del state
    dist.barrier()
    for name in (*CASES, *SAVES):
        mine = measured(mesh, where, name) if name in CASES else saved(mesh, where, name)
        everyone: list[Any] = [None] * SIZE
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            with open(where / "results", "a") as file:
                print(line(name, everyone), file=file)
    dist.destroy_process_group()


def line(name: str, ranks: list[Measured]) -> str:
    """The worst of the ranks."""
    read = max(one.num_read / one.needed for one in ranks)
    peak, largest = max(one.peak for one in ranks), max(one.largest for one in ranks)
    seconds = max(one.seconds for one in ranks)
    counted = f"{read:.3f}" if name in CASES else ""
    missed = (name in CASES and read > 1.05) or (peak > largest + 64 * MB and "background" not in name)
    size = f"{max(one.needed for one in ranks) / MB:.0f} MB"
    return (
        f"| {name} | {size} | {counted} | {peak / MB:.1f} MB | {largest / MB:.0f} + 64 MB | "
        f"{seconds * 1000:.0f} ms | {'MISS' if missed else ''} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/checkpoint-loading-<date>.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder,), nprocs=SIZE)
        results = Path(folder, "results").read_text()
    today = datetime.date.today()
    size = sum(x.numel() for x in Net().parameters()) * 4 / MB
    text = (
        f"# What loading and saving take, {today}\n\n"
        f"Python {platform.python_version()}, torch {torch.__version__}, {SIZE} processes on Gloo, one thread each, "
        f"{os.cpu_count()} cores. A model of {size:.0f} MB in float32. The worst of the ranks.\n\n"
        f"| | a rank's shards | bytes read / needed | memory at the peak | target | time | |\n"
        f"| --- | --- | --- | --- | --- | --- | --- |\n{results}\n"
        f"In the background, a rank keeps a copy of what it writes.\n"
    )
    print(text)
    if options.write:
        Path(__file__).with_name("results").joinpath(f"checkpoint-loading-{today}.md").write_text(text)


if __name__ == "__main__":
    main()
