"""What torch offers around modules goes with styles and with `fully_shard`: parametrizations, averages of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import full
from meshes import GRID
from sweep import normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.errors import PlanError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module

R, S = sw.Replicate(), sw.Shard
pytestmark = pytest.mark.usefixtures("double_precision")

Change = Callable[[nn.Module], Any]


class Softened(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


CHANGES: dict[str, Change] = {
    "weight_norm": parametrizations.weight_norm,
    "of columns": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "of ones own": lambda layer: parametrize.register_parametrization(layer, "weight", Softened()),
    "two": lambda layer: parametrize.register_parametrization(
        parametrizations.weight_norm(layer), "weight", Softened(), unsafe=True
    ),
}


def plain(change: Change | None) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if change is not None:
        change(net[0]), change(net[2])
    return net


def by_styles(change: Change | None) -> nn.Module:
    net = plain(None)
    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    parallelize_module(net, GRID["tp"], {"0": columns, "2": rows})
    if change is not None:
        change(net[0]), change(net[2])
    return net


def styled(change: Change | None) -> nn.Module:
    return sw.distribute_module(by_styles(change), GRID)


def sharded(net: nn.Sequential) -> nn.Module:
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=GRID["dp"])
    return net


WAYS: dict[str, tuple[Callable[[Change | None], nn.Module], Any]] = {
    "styles": (styled, GRID),
    "fully sharded": (lambda change: sharded(plain(change)), GRID["dp"]),
    "both": (lambda change: sharded(by_styles(change)), GRID),
}


def train(net: nn.Module, lay: Callable[[Tensor], Tensor], after: Callable[[], Any] = lambda: None) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append((net(lay(normal(4, 6) + step)) - 1).square().mean())
        losses[-1].backward()
        optimizer.step()
        after()
    return losses


def lay_on(mesh: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: sw.distribute_tensor(x, mesh, [S(0), *[R] * (mesh.ndim - 1)])


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(full(mine.detach()), one.detach())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_parametrized_weights(way: str, change: str) -> None:
    make, mesh = WAYS[way]
    net, one = make(CHANGES[change]), plain(CHANGES[change])
    check(train(net, lay_on(mesh)), train(one, lambda x: x))
    check([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])
    check(list(net.parameters()), list(one.parameters()))


def test_parametrized_weights_stay_sharded() -> None:
    net = styled(parametrizations.weight_norm)
    placements = {name: p.placements[1] for name, p in net.named_parameters() if "original1" in name}  # the directions
    assert list(placements.values()) == [S(0), S(1)]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_styles_refuse_what_is_parametrized_already() -> None:
    """They would leave the weight whole on every rank, without a word."""
    by_names = {"0": ColwiseParallel()}
    for plan, style, change in (
        (by_names, "ColwiseParallel", parametrizations.weight_norm),
        (by_names, "ColwiseParallel", nn.utils.weight_norm),
        ({"0": "colwise"}, "'colwise'", parametrizations.weight_norm),
    ):
        net = plain(change)
        with pytest.raises(PlanError) as error:
            parallelize_module(net, GRID["tp"], plan)
        where = "module '0'" if isinstance(plan["0"], ColwiseParallel) else "0"
        assert str(error.value) == (
            f"{where}: its weight is parametrized, so {style} would leave it unsharded; parallelize the module first, "
            f"and parametrize it then"
        )
    parallelize_module(net, GRID["tp"], {"0": SequenceParallel(sequence_dim=0)})  # which shards none


def test_fully_sharded_modules_are_not_parametrized_afterwards() -> None:
    net = sharded(plain(None))
    parametrizations.weight_norm(net[0])
    with pytest.raises(PlanError) as error:
        net(lay_on(GRID["dp"])(normal(4, 6)))
    assert str(error.value) == (
        "fully_shard knows a parameter 'Linear.weight' that its module no longer has; parametrize modules, or take "
        "parameters out of them, before fully_shard"
    )


AVERAGES: dict[str, dict[str, Any]] = {
    "exponential": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "equal": {},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(kind: str) -> None:
    found = []
    for net, lay in ((plain(None), lambda x: x), (styled(None), lay_on(GRID))):
        average = swa_utils.AveragedModel(net, **AVERAGES[kind])
        losses = train(net, lay, lambda a=average, n=net: a.update_parameters(n))
        found.append([*losses, average(lay(normal(4, 6))), *average.parameters()])
    check(found[1], found[0])


@pytest.mark.parametrize("way", ["fully sharded", "both"])
def test_averages_of_fully_sharded_weights(way: str) -> None:
    """No rank has more than its shards of them."""
    make, mesh = WAYS[way]
    update = swa_utils.get_ema_multi_avg_fn(0.9)
    net, average = make(None), make(None)
    average.load_state_dict(net.state_dict())
    one = plain(None)
    expected = swa_utils.AveragedModel(one, multi_avg_fn=update)
    expected.update_parameters(one)  # the first one copies
    train(one, lambda x: x, lambda: expected.update_parameters(one))
    train(net, lay_on(mesh), lambda: update(list(average.parameters()), list(net.parameters()), None))
    check(list(average.parameters()), list(expected.parameters()))
    assert all(a.placements == b.placements for a, b in zip(average.parameters(), net.parameters(), strict=True))
    check([average(lay_on(mesh)(normal(4, 6)))], [expected(normal(4, 6))])
    with pytest.raises(
        NotImplementedError, match=r"average kept: torch\.optim\.swa_utils\.get_ema_multi_avg_fn\(\) takes"
    ):
        swa_utils.AveragedModel(net)


def test_statistics_of_an_average_are_taken_anew() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    batches, found = [normal(4, 6) * scale for scale in (1, 2)], []
    for net, lay in ((make(), lambda x: x), (sw.distribute_module(make(), GRID), lay_on(GRID))):
        average = swa_utils.AveragedModel(net)
        train(net, lay, lambda a=average, n=net: a.update_parameters(n))
        swa_utils.update_bn([lay(x) for x in batches], average)
        found.append([*average.buffers(), average.eval()(lay(batches[0]))])
    check(found[1], found[0])


# Modules that a plan does not name keep plain parameters, which lists have beside DTensors

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
}


def partly(net: nn.Module) -> nn.Module:
    return parallelize_module(net, GRID["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def loop(net: nn.Module, optimizer: str) -> tuple[list[Tensor], int]:
    """With clipping by value and norm, a scaler and an average; all that comes of it, and the reductions of a norm."""
    params, scaler = list(net.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    stepping = OPTIMIZERS[optimizer](params)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        stepping.zero_grad()
        scaler.scale(net(normal(5, 6)).pow(3).mean()).backward()
        scaler.unscale_(stepping)
        nn.utils.clip_grad_value_(params, 0.1)
        with CommDebugMode() as comms:
            norm = nn.utils.clip_grad_norm_(params, 0.05)
        scaler.step(stepping), scaler.update()
        average.update_parameters(net)
    return [norm, *map(full, params), *map(full, average.parameters())], comms.get_total_counts()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_models_of_which_a_plan_names_a_part(optimizer: str) -> None:
    def model() -> nn.Module:
        return plain(None).append(nn.LayerNorm(4))

    (expected, _), (found, count) = loop(model(), optimizer), loop(partly(model()), optimizer)
    assert count == 1
    torch.testing.assert_close(found, expected)
