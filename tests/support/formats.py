"""One training state in every format that a checkpoint may have."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwise as sw

GRID = sw.simulate((2, 3), ("dp", "tp"))
FORMATS = ("step", "safetensors", "a set", "dcp", "torch.save", "shards")


def model() -> nn.Module:
    """Two layers alike, in nested shards; one parameter is tied."""

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, {0: ("tp", "dp")}))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4), nn.Linear(4, 7))
    net[2].bias = net[0].bias
    return sw.distribute_module(net, GRID, shard)


def save_all(folder: Path) -> dict[str, Tensor]:
    """Each format under its name. What is returned are the model's tensors, whole."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(sw.distribute_tensor(torch.randn(3, 4), GRID)).square().sum().backward()
    optimizer.step()
    whole = {name: x.full_tensor() for name, x in net.state_dict().items()}
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({**state, "epoch": 3}, checkpoint_id=folder / "dcp")
    sw.checkpoint.save_step(
        folder / "step", step=7, background=False, model=net, optimizer=optimizer, progress={"epoch": 3, "rate": 0.5}
    )
    sw.checkpoint.save(net, folder / "safetensors")
    sw.checkpoint.save(net, folder / "a set", max_shard_size=200)
    torch.save({"model": whole, "epoch": 3, "rates": [0.1, 0.2]}, folder / "torch.save")
    torch.save(net.state_dict(), folder / "shards")
    return whole
