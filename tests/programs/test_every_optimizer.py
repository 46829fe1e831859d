"""Every optimizer of torch.optim, with every flag it has: the same parameters and the same state as on one device."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweep import mesh_of, normal
from torch import Tensor, nn, optim

import shardwise as sw

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("double_precision"),
]
R, S0, P = sw.Replicate(), sw.Shard(0), sw.Partial()

WAYS: list[tuple[tuple[int, ...], Callable[[Tensor], list[sw.Placement]]]] = [
    ((3,), lambda p: [S0]),
    ((2,), lambda p: [sw.Shard(p.dim() - 1)]),
    ((2, 2), lambda p: [S0, sw.Shard(p.dim() - 1)]),
    ((2,), lambda p: [P]),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def on(mesh: Any, where: Callable[[Tensor], list[sw.Placement]], model: nn.Module) -> nn.Module:
    def shard(name: str, part: nn.Module, mesh: Any) -> None:
        for key, p in part._parameters.items():
            part._parameters[key] = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, where(p)))

    return sw.distribute_module(model, mesh, shard)


def loss_of(model: Any) -> Tensor:
    x, y = normal(6, 5), normal(6, 3)
    weight = model[0].weight
    if isinstance(weight, sw.DTensor):
        x, y = (sw.distribute_tensor(t, weight.device_mesh) for t in (x, y))
    return (model(x) - y).square().mean()


def full(x: Any) -> Any:
    return x.detach().full_tensor() if isinstance(x, sw.DTensor) else x


def check_alike(found: optim.Optimizer, expected: optim.Optimizer) -> None:
    """The same parameters, and a state that can be saved: its tensors are DTensors, none is missing, none more."""
    for group, other in zip(found.param_groups, expected.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(full(p), q.detach(), rtol=1e-7, atol=1e-9)
    state, right = found.state_dict()["state"], expected.state_dict()["state"]
    assert {k: [*v] for k, v in state.items()} == {k: [*v] for k, v in right.items()}
    for key, kept in right.items():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                assert isinstance(state[key][name], sw.DTensor) or not value.dim()
                torch.testing.assert_close(full(state[key][name]), value, rtol=1e-6, atol=1e-8)


# Flags

FLAGS = (
    *("foreach", "fused", "capturable", "maximize", "amsgrad", "nesterov", "centered", "decoupled_weight_decay"),
    *("momentum", "weight_decay"),
)
ROUGH = ("Muon",)  # it computes in bfloat16, whatever it is given


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, cls in vars(optim).items():
        if not inspect.isclass(cls) or not issubclass(cls, optim.Optimizer) or name in ("Optimizer", "SparseAdam"):
            continue
        if name in ROUGH:
            continue
        known = inspect.signature(cls).parameters
        yield name, {}
        for flag in FLAGS:
            if flag in known:
                value: Any = 0.3 if flag in ("momentum", "weight_decay") else True
                yield name, {flag: value} | ({"momentum": 0.9} if flag == "nesterov" else {})
        if "foreach" in known:
            yield name, {"foreach": False}
        if "line_search_fn" in known:
            yield name, {"line_search_fn": "strong_wolfe"}


CASES = [*cases()]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{'-'.join(CASES[i][1])}")
def test_every_flag(case: int) -> None:
    name, options = CASES[case]

    def trained(model: nn.Module) -> optim.Optimizer:
        optimizer = getattr(optim, name)(model.parameters(), **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return optimizer

    try:
        expected = trained(net())
    except (AssertionError, RuntimeError, ValueError) as refusal:  # without a GPU, capturable is refused
        with pytest.raises(type(refusal)):
            trained(on(mesh_of((2,)), lambda p: [S0], net()))
        return
    for shape, where in (WAYS[case % len(WAYS)], WAYS[(case + 1) % len(WAYS)]):
        if "fused" in options and where(torch.zeros(2)) == [P]:
            with pytest.raises(sw.errors.InPlaceError, match="cannot write to a tensor with the layout"):
                trained(on(mesh_of(shape), where, net()))
        else:
            check_alike(trained(on(mesh_of(shape), where, net())), expected)


# What people do between steps, on the simulator and on a real rank, where steps run on the shards themselves


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield sw.init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    dist.destroy_process_group()


def iterate(model: nn.Module, optimizer: optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def resumed(model: nn.Module, make: Callable) -> optim.Optimizer:
    first = make(model.parameters())
    iterate(model, first, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(model.parameters())
    second.load_state_dict(torch.load(file, weights_only=True))
    iterate(model, second, 2)
    return second


def regrouped(model: Any, make: Callable) -> optim.Optimizer:
    optimizer = make(model[0].parameters())
    iterate(model, optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    iterate(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    iterate(model, optimizer)
    return optimizer


def meddled(model: Any, make: Callable) -> optim.Optimizer:
    """Parameters and state changed behind the optimizer's back."""
    optimizer = make(model.parameters())
    iterate(model, optimizer, 2)
    model[0].weight.data = model[0].weight.data * 2
    model[2].bias.data.mul_(3)
    iterate(model, optimizer)
    for kept in optimizer.state.values():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.dim():
                kept[name] = value * 0.5
    iterate(model, optimizer)
    optimizer.state.clear()
    iterate(model, optimizer)
    return optimizer


def interrupted(model: nn.Module, make: Callable) -> optim.Optimizer:
    optimizer = make(model.parameters())
    iterate(model, optimizer, 2)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    iterate(model, optimizer)
    return optimizer


MAKERS: dict[str, Callable] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: optim.RMSprop(p, 0.1),
    "AdamW": lambda p: optim.AdamW(p, 0.1, amsgrad=True),
    "AdamW, one by one": lambda p: optim.AdamW(p, 0.1, foreach=False),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1),
}


PROGRAMS = [
    (name, program)
    for name in MAKERS
    for program in (resumed, regrouped, meddled, interrupted)
    if program is not interrupted or not name.startswith("SGD")  # which refuses when it has written a part
]


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=lambda x: getattr(x, "__name__", x))
def test_between_steps(name: str, program: Callable, one_rank: Any) -> None:
    try:
        expected = program(net(), MAKERS[name])
    except KeyError as error:
        pytest.skip(f"this torch cannot: its {name} lacks the state {error}")
    for mesh in (mesh_of((2,)), one_rank):
        check_alike(program(on(mesh, lambda p: [S0], net()), MAKERS[name]), expected)


def test_plain_optimizers_keep_no_more_than_without_us() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], 0.1)
    p.sum().backward()
    optimizer.step()
    assert not optimizer.state and optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("make", [MAKERS["SGD"], MAKERS["RMSprop"], MAKERS["AdamW"]])
def test_plain_parameters_beside_dtensors(make: Callable, one_rank: Any) -> None:
    def trained(mesh: Any) -> optim.Optimizer:
        a, b = normal(4, 2), nn.Parameter(normal(3))
        a = nn.Parameter(a if mesh is None else sw.distribute_tensor(a, mesh, [S0]))
        optimizer = make([a, b])
        for _ in range(3):
            optimizer.zero_grad()
            a.square().sum().backward()
            b.square().sum().backward()
            optimizer.step()
        return optimizer

    found, expected = trained(one_rank), trained(None)
    for p, q in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(full(p), q)
    names = {k: sorted(v) for k, v in expected.state_dict()["state"].items()}
    assert {k: sorted(v) for k, v in found.state_dict()["state"].items()} == names


def test_a_copied_model_and_optimizer_go_on_as_one_devices() -> None:
    results = []
    for mesh in (None, mesh_of((2,))):
        model = net() if mesh is None else on(mesh, lambda p: [S0], net())
        optimizer = optim.Adam(model.parameters(), 0.1)
        iterate(model, optimizer, 2)
        model, optimizer = copy.deepcopy((model, optimizer))
        optimizer.step()  # a copied parameter has no gradient
        iterate(model, optimizer)
        results.append(optimizer)
    check_alike(results[1], results[0])


@pytest.mark.parametrize("sizes", [(0.0, 0.9), (0.9, 0.0, 0.5)], ids=["begun", "paused"])
def test_momentum_that_changes_between_steps(sizes: tuple[float, ...], one_rank: Any) -> None:
    def trained(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=sizes[0])
        for size in sizes:
            optimizer.param_groups[0]["momentum"] = size
            iterate(model, optimizer, 3)
        return optimizer

    expected = trained(net())
    for mesh in (mesh_of((2,)), one_rank):
        check_alike(trained(on(mesh, lambda p: [S0], net())), expected)


def test_parameters_come_and_go_between_steps(one_rank: Any) -> None:
    """What was found for a group holds for those of its parameters that have a gradient, and only as it was set."""

    def trained(model: Any) -> optim.Optimizer:
        optimizer = optim.AdamW(model.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step != 3)
            loss_of(model).backward()
            if step % 2:
                model[0].bias.grad = None
            if step == 4:
                optimizer.param_groups[0]["maximize"] = True
            optimizer.step()
        return optimizer

    expected = trained(net())
    for mesh in (mesh_of((2,)), one_rank):
        check_alike(trained(on(mesh, lambda p: [S0], net())), expected)
