"""Nothing outlives its use: models, aliases, graphs, hooks, in the simulator and on a process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import as_mesh
from shardwise.redistribute import move_cache as shared


@pytest.fixture(params=["simulated", "process group"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "simulated":
        yield sw.simulate((2, 2), ("dp", "tp"))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def model(mesh: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, [Replicate(), Shard(0)]))

    return sw.distribute_module(net, mesh, shard)


def batch(mesh: Any) -> Tensor:
    return sw.distribute_tensor(torch.randn(4, 8), mesh, [Shard(0), Replicate()])


def references(tensors: list[Tensor]) -> list[weakref.ref]:
    every = [shard for x in tensors for shard in (x, *x.__dict__.get("_peers", ()))]
    return [weakref.ref(x) for x in every]


def check_freed(found: list[weakref.ref]) -> None:
    gc.collect()
    assert found and not any(ref() is not None for ref in found)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_deleted_model_is_freed(mesh: Any, foreach: bool) -> None:
    net = model(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    for _ in range(2):
        optimizer.zero_grad()
        net(batch(mesh)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    parameters = list(net.parameters())
    found = references([*parameters, *(p.grad for p in parameters)])
    del net, optimizer, parameters
    check_freed(found)


def test_what_was_moved_for_a_leaf_lives_until_the_backward_pass(mesh: Any) -> None:
    net = model(mesh)
    loss = net(batch(mesh)).sum()
    found = [weakref.ref(moved) for moved in shared.windows[as_mesh(mesh)].values()]
    assert found
    loss.backward()
    del loss
    check_freed(found)


def end_of_forward(mesh: Any) -> None:
    """Any backward pass, or any move without gradients: what was moved for leaves before it is let go."""
    with torch.no_grad():
        batch(mesh).sum().abs()


def test_a_graph_that_is_never_used_is_freed(mesh: Any) -> None:
    net = model(mesh)
    loss = net(batch(mesh)).sum()
    found = [*references(list(net.parameters())), weakref.ref(loss)]
    del loss, net
    end_of_forward(mesh)
    check_freed(found)


def test_few_moves_for_leaves_are_kept(mesh: Any) -> None:
    for _ in range(2 * shared.WINDOW):
        weight = sw.distribute_tensor(torch.randn(8, 8), mesh).requires_grad_()
        _ = batch(mesh) @ weight
    assert len(shared.windows[as_mesh(mesh)]) == shared.WINDOW
    end_of_forward(mesh)
    assert as_mesh(mesh) not in shared.windows


def uses(mesh: Any) -> dict[str, Callable[[nn.Parameter], Tensor]]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2 + 0 * ctx.saved_tensors[0]

    def hooked(p: nn.Parameter) -> Tensor:
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda q: None)
        return p * 2

    return {
        "hooks": hooked,
        "function": Double.apply,
        "reentrant checkpoint": lambda p: checkpoint(torch.tanh, p, use_reentrant=True),
        "checkpoint": lambda p: checkpoint(torch.tanh, p, use_reentrant=False),
        "double backward": lambda p: torch.autograd.grad((p**3).sum(), p, create_graph=True)[0],
        "local and back": lambda p: sw.DTensor.from_local(p.to_local() * 2, mesh, p.placements),
    }


@pytest.mark.parametrize(
    "name", ["hooks", "function", "reentrant checkpoint", "checkpoint", "double backward", "local and back"]
)
@pytest.mark.parametrize("run", [True, False])
def test_parameters_are_freed_after(mesh: Any, name: str, run: bool) -> None:
    p = nn.Parameter(sw.distribute_tensor(torch.randn(4, 4), mesh, [Replicate(), Shard(0)]))
    loss = (uses(mesh)[name](p) * batch(mesh)[:, :4]).sum()
    if run:
        loss.backward()
        assert p.grad is not None
    found = references([p])
    del p, loss
    end_of_forward(mesh)
    check_freed(found)


def test_memory_does_not_grow_over_steps(mesh: Any) -> None:
    net = model(mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    counts = []
    for step in range(6):
        optimizer.zero_grad()
        net(batch(mesh)).pow(2).mean().backward()
        optimizer.step()
        if step >= 3:
            counts.append(count())
    assert counts[0] == counts[-1]
