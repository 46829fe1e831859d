"""Training on a simulated mesh of CUDA shards, against the same on one CUDA device: optimizers, autocast, loss scaling,
attention and random numbers, which all have kernels of their own there. Skipped where there is no such device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise.debug import CommDebugMode

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
WIDTH, HEADS, CLASSES = 16, 4, 7


def grid() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"), device=DEVICE)


class Model(nn.Module):
    """A transformer block, with everything that a layer may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


PLACED = {
    **dict.fromkeys(("q.weight", "k.weight", "v.weight", "up.weight", "head.weight", "table.weight"), S(0)),
    **dict.fromkeys(("q.bias", "k.bias", "v.bias", "up.bias", "head.bias"), S(0)),
    **dict.fromkeys(("out.weight", "down.weight"), S(1)),
}
"""Along the second axis; whatever else there is, is replicated."""


def distributed(plain: nn.Module, mesh: Any) -> nn.Module:
    ours = copy.deepcopy(plain)
    for path, module in ours.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            where = PLACED.get(f"{path}.{name}", R)
            module.register_parameter(name, nn.Parameter(sw.distribute_tensor(parameter.data, mesh, [R, where])))
    return ours


def train(
    model: nn.Module,
    wrap: Callable[[Tensor], Tensor],
    *,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """Three steps on the same data; the losses."""
    tokens = wrap(torch.arange(4 * 5, device=DEVICE).view(4, 5) * 7 % 11)
    classes = wrap(torch.arange(4 * 5, device=DEVICE).view(4, 5) * 3 % CLASSES)
    optimizer = make(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with nullcontext() if autocast is None else torch.autocast(DEVICE, autocast):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), classes.flatten())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


def both(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module, list[float], list[float]]:
    """A model trained on one device, the same on a mesh, and their losses."""
    plain, mesh = Model().to(DEVICE, dtype), grid()
    ours = distributed(plain, mesh)
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=64.0) if options.pop("scaled", False) else None]
    scalers.append(copy.deepcopy(scalers[0]))
    expected = train(plain, lambda x: x, scaler=scalers[0], **options)
    found = train(ours, lambda x: sw.distribute_tensor(x, mesh, [S(0), R]), scaler=scalers[1], **options)
    return plain, ours, expected, found


def check_parameters(ours: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        difference = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(a.detach().full_tensor(), b.detach(), msg=difference, **tolerance)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
    "AdamW fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "AdamW capturable": lambda p, lr: torch.optim.AdamW(p, lr=lr, capturable=True, foreach=True),
    "AdamW loop": lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False),
    "SGD fused": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, fused=True),
    "RMSprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    plain, ours, expected, found = both(make=OPTIMIZERS[name])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert expected[-1] != expected[0]
    check_parameters(ours, plain, rtol=1e-8, atol=1e-8)


def test_single_precision() -> None:
    plain, ours, expected, found = both(torch.float32, make=torch.optim.SGD)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    check_parameters(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_autocast(dtype: torch.dtype, scaled: bool) -> None:
    plain, ours, expected, found = both(torch.float32, autocast=dtype, scaled=scaled, make=torch.optim.SGD)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in ours.parameters())
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        off = (a.grad.full_tensor() - b.grad).norm()
        assert off < 0.02 * max(b.grad.norm(), 0.02), f"{name}: off by {off} of {b.grad.norm()}"


def test_a_step_is_left_out_on_all_ranks_if_one_overflows() -> None:
    mesh = grid()
    parameter = nn.Parameter(sw.distribute_tensor(torch.ones(4, 6, device=DEVICE), mesh, [R, S(0)]))
    other = nn.Parameter(sw.distribute_tensor(torch.ones(3, device=DEVICE), mesh, [R, R]))
    optimizer = torch.optim.AdamW([parameter, other], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    for factor, kept in ((float("inf"), True), (1.0, False)):
        optimizer.zero_grad()
        values = torch.ones(4, 6, device=DEVICE)
        values[3, 5] = factor  # on the last rank's shard alone
        loss = (parameter * sw.distribute_tensor(values, mesh, [R, S(0)])).sum() + other.sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for each in (parameter, other):
            assert bool((each.detach().full_tensor() == 1).all()) is kept
        assert scaler.get_scale() == 2.0


# Autocast and cross entropy: torch makes it of ops that autocast knows one by one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["classes", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_under_autocast(reduction: str, probabilities: bool, dtype: torch.dtype) -> None:
    """Half precision is rounded on the way on one device, and not where the classes are sharded."""
    mesh = sw.simulate((2,), ("tp",), device=DEVICE)
    x = torch.randn(6, 5, device=DEVICE).to(dtype)
    target = torch.rand(6, 5, device=DEVICE).to(dtype) if probabilities else torch.arange(6, device=DEVICE) % 5
    rounding = 2 * torch.finfo(dtype).eps
    for smoothing, placement in ((0.0, R), (0.0, S(0)), (0.1, S(0)), (0.0, S(1)), (0.1, S(1))):
        dx, dt = sw.distribute_tensor(x, mesh, [placement]), sw.distribute_tensor(target, mesh)
        with torch.autocast(DEVICE, torch.bfloat16):
            expected = F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)
            found = F.cross_entropy(dx, dt, reduction=reduction, label_smoothing=smoothing)
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found.full_tensor(), expected, rtol=rounding, atol=rounding)


# Attention


BACKENDS = {
    SDPBackend.FLASH_ATTENTION: torch.bfloat16,
    SDPBackend.EFFICIENT_ATTENTION: torch.float32,
    SDPBackend.CUDNN_ATTENTION: torch.bfloat16,
    SDPBackend.MATH: torch.float64,
}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("placement", [S(0), S(1)], ids=["batch", "heads"])
def test_attention_kernels(backend: SDPBackend, placement: sw.Placement) -> None:
    """Batch and heads are independent of each other: nothing moves, neither forward nor backward."""
    dtype, mesh = BACKENDS[backend], sw.simulate((2,), ("tp",), device=DEVICE)
    plain = [torch.randn(4, 6, 64, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]
    ours = [sw.distribute_tensor(x.detach(), mesh, [placement]).requires_grad_() for x in plain]
    weight = torch.randn(4, 6, 64, 64, device=DEVICE, dtype=dtype)
    with sdpa_kernel(backend):
        try:
            expected = F.scaled_dot_product_attention(*plain, is_causal=True)
        except (RuntimeError, UserWarning) as error:
            pytest.skip(f"torch cannot run {backend} here: {error}")
        expected.backward(weight)
        placed = sw.distribute_tensor(weight, mesh, [placement])
        with CommDebugMode() as comms:
            found = F.scaled_dot_product_attention(*ours, is_causal=True)
            found.backward(placed)
    assert found.placements == (placement,) and comms.get_total_counts() == 0
    rounding = (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps
    pairs = [(found.detach(), expected.detach()), *((d.grad, x.grad) for d, x in zip(ours, plain, strict=True))]
    for a, b in pairs:
        torch.testing.assert_close(a.full_tensor(), b, rtol=rounding, atol=rounding * b.abs().max().item())


# Random numbers


DRAWS: dict[str, Callable[[Any], Tensor]] = {
    "randn": lambda given: (sw.randn if given else torch.randn)(6, 5, **(given or {"device": DEVICE})),
    "rand": lambda given: (sw.rand if given else torch.rand)(6, 5, **(given or {"device": DEVICE})),
}
INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": nn.init.normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "bernoulli_": lambda t: t.bernoulli_(0.3),
}
WHERE = [[R, R], [S(0), R], [S(1), S(0)], [S(0), S(0)]]


@pytest.mark.parametrize("name", [*DRAWS, *INITS])
def test_what_is_made_is_made_as_on_one_device(name: str) -> None:
    mesh = grid()

    def made(given: dict[str, Any]) -> Tensor:
        torch.manual_seed(7)
        if name in DRAWS:
            return DRAWS[name](given)
        zeros = sw.zeros(6, 5, **given) if given else torch.zeros(6, 5, device=DEVICE)
        return INITS[name](zeros)

    expected, after = made({}), torch.rand(3, device=DEVICE)
    for placements in WHERE:
        found = made({"device_mesh": mesh, "placements": placements})
        assert torch.equal(found.full_tensor(), expected), placements
        assert torch.equal(torch.rand(3, device=DEVICE), after), "the generator went on as on one device"


def test_dropout_in_a_step_is_the_same_again() -> None:
    mesh, seen = grid(), set()
    for placements in WHERE:
        x = sw.ones(64, 64, device_mesh=mesh, placements=placements, requires_grad=True)
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            x.grad = None
            out = F.dropout(x, 0.25)
            out.sum().backward()
            seen.add(torch.rand((), device=DEVICE).item())
            runs.append(out.detach().full_tensor())
            assert torch.equal(x.grad.full_tensor(), runs[-1]), "what was dropped has no gradient"
        assert torch.equal(*runs)
        assert 0.65 < (runs[0] > 0).float().mean().item() < 0.85
    assert len(seen) == 1
