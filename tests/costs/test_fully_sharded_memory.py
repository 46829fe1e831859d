"""The peak of fully sharded training, as the allocator has it, on one rank of a fake process group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from saved import fake_mesh, on_cpu
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw

NUM_RANKS, NUM_MODULES, WIDTH, ROWS = 8, 6, 128, 4
SMALL = 4 * WIDTH
"""Bytes of what is no parameter and no activation: losses, seeds and the like."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(NUM_RANKS, names=("dp",), rank=1) as mesh:
        yield mesh


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_MODULES)))


def sharded(plain: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = copy.deepcopy(plain)
    for module in (*net, net):  # type: ignore[misc]
        sw.fully_shard(module, mesh=mesh, **options)
    return net


def bytes_of(net: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in net.parameters())


def step(net: nn.Module, x: Tensor) -> None:
    net(x).square().mean().backward()


def peak(net: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], object]) -> int:
    """Beyond what rests, in a step that finds no gradients; the order of modules is learned before."""
    for _ in range(2):
        step(net, x)
        net.zero_grad()
    found = on_cpu(lambda: run(net, x))[1]
    net.zero_grad()
    return found


def test_two_modules_are_gathered_and_gradients_are_sharded(mesh: DeviceMesh) -> None:
    """Beside its shards a rank has two gathered modules and the activations; in the backward pass also the shards of
    the gradients, and the gradients of the module that is on its way to become such."""
    plain, x = model(), torch.randn(ROWS, WIDTH)
    whole, module = bytes_of(plain), bytes_of(plain[0])
    activations = peak(plain, x, nn.Module.__call__) + SMALL
    gathered = 2 * (module + module // NUM_RANKS) + activations  # with what each rank sends of them
    ours, kept = sharded(plain, mesh), sharded(plain, mesh, reshard_after_forward=False)
    assert peak(ours, x, nn.Module.__call__) <= gathered
    assert peak(ours, x, step) <= whole // NUM_RANKS + gathered + module
    assert peak(kept, x, step) > whole, "which this would see"


@pytest.mark.parametrize("own", [False, True], ids=["dtensors", "a-batch-per-rank"])
def test_nothing_is_left_but_shards(mesh: DeviceMesh, own: bool) -> None:
    plain = model()
    net = sharded(plain, mesh)
    x = (
        torch.randn(ROWS, WIDTH)
        if own
        else sw.distribute_tensor(torch.randn(ROWS * NUM_RANKS, WIDTH), mesh, [sw.Shard(0)])
    )
    for _ in range(2):
        step(net, x)
        net.zero_grad()
    left, _ = on_cpu(lambda: step(net, x))
    assert left <= bytes_of(plain) // NUM_RANKS + SMALL
