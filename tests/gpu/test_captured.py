"""Captured train steps on a CUDA device: node by node, compiled, and as a CUDA graph. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from captured import WIDTH, Net
from torch import nn

import shardwise as sw

DEVICE, STEPS = "cuda", 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A mesh of one real rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield sw.init_device_mesh(DEVICE, (1,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def losses(mesh: Any, compiled: Callable[[Any], Any], dropout: float = 0.0) -> list[float]:
    """Of a training loop with a learning rate that changes."""
    torch.manual_seed(0)
    net: nn.Module = sw.distribute_module(Net(dropout).to(DEVICE), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss

    step, found = compiled(step), []
    for number in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        found.append(step(sw.distribute_tensor(x, mesh)).full_tensor().item())
        scheduler.step()
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_node_by_node_it_is_the_step(dropout: float) -> None:
    mesh = sw.simulate((2,), ("tp",), device=DEVICE)
    expected = losses(mesh, lambda step: step, dropout)
    assert losses(mesh, lambda step: sw.compile(step, backend="fx"), dropout) == expected


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("cuda_graph", [False, True, "auto"])
def test_compiled_and_as_a_graph(alone: Any, cuda_graph: bool | str) -> None:
    expected = losses(alone, lambda step: step)
    found = losses(alone, lambda step: sw.compile(step, cuda_graph=cuda_graph))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_a_graph_is_said(alone: Any) -> None:
    with pytest.raises(sw.errors.CaptureError, match="cannot be a CUDA graph: it draws random numbers"):
        losses(alone, lambda step: sw.compile(step, cuda_graph=True), dropout=0.5)
