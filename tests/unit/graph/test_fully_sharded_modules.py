"""Captured programs beside eager passes of the same fully sharded module, which gathers, frees and keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured import WIDTH, assert_same, compare
from torch import nn

import shardwise as sw
from shardwise.errors import CaptureError, CaptureWarning

MESH = sw.simulate((2,), ("dp",))


def sharded() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    for part in (net[0], net[2], net):
        sw.fully_shard(part, mesh=MESH)
    return net


def rows(seed: int) -> Any:
    return sw.distribute_tensor(
        torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)), MESH, [sw.Shard(0)]
    )


def gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    return found


def add_one(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)


def eager_after_captured(made: Any, net: Any) -> Iterator[Any]:
    forward, back = made(lambda x: net(x)), made(lambda x: net(x).square().mean().backward())
    yield forward(rows(0)), net(rows(1))
    back(rows(0))
    yield gradients(net)
    net(rows(1)).square().mean().backward()
    yield gradients(net)


def captured_while_gathered(made: Any, net: Any) -> Iterator[Any]:
    """What was gathered before is no input: it is gathered anew in every run."""
    with torch.no_grad():
        net(rows(0))
        forward = made(lambda x: net(x))
        yield forward(rows(0))
        add_one(net)
        yield forward(rows(0))
    net(rows(0))
    back = made(lambda x: net(x).square().mean().backward())
    for seed in range(2):
        back(rows(seed))
        yield gradients(net)
        add_one(net)


def gradients_kept_for_later(made: Any, net: Any) -> Iterator[Any]:
    back = made(lambda x: net(x).square().mean().backward())
    back(rows(0))
    yield gradients(net)
    for seed in range(4):
        net.set_requires_gradient_sync(seed % 2 == 1)
        back(rows(seed))
        if seed % 2:
            yield gradients(net)


def gradients_divided_otherwise(made: Any, net: Any) -> Iterator[Any]:
    back = made(lambda x: net(x).square().mean().backward())
    for factor in (None, 8.0):
        if factor is not None:
            net[0].set_gradient_divide_factor(factor)
        back(torch.ones(8, WIDTH))  # a batch of each rank's own
        yield gradients(net)


STORIES = {
    story.__name__.replace("_", " "): story
    for story in (eager_after_captured, captured_while_gathered, gradients_kept_for_later, gradients_divided_otherwise)
}


@pytest.mark.parametrize("name", STORIES)
def test_a_program_does_what_the_module_does(name: str) -> None:
    def told(made: Callable[..., Any]) -> list[Any]:
        return [*STORIES[name](made, sharded())]

    with warnings.catch_warnings(action="ignore", category=CaptureWarning):
        found = told(lambda function: sw.compile(function, backend="fx"))
    assert_same(found, told(lambda function: function), name)


def test_passes_that_keep_gradients_run_as_they_are() -> None:
    net = sharded()
    back = sw.compile(lambda x: net(x).square().mean().backward(), backend="fx")
    net.set_requires_gradient_sync(False)
    with pytest.warns(CaptureWarning, match=r"runs as it is while no_sync\(\), or a fully sharded module, keeps grad"):
        back(rows(0))
    assert not sw.graph.programs_of(back).runs


def test_what_a_program_sets_of_a_module_is_undone() -> None:
    net = sharded()
    step = sw.compile(lambda x: (net.set_requires_gradient_sync(False), net(x).sum().backward())[1], backend="fx")
    with pytest.raises(CaptureError, match=r"the program changes net\.2\.sync, which only Python would do"):
        step(rows(0))
    net(rows(0)).sum().backward()
    assert_same(gradients(net), gradients_of(sharded()), "after it was refused")


def gradients_of(net: nn.Module) -> list[torch.Tensor]:
    net(rows(0)).sum().backward()
    return gradients(net)


def test_hooks_of_gradients_compute_with_dtensors() -> None:
    def told(made: Callable[..., Any]) -> Any:
        net = sharded()
        net[0].register_full_backward_hook(lambda module, given, found: (given[0] * 2,))  # type: ignore[index]
        x = rows(0).requires_grad_()
        made(net)(x).sum().backward()
        return x.grad, gradients(net)

    assert_same(told(lambda net: sw.compile(net, backend="fx")), told(lambda net: net), "hooks")


class Scaled(nn.Module):
    """With buffers of all kinds: read, and written to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(WIDTH) / WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return self.down(self.up(x * self.scale).relu()) * self.seen


@pytest.mark.parametrize("is_plan", [True, False])
def test_buffers_of_a_module_on_one_axis_with_a_batch_on_both(is_plan: bool) -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))

    def make() -> Any:
        torch.manual_seed(0)
        net = Scaled()
        if is_plan:
            sw.parallel.parallelize_module(net, mesh["tp"], {"up": "colwise", "down": "rowwise"})
        sw.fully_shard(net, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        def arguments(call: int) -> Any:
            torch.manual_seed(call)
            x = torch.randn(8, WIDTH)
            where = (mesh, [sw.Shard(0), sw.Replicate()]) if is_plan else (mesh["dp"], [sw.Shard(0)])
            return (sw.distribute_tensor(x, *where),)

        return (net, optimizer), step, arguments

    compare(make, 5)
