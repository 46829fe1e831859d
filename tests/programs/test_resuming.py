"""Training that is stopped and goes on from a step that was saved: on the same mesh bit for bit; on any other, and on
one device, from exactly the same numbers."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_models import Model, Tied, batch, loss_of, shard
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise.checkpoint import load_latest, save_step
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning"),
    pytest.mark.usefixtures("double_precision"),
]
R, S = sw.Replicate(), sw.Shard
Way = Callable[[nn.Module], nn.Module]


def full(x: Any) -> Any:
    if isinstance(x, sw.DTensor):
        return x.detach().full_tensor()
    return x.detach().clone() if isinstance(x, Tensor) else x


def state_of(optimizer: optim.Optimizer) -> list[Any]:
    """Its state, and its parameters, as one device has them."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                found.append(key)
                visit(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        else:
            found.append(full(value))

    visit([optimizer.state[param] for group in optimizer.param_groups for param in group["params"]])
    visit(optimizer.param_groups)
    return found


def check_equal(found: optim.Optimizer, expected: list[Any]) -> None:
    state = state_of(found)
    assert len(state) == len(expected)
    for a, b in zip(state, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, Tensor) else a == b, (a, b)


# Every optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def on(shape: tuple[int, ...], *placements: sw.Placement) -> Way:
    def lay(model: nn.Module) -> nn.Module:
        def part(name: str, module: nn.Module, mesh: Any) -> None:
            for key, p in module._parameters.items():
                where = [sw.Shard(0) if x == S(1) and p.dim() < 2 else x for x in placements]
                module._parameters[key] = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, where))

        return sw.distribute_module(model, sw.simulate(shape, ("dp", "tp")[: len(shape)]), part)

    return lay


WAYS: dict[str, Way] = {
    "rows": on((3,), S(0)),
    "columns": on((2,), S(1)),
    "both": on((2, 2), S(0), S(1)),
    "one device": lambda model: model,
}
OPTIMIZERS = {
    name: cls
    for name, cls in vars(optim).items()
    if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and name not in ("Optimizer", "SparseAdam", "Muon")
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "LBFGS": {"max_iter": 3, "history_size": 3},
}


def iterate(model: Any, optimizer: optim.Optimizer, times: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = torch.randn(6, 5), torch.randn(6, 3)
        if isinstance(model[0].weight, sw.DTensor):
            x, y = (sw.distribute_tensor(t, model[0].weight.device_mesh) for t in (x, y))
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(times):
        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_optimizer(name: str, way: str, tmp_path: Path) -> None:
    def made(lay: Way) -> tuple[nn.Module, optim.Optimizer]:
        model = lay(net())
        return model, OPTIMIZERS[name](model.parameters(), **OPTIONS.get(name, {}))

    model, optimizer = made(WAYS[way])
    iterate(model, optimizer, 2)
    save_step(tmp_path, step=2, model=model, optimizer=optimizer, background=False)
    saved = state_of(optimizer)
    iterate(model, optimizer, 2)
    expected = state_of(optimizer)
    for other in (way, *random.Random(name).sample(sorted(WAYS), 2)):
        model, optimizer = made(WAYS[other])
        assert load_latest(tmp_path, model=model, optimizer=optimizer) == 2
        check_equal(optimizer, saved)
        iterate(model, optimizer, 2)
        if other == way:
            check_equal(optimizer, expected)


@pytest.mark.parametrize("way", ["rows", "both", "one device"])
def test_matrices_that_have_owners(way: str, tmp_path: Path) -> None:
    def made() -> tuple[Any, optim.Optimizer]:
        model = WAYS[way](net())
        return model, optim.Muon([model[0].weight, model[2].weight], lr=0.1)

    model, optimizer = made()
    iterate(model, optimizer, 2)
    save_step(tmp_path, step=2, model=model, optimizer=optimizer, background=False)
    iterate(model, optimizer, 2)
    expected = state_of(optimizer)
    model, optimizer = made()
    load_latest(tmp_path, model=model, optimizer=optimizer)
    iterate(model, optimizer, 2)
    check_equal(optimizer, expected)


def test_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    model = WAYS["rows"](net())
    save_step(tmp_path, step=0, model=model, optimizer=optim.AdamW(model.parameters()), background=False)
    optimizer = optim.AdamW(model.parameters(), lr=0.5)
    iterate(model, optimizer, 1)
    load_latest(tmp_path, model=model, optimizer=optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3


def test_groups_are_found_by_names(tmp_path: Path) -> None:
    """Not by the order of their parameters."""
    model = WAYS["rows"](net())
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.2}]
    optimizer = optim.AdamW(groups)
    iterate(model, optimizer, 2)
    save_step(tmp_path, step=0, model=model, optimizer=optimizer, background=False)
    other = WAYS["columns"](net())
    groups = [{"params": list(other[at].parameters())[::-1]} for at in (0, 2)]
    found = optim.AdamW(groups)
    load_latest(tmp_path, model=other, optimizer=found)
    assert [group["lr"] for group in found.param_groups] == [0.1, 0.2]
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full(optimizer.state[p]["exp_avg_sq"]), full(found.state[q]["exp_avg_sq"])), name


# Every scheduler


def schedulers() -> Iterator[tuple[str, Callable[[optim.Optimizer], Any]]]:
    plain = optim.lr_scheduler
    yield "LambdaLR", lambda o: plain.LambdaLR(o, lambda step: 0.9**step)
    yield "MultiplicativeLR", lambda o: plain.MultiplicativeLR(o, lambda step: 0.9)
    yield "StepLR", lambda o: plain.StepLR(o, 2)
    yield "MultiStepLR", lambda o: plain.MultiStepLR(o, [2, 5])
    yield "ConstantLR", lambda o: plain.ConstantLR(o, total_iters=3)
    yield "LinearLR", lambda o: plain.LinearLR(o, total_iters=5)
    yield "ExponentialLR", lambda o: plain.ExponentialLR(o, 0.9)
    yield "PolynomialLR", lambda o: plain.PolynomialLR(o, 6, 2.0)
    yield "CosineAnnealingLR", lambda o: plain.CosineAnnealingLR(o, 6)
    yield "CosineAnnealingWarmRestarts", lambda o: plain.CosineAnnealingWarmRestarts(o, 2, 2)
    yield "CyclicLR", lambda o: plain.CyclicLR(o, 0.01, 0.1, 2)
    yield "OneCycleLR", lambda o: plain.OneCycleLR(o, 0.1, 8)
    yield "ReduceLROnPlateau", lambda o: plain.ReduceLROnPlateau(o, patience=0)
    yield (
        "SequentialLR",
        lambda o: plain.SequentialLR(o, [plain.LinearLR(o, total_iters=2), plain.MultiStepLR(o, [1, 2])], [2]),
    )
    yield "ChainedScheduler", lambda o: plain.ChainedScheduler([plain.ConstantLR(o), plain.ExponentialLR(o, 0.8)])
    yield "SWALR", lambda o: optim.swa_utils.SWALR(o, 0.01, 3)


SCHEDULERS = dict(schedulers())


def test_no_scheduler_of_torch_is_forgotten() -> None:
    all_of_them = {
        name
        for name, cls in vars(lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, lr_scheduler.LRScheduler)
    }
    assert all_of_them - {*SCHEDULERS} <= {"LRScheduler", "_LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name: str, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, optim.Optimizer, Any]:
        model = WAYS["rows"](net())
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for at in range(4):
            optimizer.step()
            scheduler.step(*([1.0 + at] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler)
    save_step(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler, background=False)
    expected = rates(optimizer, scheduler)
    model, optimizer, scheduler = made()
    load_latest(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler) == expected


# Fully sharded modules, styles, and both: a language model with everything


def fully(shape: tuple[int, ...], kind: Callable[[], nn.Module] = Model) -> tuple[Any, nn.Module]:
    mesh = sw.simulate(shape, ("dp", "tp")[: len(shape)])
    torch.manual_seed(1)
    return mesh, shard(kind(), sw.fully_shard, mesh=mesh["dp"])


def with_styles(shape: tuple[int, ...]) -> tuple[Any, nn.Module]:
    mesh = sw.simulate(shape, ("dp", "tp"))
    torch.manual_seed(1)
    model = Model()
    for block in model.blocks:
        up, down = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
        parallelize_module(block, mesh["tp"], {"up": up, "down": down})
    return mesh, shard(model, sw.fully_shard, mesh=mesh["dp"])


def train(mesh: Any, model: Any, optimizer: optim.Optimizer, scheduler: Any, times: int) -> list[float]:
    losses = []
    for _ in range(times):
        data: Any = batch()
        if mesh is not None:
            data = [sw.distribute_tensor(x, mesh, [S(0), R][: mesh.ndim]) for x in data]
        optimizer.zero_grad()
        loss = loss_of(model, *data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


PROGRAMS: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]]]] = {
    "fully sharded": (lambda: fully((4,)), [lambda: fully((2,)), lambda: fully((3,)), lambda: (None, Model())]),
    "tied": (lambda: fully((2,), Tied), [lambda: fully((3,), Tied), lambda: (None, Tied())]),
    "fully sharded, with styles": (lambda: with_styles((2, 2)), [lambda: with_styles((1, 3)), lambda: fully((4,))]),
    "one device": (lambda: (None, Model()), [lambda: fully((2,)), lambda: with_styles((2, 1))]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    def made(make: Callable[[], Any]) -> tuple[Any, nn.Module, optim.Optimizer, Any]:
        mesh, model = make()
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        return mesh, model, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, 20)

    first, others = PROGRAMS[name]
    mesh, model, optimizer, scheduler = made(first)
    progress: dict[str, Any] = {"seen": train(mesh, model, optimizer, scheduler, 2)}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}
    saving = save_step(tmp_path, step=2, **state)
    saved = state_of(optimizer)
    expected = train(mesh, model, optimizer, scheduler, 3)
    saving.wait()
    for make in (first, *others):
        mesh, model, optimizer, scheduler = made(make)
        progress = {}
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}
        torch.manual_seed(99)
        assert load_latest(tmp_path, **state) == 2 and len(progress["seen"]) == 2
        check_equal(optimizer, saved)
        found = train(mesh, model, optimizer, scheduler, 3)
        torch.testing.assert_close(found, expected, rtol=0 if make is first else 1e-9, atol=0)
