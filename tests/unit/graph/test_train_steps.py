"""A captured train step is, bit for bit, the step: on the simulator, where the ranks' programs run in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import HIDDEN, WIDTH, Made, Net, batch, compare, net_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
}
BRANCHING = {"RAdam": 2, "RAdam foreach": 2}
"""Optimizers that do something else from some step on, and how many programs that makes."""


def trained(
    mesh: Any, optimizer: Any = OPTIMIZERS["AdamW"], loss: Callable[[nn.Module, Any], Tensor] | None = None
) -> Made:
    """A step with a learning rate that changes."""
    net = net_on(mesh, dropout=0.1)
    made = optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)

    def step(x: Any) -> Any:
        made.zero_grad()
        found = net(x).square().mean() if loss is None else loss(net, x)
        found.backward()
        made.step()
        return found

    def arguments(call: int) -> tuple[Any, ...]:
        if call:
            scheduler.step()
        return (batch(mesh, call),)

    return (net, made), step, arguments


def mesh_2x2() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    compare(
        lambda: trained(mesh_2x2(), OPTIMIZERS[name]), 7 if name in BRANCHING else 4, programs=BRANCHING.get(name, 1)
    )


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2), (1, 3), (3, 1)], ids=str)
def test_meshes(shape: tuple[int, int]) -> None:
    """Uneven shards, too: 8 and 16 over 3 ranks."""
    compare(lambda: trained(sw.simulate(shape, ("dp", "tp"))))


def test_muon() -> None:
    def made() -> Made:
        net = net_on(mesh_2x2())
        matrices = torch.optim.Muon([net.up.weight, net.down.weight], lr=0.02)

        def step(x: Any) -> Any:
            matrices.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            matrices.step()
            return loss

        return (net, matrices), step, lambda call: (batch(mesh_2x2(), call),)

    compare(made)


# What steps are made of


def accumulated(net: nn.Module, x: Any) -> Tensor:
    with sw.parallel.no_sync():
        (net(x * 2).square().mean() / 2).backward()
    return net(x).square().mean() / 2


def under_autocast(net: nn.Module, x: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x).float().square().mean()


def recomputed(net: Any, x: Any) -> Tensor:
    return checkpoint(net, x, use_reentrant=False).square().mean()


def recomputed_reentrantly(net: Any, x: Any) -> Tensor:
    return checkpoint(net, x.detach().requires_grad_(), use_reentrant=True).square().mean()


def with_noise(net: nn.Module, x: Any) -> Tensor:
    return net(x + 0.1 * torch.randn_like(x)).square().mean()


def with_penalty(net: Any, x: Any) -> Tensor:
    return net(x).square().mean() + 0.01 * sum(p.square().sum() for p in net.parameters())


def with_gradient_of_input(net: nn.Module, x: Any) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    return net(x - 0.1 * grad).square().mean()


def redistributed(net: nn.Module, x: Any) -> Tensor:
    return net(x).redistribute(placements=[sw.Replicate(), sw.Shard(0)]).square().mean()


LOSSES = {
    f.__name__: f
    for f in (
        accumulated,
        under_autocast,
        recomputed,
        recomputed_reentrantly,
        with_noise,
        with_penalty,
        with_gradient_of_input,
        redistributed,
    )
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    compare(lambda: trained(mesh_2x2(), loss=LOSSES[name]))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_gradients_are_clipped(kind: str, foreach: bool) -> None:
    def clipped(mesh: Any) -> Made:
        (net, made), _, arguments = trained(mesh)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            found = None
            if kind == "norm":
                found = nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=foreach)
            else:
                nn.utils.clip_grad_value_(net.parameters(), 0.01, foreach=foreach)
            made.step()
            return loss, found

        return (net, made), step, arguments

    compare(lambda: clipped(mesh_2x2()))


def test_losses_are_scaled() -> None:
    """With a fused optimizer, which skips a step whose gradients overflow without Python looking at them."""

    def scaled(mesh: Any) -> Made:
        net = net_on(mesh)
        made = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(made)
            scaler.update()
            return loss

        return (net, made), step, lambda call: (batch(mesh, call),)

    compare(lambda: scaled(mesh_2x2()))


def test_averages_of_weights() -> None:
    def averaged(mesh: Any) -> Made:
        (net, made), _, arguments = trained(mesh)
        average = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            made.step()
            average.update_parameters(net)  # looks at how many there were before it counts on
            return loss

        return (net, made, average), step, arguments

    compare(lambda: averaged(mesh_2x2()))


def test_hooks_see_gradients() -> None:
    def hooked(mesh: Any) -> Made:
        (net, made), step, arguments = trained(mesh)
        net.up.weight.register_hook(lambda grad: grad * 2)
        net.down.register_forward_hook(lambda module, args, output: output + 1)
        net.norm.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
        return (net, made), step, arguments

    compare(lambda: hooked(mesh_2x2()))


def test_buffers_change_in_place() -> None:
    class Normed(nn.Module):
        def __init__(self, mesh: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.norm = nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN)
            sw.distribute_module(self, mesh)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    def normed(mesh: Any) -> Made:
        net = Normed(mesh)
        made = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            made.step()
            return loss

        return (net, made), step, lambda call: (batch(mesh, call),)

    compare(lambda: normed(mesh_2x2()))


@pytest.mark.parametrize("is_distributed", [False, True])
def test_numbers_that_are_read_out_of_data(is_distributed: bool) -> None:
    def scaled() -> Made:
        weight = torch.ones(WIDTH, requires_grad=True)
        weight = nn.Parameter(sw.distribute_tensor(weight, mesh_2x2())) if is_distributed else weight

        def step(x: Any) -> Any:
            weight.grad = None
            loss = (x / x.abs().max().item() * weight).sum()
            loss.backward()
            largest, norm = x.max().item(), weight.grad.norm(2).item()
            rounded = round(largest, 2), math.floor(norm), math.ceil(largest), norm // 0.3
            scaled = x * ((largest - 0.5) / (norm + 1) ** 2)
            return loss, loss.item(), norm, rounded, scaled, torch.tensor(-largest)

        return (
            (weight,),
            step,
            lambda call: (batch(mesh_2x2(), call) if is_distributed else torch.full((4, 8), call + 1.0),),
        )

    compare(scaled)


def test_what_is_counted_through_a_view() -> None:
    """The average of a norm without momentum is over as many batches as it has counted, on a DTensor."""
    mesh = mesh_2x2()

    def normed() -> Made:
        norm = sw.distribute_module(nn.BatchNorm1d(WIDTH, momentum=None), mesh)
        return norm, norm.forward, lambda call: (batch(mesh, call),)

    compare(normed, 4, programs=4)  # that many divisors


@pytest.mark.parametrize("is_distributed", [False, True])
def test_counts_are_read_counted_on_and_returned(is_distributed: bool) -> None:
    def counted() -> Made:
        count, total = torch.zeros(()), torch.zeros(3)

        def step(x: Any) -> Any:
            before = x * count
            view = count.detach()
            view.add_(1)
            total.add_(count)
            return before, x * view, x * count, count.item()

        return (count, total), step, lambda call: (batch(mesh_2x2(), call) if is_distributed else torch.ones(3),)

    compare(counted, 3)


def test_a_count_that_data_are_written_to_is_none() -> None:
    count = torch.zeros(())

    def step(x: Any) -> Any:
        count.detach().add_(x.sum())
        return x * 2 if count > 3 else x

    with pytest.raises(sw.errors.CaptureError, match="depends on the data it computes"):
        sw.compile(step, backend="fx")(torch.ones(3))


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_that_step_in_the_backward_pass(foreach: bool) -> None:
    def hooked() -> Made:
        net = net_on(mesh_2x2())
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=foreach) for p in net.parameters()}

        def steps(param: Any) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(steps)

        def step(x: Any) -> Any:
            loss = net(x).square().mean()
            loss.backward()
            return loss

        return (net, *optimizers.values()), step, lambda call: (batch(mesh_2x2(), call),)

    compare(hooked)


def test_plain_tensors_around_layers_on_a_part_of_the_mesh() -> None:
    """What all ranks have alike is one tensor, whose gradient counts once."""

    def styled() -> Made:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Net())
        whole = sw.Replicate()
        styles = {"1.up": ColwiseParallel(output_layouts=whole), "1.down": RowwiseParallel(input_layouts=whole)}
        parallelize_module(net, mesh_2x2()["tp"], styles)
        made = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            made.step()
            return loss

        return (net, made), step, lambda call: (torch.full((4, WIDTH), call + 1.0),)

    compare(styled)


def test_losses_over_a_split_vocabulary() -> None:
    def classified(mesh: Any) -> Made:
        net = net_on(mesh)
        torch.manual_seed(0)
        head = nn.Parameter(sw.distribute_tensor(torch.randn(20, WIDTH), mesh, [sw.Replicate(), sw.Shard(0)]))
        made = torch.optim.SGD([*net.parameters(), head], lr=0.1)

        def step(x: Any, target: Any) -> Any:
            made.zero_grad()
            loss = F.cross_entropy(F.linear(net(x), head), target, label_smoothing=0.1)
            loss.backward()
            made.step()
            return loss

        def arguments(call: int) -> tuple[Any, ...]:
            target = torch.randint(20, (8,), generator=torch.Generator().manual_seed(call))
            return batch(mesh, call), sw.distribute_tensor(target, mesh, [sw.Shard(0), sw.Replicate()])

        return (net, made, head), step, arguments

    compare(lambda: classified(mesh_2x2()))


def test_bad_targets_are_refused_in_every_run() -> None:
    mesh = mesh_2x2()
    weight = nn.Parameter(sw.distribute_tensor(torch.randn(20, WIDTH), mesh))

    def step(x: Any, target: Any) -> Any:
        return F.cross_entropy(F.linear(x, weight), target)

    compiled = sw.compile(step, backend="fx")
    place = [sw.Shard(0), sw.Replicate()]
    with torch.no_grad():
        compiled(batch(mesh, 0), sw.distribute_tensor(torch.arange(8), mesh, place))
        with pytest.raises(IndexError, match="target 20 is out of bounds"):
            compiled(batch(mesh, 0), sw.distribute_tensor(torch.arange(13, 21), mesh, place))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_fully_sharded_modules(shape: tuple[int, ...]) -> None:
    def sharded() -> Made:
        mesh = sw.simulate(shape, ("dp", "shard")[-len(shape) :])
        torch.manual_seed(0)
        net = nn.Sequential(Net(0.1), Net(0.1))
        for part in (*net, net):
            sw.fully_shard(part, mesh=mesh)
        made = torch.optim.AdamW(net.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            made.step()
            return loss

        place = [sw.Shard(0)] * len(shape)
        return (net, made), step, lambda call: (sw.distribute_tensor(torch.randn(8, WIDTH), mesh, place),)

    compare(sharded)


def test_modules_in_mixed_precision() -> None:
    def sharded() -> Made:
        mesh = sw.simulate((2,), ("dp",))
        torch.manual_seed(0)
        net = nn.Sequential(Net(), Net())
        policy = sw.parallel.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*net, net):
            sw.fully_shard(part, mesh=mesh, mp_policy=policy)
        made = torch.optim.AdamW(net.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            made.zero_grad()
            loss = net(x).float().square().mean()
            loss.backward()
            made.step()
            return loss

        return (net, made), step, lambda call: (sw.distribute_tensor(torch.randn(8, WIDTH), mesh, [sw.Shard(0)]),)

    compare(sharded)
