"""Programs that run again and again keep nothing, and go with the function that they were captured of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import batch, net_on
from torch import nn

import shardwise as sw
from shardwise.graph import programs_of


def train_step(mesh: Any) -> tuple[nn.Module, Callable[[Any], Any]]:
    net = net_on(mesh, dropout=0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return net, sw.compile(step, backend="fx")


def module(mesh: Any) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Its backward pass is a program, too."""
    net = sw.compile(net_on(mesh), backend="fx")

    def run(x: Any) -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return net, run


def alive() -> tuple[int, int]:
    """Objects that the collector knows, and bytes of tensors among them."""
    gc.collect()
    objects = gc.get_objects()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in objects if type(x) is torch.Tensor
    }
    return len(objects), sum(storages.values())


@pytest.mark.parametrize(("make", "num_runs"), [(train_step, 1000), (module, 200)])
def test_runs_keep_nothing(make: Any, num_runs: int) -> None:
    mesh = sw.simulate((2,), ("tp",))
    _net, run = make(mesh)
    x = batch(mesh, 0)
    for _ in range(20):
        run(x)
    alive()  # which makes an object for each storage that it asks for the first time
    objects, num_bytes = alive()
    for _ in range(num_runs):
        run(x)
    now = alive()  # what other tests left may come and go, but not with every run
    assert now[0] - objects < num_runs // 2, "objects are kept"
    assert now[1] - num_bytes < num_runs, "tensors are kept"


def test_programs_go_with_their_function() -> None:
    mesh = sw.simulate((2,), ("tp",))
    net, run = train_step(mesh)
    for call in range(3):
        run(batch(mesh, call))
    kept = [weakref.ref(x) for x in (*net.parameters(), programs_of(run).runs[0][1])]
    del net, run
    gc.collect()
    assert not any(ref() is not None for ref in kept)
