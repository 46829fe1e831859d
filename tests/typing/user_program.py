"""A program as users write it. It is type-checked strictly, and runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.functional import traceable
from shardwise.debug import Comm, CommDebugMode, watch_reads
from shardwise.experimental import implicit_replication, local_map, register_kernel, register_sharding
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    distribute_module,
    loss_parallel,
    no_sync,
    parallelize_module,
)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.gelu(self.up(x))
        out: Tensor = self.down(hidden)
        return x + out


def column_then_row(name: str, module: nn.Module, mesh: sw.Mesh | sw.DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        where: sw.Placement = sw.Shard(0) if name == "up" else sw.Shard(1)
        module.weight = nn.Parameter(sw.distribute_tensor(module.weight.detach(), mesh, [where]))


def placed(x: Tensor, mesh: sw.Mesh, placements: Sequence[sw.Placement]) -> sw.DTensor:
    return sw.distribute_tensor(x, mesh, placements)


def describe(placement: sw.Placement) -> str:
    match placement:
        case sw.Shard(dim):
            return f"split by dim {dim}"
        case sw.Partial(reduce_op):
            return f"waiting for a {reduce_op}"
        case _:
            return "whole"


def train(steps: int = 3) -> list[float]:
    mesh = sw.simulate((2,), ("tp",))
    net = distribute_module(Net(8), mesh, column_then_row)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x = placed(torch.randn(4, 8), mesh, [sw.Replicate()])
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        with no_sync(enabled=step == 0):
            loss: Tensor = net(x).square().mean()
            loss.backward()
        if step:
            optimizer.step()
        losses.append(loss.item())
    return losses


class Frozen(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: sw.Mesh | sw.DeviceMesh) -> nn.Module:
        return distribute_module(module.requires_grad_(False), device_mesh)


def by_a_plan() -> Tensor:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=sw.Replicate())}
    net: nn.Module = parallelize_module(Net(8), mesh["tp"], plan)
    parallelize_module(nn.Linear(2, 2), mesh["tp"], Frozen())
    parallelize_module(
        net, mesh["tp"], PrepareModuleOutput(output_layouts=sw.Replicate(), desired_output_layouts=sw.Replicate())
    )
    rows = sw.distribute_tensor(torch.ones(4, 8), mesh["tp"], [sw.Shard(0)])
    doubled: sw.DTensor = local_map(torch.mul, out_placements=[sw.Shard(0)])(rows, 2)
    out: Tensor = net(doubled.full_tensor())
    return out


def move() -> tuple[str, ...]:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    x: sw.DTensor = sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0), sw.Partial("sum")])
    whole: sw.DTensor = x.redistribute(placements=[sw.Replicate(), sw.Replicate()])
    nested: sw.DTensor = x.redistribute(placements={0: ("tp", "dp")})
    terms: sw.DTensor = sw.DTensor.from_local(torch.ones(2, 2), mesh, [sw.Partial(), sw.Shard(1)])
    local: Tensor = whole.to_local()
    plain: Tensor = nested.full_tensor()
    made: sw.DTensor = sw.zeros(4, 4, device_mesh=mesh, placements=[sw.Shard(0), sw.Replicate()])
    total: Tensor = made + local.sum().item() + (plain + local.new_zeros(())).sum().item()
    assert isinstance(total, sw.DTensor)
    grad: sw.DTensor | None = terms.grad
    assert grad is None
    size: torch.Size = terms.shape
    assert size.numel() == terms.numel()
    return tuple(describe(placement) for placement in x.placements)


def loss_over_classes() -> dict[str, int]:
    mesh = sw.simulate((2,), ("tp",))
    logits = sw.distribute_tensor(torch.zeros(4, 10), mesh, [sw.Shard(1)]).requires_grad_()
    with CommDebugMode() as comm, loss_parallel(), implicit_replication():
        F.cross_entropy(logits, torch.arange(4)).backward()
    with suppress(sw.errors.PlacementError):
        sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(3)])
    return dict(comm.get_comm_counts())


def looked_at() -> list[str]:
    mesh = sw.recording((4,), ("tp",))
    x = sw.randn(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
    with sw.strict(moves="1MB"), watch_reads(), CommDebugMode() as comm:
        total: Tensor = F.silu(x).sum()
        assert isinstance(total, sw.DTensor)
        total.redistribute(placements=[sw.Replicate()])
    first: Comm = comm.comms[0]
    assert first.line > 0
    return [first.kind, str(first.source)]


def under(prefix: str) -> checkpoint.KeyMap:
    return lambda name: prefix + name


def kept(folder: Path) -> tuple[int | None, int]:
    net = sw.fully_shard(Net(8), mesh=sw.simulate((2,), ("dp",)))
    optimizer = torch.optim.AdamW(net.parameters())
    saving: checkpoint.Saving = checkpoint.save_step(folder / "run", step=3, keep=2, model=net, optimizer=optimizer)
    done: Path = saving.wait()
    latest: int | None = checkpoint.load_latest(folder / "run", model=net, optimizer=optimizer)
    checkpoint.save(net, folder / "model", max_shard_size="1GB", keys=under("net."))
    fused: dict[str, str | checkpoint.From | None] = {
        "up.weight": checkpoint.From("net.up.weight", make=lambda w: w.T.T),
        "**": "net.**",
    }
    for keys in (under("net."), fused):
        loaded: checkpoint.Loaded = checkpoint.load(net, folder / "model", keys=keys)
        assert not loaded.missing_keys
    return latest, checkpoint.load_step(done, model=net)


@register_kernel(F.silu, "cuda")
def fused_silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x * torch.sigmoid(x)


@register_sharding(torch.ops.aten.frac.default)
def frac(x: object) -> list[tuple[list[sw.Placement], list[sw.Placement]]]:
    return [([sw.Shard(0)], [sw.Shard(0)])]


def traced(device_mesh: sw.DeviceMesh, x: Tensor) -> Tensor:
    with traceable(device_mesh) as mesh:
        return sw.DTensor.from_local(fused_silu(x), mesh, [sw.Shard(0)]).full_tensor()


if __name__ == "__main__":
    print(train(), move(), loss_over_classes(), looked_at())
