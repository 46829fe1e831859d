"""What lists of tensors are for: optimizers, clipping and loss scaling, on parameters in layouts of their own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check_shards
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [(R, R), (S0, R), (S0, S1), (S0, S0), (R, S0), (R, S1)]
SHAPES = ((3, 4), (5, 2), (2, 3), (3,), (1,), (4, 2))


def weights() -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def pair() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters, plain and distributed."""
    plain = [nn.Parameter(x) for x in weights()]
    dist = [
        nn.Parameter(sw.distribute_tensor(x.detach(), MESH, where if x.ndim > 1 else (where[0], R)))
        for x, where in zip(plain, LAYOUTS, strict=True)
    ]
    return plain, dist


def loss(params: list[Any], step: int) -> Tensor:
    """Every element of every parameter counts, by other weights in each step."""
    return sum(((p - step / 7).square() * (p + 2).cos()).sum() for p in params)


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adam": (optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": torch.tensor(0.1), "maximize": True}),
    "Adamax": (optim.Adamax, {"lr": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.1}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FOREACH = [name for name in OPTIMIZERS if name != "AdamW"]  # a learning rate in a tensor needs another way on the CPU
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def train(make: Callable[[list[nn.Parameter]], optim.Optimizer], params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = make(params)
    for step in range(3):
        optimizer.zero_grad()
        loss(params, step).backward()
        optimizer.step()
    return optimizer


def check(plain: list[nn.Parameter], dist: list[nn.Parameter]) -> None:
    for x, y in zip(plain, dist, strict=True):
        check_shards(y)
        torch.testing.assert_close(y.detach().full_tensor(), x.detach())


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, {"foreach": False}) for name in OPTIMIZERS),
        *((name, {"foreach": True}) for name in FOREACH),
        *((name, {"fused": True}) for name in FUSED),
        ("Adafactor", {"foreach": False}),
        ("Adafactor", {"foreach": True}),
    ],
    ids=str,
)
def test_optimizers(name: str, way: dict[str, bool]) -> None:
    kind, options = OPTIMIZERS.get(name) or (optim.Adafactor, {"lr": 0.1})
    plain, dist = pair()
    where = [p.placements for p in dist]
    for params in (plain, dist):
        train(lambda params: kind(params, **copy.deepcopy(options), **way), params)
    check(plain, dist)
    assert [p.placements for p in dist] == where


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Adagrad"])
def test_no_step_communicates(name: str) -> None:
    """Parameters, gradients and state lie alike."""
    kind, options = OPTIMIZERS[name]
    dist = pair()[1]
    optimizer = train(lambda params: kind(params, **options, foreach=True), dist)
    with sw.strict(), CommDebugMode() as comm:
        optimizer.step()
    assert not comm.get_comm_counts()


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # it joins all gradients into one vector
def test_lbfgs() -> None:
    plain, dist = pair()
    for params in (plain, dist):
        optimizer = optim.LBFGS(params, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

        def closure(params: list[nn.Parameter] = params, optimizer: optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = loss(params, 1)
            value.backward()
            return value

        optimizer.step(closure)
    check(plain, dist)


def test_muon() -> None:
    plain, dist = pair()
    plain, dist = [p for p in plain if p.ndim == 2], [p for p in dist if p.ndim == 2]
    for params in (plain, dist):
        train(lambda params: optim.Muon(params, lr=0.1), params)
    for x, y in zip(plain, dist, strict=True):  # half precision inside
        torch.testing.assert_close(y.detach().full_tensor(), x.detach(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_differentiable_optimizer(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    grads = []
    for params in pair():
        start = [p.detach().clone().requires_grad_() for p in params]
        inner = [p * 1 for p in start]
        optimizer = kind(inner, **{**options, "amsgrad": False} if name == "Adam" else options, differentiable=True)
        for p in inner:
            p.grad = p * 2
        optimizer.step()
        sum(p.square().sum() for p in inner).backward()
        grads.append([p.grad for p in start])
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(y.full_tensor(), x)


# Clipping


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.5, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_norm(order: float, foreach: bool) -> None:
    plain, dist = pair()
    norms = []
    for params in (plain, dist):
        loss(params, 1).backward()
        total = get_total_norm([p.grad for p in params], order, foreach=foreach)
        norms.append((total, clip_grad_norm_(params, 0.5, order, foreach=foreach)))
        clip_grads_with_norm_(params, 0.25, total, foreach=foreach)
    for x, y in zip(*norms, strict=True):
        torch.testing.assert_close(y.full_tensor(), x)
    check([p.grad for p in plain], [p.grad for p in dist])


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_value(foreach: bool) -> None:
    plain, dist = pair()
    for params in (plain, dist):
        loss(params, 1).backward()
        clip_grad_value_(params, 0.3, foreach=foreach)
    check([p.grad for p in plain], [p.grad for p in dist])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite(value: float) -> None:
    _, dist = pair()
    loss(dist, 1).backward()
    dist[1].grad[4, 1] = value  # on some ranks only
    before = dist[0].grad.full_tensor().clone()
    with pytest.raises(RuntimeError, match="The total norm of order"):
        clip_grad_norm_(dist, 1.0, error_if_nonfinite=True)
    assert torch.equal(dist[0].grad.full_tensor(), before)


@pytest.mark.parametrize("where", list(itertools.product([R, S0, S1], repeat=2)), ids=str)
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norms_do_not_depend_on_the_layout(where: tuple, order: float) -> None:
    x = [w for w in weights() if w.ndim == 2]
    d = [sw.distribute_tensor(w, MESH, where) for w in x]
    for foreach in (True, False):
        norm = get_total_norm(d, order, foreach=foreach)
        torch.testing.assert_close(norm.full_tensor(), get_total_norm(x, order))


# Loss scaling


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_loss_scaling(options: dict[str, bool]) -> None:
    """A step is skipped on all ranks if one of them finds an infinity; the scale is then halved."""
    plain, dist = pair()
    scales = []
    for params in (plain, dist):
        optimizer = optim.AdamW(params, lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss(params, step)).backward()
            if step == 1:
                with torch.no_grad():
                    params[1].grad[4, 1] = float("inf")  # one row, on some ranks only
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:4] == scales[4:] and 32.0 in scales
    check(plain, dist)


def test_unscaling_finds_what_any_rank_has() -> None:
    for bad in (float("inf"), float("nan"), 1.0):
        x = torch.ones(4, 2)
        x[3, 1] = bad
        grads = [sw.distribute_tensor(torch.ones(5), MESH, [S0, R]), sw.distribute_tensor(x, MESH, [S0, S1])]
        found, scale = torch.zeros(()), torch.tensor(0.5)
        with CommDebugMode() as comm:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        assert found.item() == float(bad != 1.0) and comm.get_comm_counts() == {"all_reduce": 1}
        assert torch.equal(grads[0].full_tensor(), torch.full((5,), 0.5))
    with pytest.raises(sw.errors.InPlaceError):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [sw.distribute_tensor(x, MESH, [Partial(), R])], torch.zeros(()), scale
        )
