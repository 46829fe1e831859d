"""Loading takes the memory of the shards and a buffer, not that of the model once more; and reads what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from checkpoint_loading import MB, at_the_peak
from shardwise.checkpoint import From, load, load_latest, save, save_step

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak of memory")
NUM_TENSORS, ROWS, COLUMNS = 5, 4096, 2048
LARGEST = 4 * ROWS * COLUMNS  # 32 MB


def net(mesh: Any, *placements: sw.Placement) -> nn.Module:
    made = nn.Module()
    for i in range(NUM_TENSORS):
        x = sw.zeros(ROWS, COLUMNS, device_mesh=mesh, placements=list(placements))
        made.register_parameter(f"w{i}", nn.Parameter(x))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB, and half of that in bfloat16."""
    folder = tmp_path_factory.mktemp("files")
    state = {f"w{i}": torch.full((ROWS, COLUMNS), float(i)) for i in range(NUM_TENSORS)}
    save_file(state, folder / "full.safetensors")
    save_file({name: x.bfloat16() for name, x in state.items()}, folder / "half.safetensors")
    return folder


@pytest.mark.parametrize(("name", "dim"), [("full", 0), ("full", 1), ("half", 0), ("half", 1)])
def test_loading(name: str, dim: int, files: Path) -> None:
    made = net(sw.simulate((2,)), sw.Shard(dim))
    loaded, peak, _ = at_the_peak(lambda: load(made, files / f"{name}.safetensors"))
    assert peak < 64 * MB and made.w3.to_local()[0, 0].item() == 3
    needed = NUM_TENSORS * LARGEST // (1 if name == "full" else 2)
    assert loaded.num_bytes <= 1.001 * needed


def test_transposing(files: Path) -> None:
    made = nn.Module()
    x = sw.zeros(COLUMNS, ROWS, device_mesh=sw.simulate((2,)), placements=[sw.Shard(0)])
    made.w = nn.Parameter(x)
    source = From("w4", make=lambda w: w.T)
    loaded, peak, _ = at_the_peak(lambda: load(made, files / "full.safetensors", keys={"w": source}, strict=False))
    assert peak < 64 * MB and loaded.num_bytes <= 1.001 * LARGEST and made.w.to_local()[0, 0].item() == 4


@pytest.mark.parametrize("dim", [0, 1])
def test_saving(dim: int, tmp_path: Path) -> None:
    """No tensor is gathered, of which files have the whole."""
    made = net(sw.simulate((2,)), sw.Shard(dim))
    _, peak, _ = at_the_peak(lambda: save(made, tmp_path, max_shard_size="100MB"))
    assert peak < LARGEST


def test_steps(tmp_path: Path) -> None:
    made = net(sw.simulate((2,)), sw.Shard(0))
    _, peak, _ = at_the_peak(lambda: save_step(tmp_path, step=1, model=made, background=False))
    assert peak < 64 * MB
    _, peak, _ = at_the_peak(lambda: load_latest(tmp_path, model=made))
    assert peak < 64 * MB
