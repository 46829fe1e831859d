"""Captured functions and modules with gradients: nodes of a larger graph, forward and backward a program each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import WIDTH, Net, assert_same, batch, net_on, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode


def mesh_2x2() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"))


def pair(prepare: Callable[[nn.Module], Any]) -> tuple[nn.Module, nn.Module, Any]:
    """Equal models, the second of which is captured as `prepare` does it."""
    mesh = mesh_2x2()
    plain = nn.Sequential(*(net_on(mesh, dropout=0.1) for _ in range(3)))
    other = copy.deepcopy(plain)
    prepare(other)
    return plain, other, mesh


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "whole": lambda net: sw.compile(net, backend="fx"),
    "by blocks": lambda net: [sw.compile(block, backend="fx") for block in net],  # type: ignore[union-attr]
    "one of three": lambda net: sw.compile(net[1], backend="fx"),  # type: ignore[index]
}


def assert_trains_alike(plain: nn.Module, other: nn.Module, mesh: Any, calls: int = 3) -> None:
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (plain, other)]
    for call in range(calls):
        found = []
        for net, optimizer in zip((plain, other), optimizers, strict=True):
            torch.manual_seed(call)
            x = batch(mesh, call).requires_grad_()
            optimizer.zero_grad()
            y = net(x)
            (y.square().mean() + y.sum()).backward()
            optimizer.step()
            found.append((y, x.grad))
        assert_same(found[1], found[0], f"call {call}, result")
        assert_same(state_of(other), state_of(plain), f"call {call}, state")


@pytest.mark.parametrize("way", WAYS)
def test_modules_train_alike(way: str) -> None:
    assert_trains_alike(*pair(WAYS[way]))


WITHOUT_PASSES: dict[str, Callable[[nn.Module], Any]] = {
    "whole": lambda net: sw.compile(net, backend="fx", passes=()),
    "by blocks": lambda net: [sw.compile(block, backend="fx", passes=()) for block in net],  # type: ignore[union-attr]
}


@pytest.mark.parametrize("way", WITHOUT_PASSES)
def test_communication_is_the_same(way: str) -> None:
    plain, other, mesh = pair(WITHOUT_PASSES[way])
    found = []
    for net in (plain, other):
        for _ in range(2):
            x = batch(mesh, 0)
            with CommDebugMode() as comms:
                net(x).square().mean().backward()
        found.append((comms.get_comm_counts(), comms.get_comm_bytes()))
    assert found[0] == found[1]


def test_gradients_of_data_parallelism_are_reduced_together() -> None:
    mesh = sw.simulate((4,), ("dp",))
    net = sw.distribute_module(nn.Sequential(Net(), Net()), mesh)
    for block in net:
        sw.compile(block, backend="fx")
    for _ in range(2):
        x = batch(mesh, 0)
        with CommDebugMode() as comms:
            net(x).square().mean().backward()
    assert comms.get_comm_counts() == {"all_reduce": 1}


def test_gradients_are_accumulated() -> None:
    plain, other, mesh = pair(WAYS["whole"])
    for net in (plain, other):
        torch.manual_seed(0)
        with sw.parallel.no_sync():
            net(batch(mesh, 0)).square().mean().backward()
        net(batch(mesh, 1)).square().mean().backward()
    assert_same(state_of(other), state_of(plain), "state")


def test_inside_a_checkpoint() -> None:
    plain, other, mesh = pair(WAYS["by blocks"])
    found = []
    for net in (plain, other):
        torch.manual_seed(0)
        x = batch(mesh, 0)
        for block in net:
            x = checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()
        found.append(x)
    assert_same(found[1], found[0], "result")
    assert_same(state_of(other), state_of(plain), "state")


def test_results_of_all_kinds() -> None:
    mesh = mesh_2x2()
    weight = nn.Parameter(sw.distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [sw.Replicate(), sw.Shard(1)]))

    def function(x: Any, scale: float) -> Any:
        y = x @ weight
        return {"y": y, "sum": (y.sum(), y.argmax(1)), "x": x, "weight": weight, "text": "t", "scale": scale * 2}

    compiled = sw.compile(function, backend="fx")
    x = batch(mesh, 0).requires_grad_()
    for _ in range(2):
        found, wanted = compiled(x, 0.5), function(x, 0.5)
        assert found["x"] is x and found["weight"] is weight and found["text"] == "t" and found["scale"] == 1.0
        assert_same(found, wanted, "result")
        assert found["y"].requires_grad and not found["sum"][1].requires_grad
    grads = [torch.autograd.grad(r["y"].square().sum() + r["sum"][0], [x, weight]) for r in (found, wanted)]
    assert_same(grads[0], grads[1], "gradients")


def test_gradients_of_gradients_are_refused() -> None:
    mesh = mesh_2x2()
    net = sw.compile(net_on(mesh), backend="fx")
    x = batch(mesh, 0).requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_plain_tensors_and_no_mesh_at_all() -> None:
    torch.manual_seed(0)
    plain = Net(dropout=0.1)
    other = sw.compile(copy.deepcopy(plain), backend="fx")
    for call in range(3):
        found = []
        for net in (plain, other):
            torch.manual_seed(call)
            x = torch.randn(3, WIDTH, requires_grad=True)
            net.zero_grad()
            y = net(x)
            y.square().sum().backward()
            found.append((y, x.grad, [p.grad for p in net.parameters()]))
        assert_same(found[1], found[0], f"call {call}")


def test_a_module_stays_the_module_that_it_is() -> None:
    net = Net()
    names = list(net.state_dict())
    assert sw.compile(net, backend="fx") is net
    assert list(net.state_dict()) == names and type(net) is Net
    assert copy.deepcopy(net)._compiled_call_impl is None  # a copy has programs of its own, when it is asked to


def test_views_and_writes() -> None:
    """What shares memory outside of a program shares it inside."""
    mesh = mesh_2x2()
    kept = sw.distribute_tensor(torch.zeros(8, WIDTH), mesh, [sw.Shard(0), sw.Replicate()])
    part = kept[:, :4]

    def step(x: Any) -> Tensor:
        kept.add_(x)
        part.mul_(2)
        return kept[:, 2:6] * 1

    expected = torch.zeros(8, WIDTH)
    compiled = sw.compile(step, backend="fx")
    for call in range(3):
        x = batch(mesh, call)
        found = compiled(x)
        expected += x.full_tensor()
        expected[:, :4] *= 2
        assert torch.equal(kept.full_tensor(), expected) and torch.equal(found.full_tensor(), expected[:, 2:6])


@torch.library.custom_op("tests::row_shares", mutates_args=())
def row_shares(x: Tensor) -> Tensor:
    """An op in Python, which asks for its argument's shape."""
    return x / x.shape[1]


row_shares.register_fake(torch.empty_like)
row_shares.register_autograd(
    lambda ctx, grad: row_shares(grad) + 0 * ctx.saved_tensors[0].reshape(grad.shape[0], grad.shape[1]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("kind", ["step", "function"])
@pytest.mark.parametrize("op", ["custom", "cross_entropy"])
def test_ops_in_python_see_shards(op: str, kind: str) -> None:
    """Also of what the program is given: a DTensor's shape is that of the whole."""
    mesh = sw.simulate((2,), ("tp",))
    if op == "custom":
        sw.experimental.register_sharding(row_shares, rule="ij -> ij")
    target = sw.distribute_tensor(torch.tensor([1, 8, 3, 0]), mesh)
    losses = {
        "custom": lambda x: row_shares(x).sum(),
        "cross_entropy": lambda x: nn.functional.cross_entropy(x, target),
    }
    loss = losses[op]
    x, y = (sw.distribute_tensor(torch.arange(36.0).view(4, 9), mesh, [sw.Shard(1)]).requires_grad_() for _ in range(2))

    def step() -> None:
        loss(y).backward()

    compiled = sw.compile(step, backend="fx") if kind == "step" else sw.compile(loss, backend="fx")
    for _ in range(2):
        x.grad = y.grad = None
        loss(x).backward()
        compiled() if kind == "step" else compiled(y).backward()
        assert torch.equal(x.grad.full_tensor(), y.grad.full_tensor())


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 1, 2)])
def test_a_plain_tensor_is_laid_out_inside(sizes: tuple[int, ...]) -> None:
    """What each rank sends on along the next axis is what it was sent along the last, which the simulator shares."""
    mesh = sw.simulate(sizes, ("a", "b", "c")[: len(sizes)])
    placements: list[Any] = [sw.Shard(0), *[sw.Replicate()] * (len(sizes) - 1)]
    compiled = sw.compile(lambda x: (sw.distribute_tensor(x, mesh, placements) * 2).sum(0), backend="fx")
    for _ in range(2):
        x = torch.randn(8, 4)
        assert_same(
            compiled(x).full_tensor(), sw.distribute_tensor(x * 2, mesh, placements).sum(0).full_tensor(), "sum"
        )
