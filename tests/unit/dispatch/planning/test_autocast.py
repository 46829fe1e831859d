"""Autocast gives the dtypes that it gives on one device, and the values, wherever the arguments lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sweep import place
from torch import Tensor

import shardwise as sw

R, S = sw.Replicate(), sw.Shard
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: F.cross_entropy(x @ x.mT, x.detach().argmax(1), label_smoothing=0.1),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x @ x.mT, -1), x.detach().argmax(1)),
    "mse_loss": lambda x: F.mse_loss(x @ x.mT, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x @ x.mT, x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(x @ x.mT, x.detach().sigmoid()),
    "kl_div": lambda x: F.kl_div(F.log_softmax(x @ x.mT, 1), x.detach().softmax(1), reduction="batchmean"),
    "trace": lambda x: (x @ x.mT).trace(),
    "cdist": lambda x: torch.cdist(x @ x.mT, x.detach() + 1),
    "quantile": lambda x: torch.quantile(x @ x.mT, 0.4, dim=1),
    "fft": lambda x: torch.fft.rfft(x @ x.mT).abs(),
    "conv1d": lambda x: F.conv1d(x[None], x.detach()[:, :, None]),
    "linear": lambda x: F.linear(x, x.detach()),
    "softmax": lambda x: (x @ x.mT).softmax(0),
    "layer_norm": lambda x: F.layer_norm(x @ x.mT, (6,)),
    "cat": lambda x: torch.cat([x @ x.mT, x]),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_and_values_are_those_of_one_device(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(6, 6) + torch.eye(6)
    for placement in (R, S(0), S(1)):
        plain, dist = values.clone().requires_grad_(), place(values, placement).requires_grad_()
        results = []
        for x in (plain, dist):
            with torch.autocast("cpu", dtype):
                out = FUNCTIONS[name](x)
            out.float().tanh().sum().backward()
            results.append(out)
        expected, found = results
        assert found.dtype == expected.dtype, placement
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), atol=0.06, rtol=0.06)
        torch.testing.assert_close(dist.grad.full_tensor(), plain.grad, atol=0.2, rtol=0.1)


def test_a_loss_is_as_precise_as_on_one_device() -> None:
    """Half precision has three digits; the loss of half precision has more."""
    logits, targets = torch.randn(64, 8).bfloat16(), torch.randint(0, 8, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(logits, targets)
        for placement in (S(0), S(1)):
            found = F.cross_entropy(place(logits, placement), place(targets, R)).full_tensor()
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_double_precision_and_other_modes_are_left_alone() -> None:
    x, targets = place(torch.randn(4, 8).double(), S(0)), place(torch.randint(0, 8, (4,)), R)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(x, targets).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert F.cross_entropy(x.bfloat16(), targets).dtype == torch.bfloat16
    assert F.cross_entropy(x.bfloat16(), targets).dtype == torch.bfloat16


@pytest.mark.parametrize("target", [sw.Replicate(), sw.Shard(1)])
def test_moving_one_half_precision_where_autocast_is_for_the_other(target: sw.Placement) -> None:
    x = torch.randn(4, 6).half()
    d = sw.distribute_tensor(x, sw.simulate((2,), ("tp",)), [sw.Shard(0)])
    with torch.autocast("cpu", torch.bfloat16):
        moved = d.redistribute(placements=[target])
    assert moved.dtype == torch.float16 and torch.equal(moved.full_tensor(), x)
