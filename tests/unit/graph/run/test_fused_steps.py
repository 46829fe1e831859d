"""Fused optimizer kernels, as they are given to Inductor, do what torch's kernels do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardwise.graph.run.fused_steps import FUSED_STEPS

aten = torch.ops.aten
ADAM = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-6, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": False, "maximize": False}
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "adam": (aten._fused_adam_, 4, ADAM),
    "adamw": (aten._fused_adamw_, 4, ADAM),
    "amsgrad": (aten._fused_adamw_, 5, ADAM | {"amsgrad": True}),
    "adam maximizes": (aten._fused_adam_, 4, ADAM | {"maximize": True, "weight_decay": 0.0}),
    "sgd": (aten._fused_sgd_, 3, SGD | {"is_first_step": False}),
    "sgd begins": (aten._fused_sgd_, 3, SGD | {"is_first_step": True, "nesterov": True, "dampening": 0.0}),
    "sgd without momentum": (aten._fused_sgd_, 2, SGD | {"is_first_step": True, "momentum": 0.0, "maximize": True}),
    "adagrad": (aten._fused_adagrad_, 3, {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6, "maximize": False}),
}


def state(name: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Parameters, gradients and what the step keeps of them; then the numbers of steps, where it counts them."""
    packet, num_lists, _ = CASES[name]
    torch.manual_seed(0)
    lists = [[torch.rand(3, 5, dtype=dtype), torch.rand(4, dtype=dtype)] for _ in range(num_lists)]
    if packet is aten._fused_sgd_:
        return lists if num_lists == 3 else [*lists, []]
    if packet is not aten._fused_adagrad_ and num_lists == 4:
        lists.append([])  # no maxima
    return [*lists, [torch.tensor(3.0), torch.tensor(7.0)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, lr: Any, dtype: torch.dtype) -> None:
    packet, _, options = CASES[name]
    theirs = state(name, dtype)
    ours = copy.deepcopy(theirs)
    packet(*theirs, lr=float(lr), **options)
    FUSED_STEPS[packet](*ours, lr=lr, **options)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_scaled_gradients(name: str, overflow: float) -> None:
    packet, _, options = CASES[name]
    theirs = state(name, torch.float32)
    before, ours = copy.deepcopy(theirs), copy.deepcopy(theirs)
    scaled = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(overflow)}
    if not overflow:
        packet(*theirs, lr=0.1, **options, **scaled)
    FUSED_STEPS[packet](*ours, lr=0.1, **options, **scaled)
    if overflow:  # what is left of the gradients is nobody's
        ours[1] = before[1]
        torch.testing.assert_close(ours, before, atol=0, rtol=0)
    else:
        torch.testing.assert_close(ours, theirs)
