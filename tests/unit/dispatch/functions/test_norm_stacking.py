"""Norms of many tensors, each pending along axes of its own: one reduction for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S = sw.Replicate(), sw.Shard
MESH = (2, 2)
SPLIT = [(S(0), R), (R, S(1)), (S(0), S(1)), (S(0), S(0))]
MIXED = [*SPLIT, (R, R)]


def gradients(placements: list[Any], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[sw.DTensor]]:
    plain = [(normal(5, 3) + at).to(dtype) for at in range(len(placements))]
    return plain, [place(t, *where, mesh=MESH) for t, where in zip(plain, placements, strict=True)]


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.5])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("placements", [SPLIT, MIXED], ids=["split", "mixed"])
def test_the_norm_of_all_takes_one_reduction(placements: list[Any], foreach: bool | None, order: float) -> None:
    plain, dist = gradients(placements)
    expected = torch.nn.utils.get_total_norm(plain, order, foreach=foreach)
    with CommDebugMode() as mode:
        found = torch.nn.utils.get_total_norm(dist, order, foreach=foreach).full_tensor()
    torch.testing.assert_close(found, expected)
    assert dict(mode.get_comm_counts()) == {"all_reduce": 1}


@pytest.mark.parametrize("order", [float("inf"), 0.0])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_norms_that_are_no_sums_of_powers(foreach: bool | None, order: float) -> None:
    plain, dist = gradients(MIXED)
    expected = torch.nn.utils.get_total_norm(plain, order, foreach=foreach)
    torch.testing.assert_close(torch.nn.utils.get_total_norm(dist, order, foreach=foreach).full_tensor(), expected)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_does_not_overflow(dtype: torch.dtype, tolerance: float) -> None:
    plain, dist = gradients(MIXED, dtype)
    for t in (*plain, *dist):
        t.mul_(100)
    expected = torch.nn.utils.get_total_norm(plain, foreach=False)
    found = torch.nn.utils.get_total_norm(dist, foreach=False).full_tensor()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_gradients_on_several_meshes_are_clipped_together(foreach: bool | None) -> None:
    meshes = [(mesh_of((4,)), (S(0),)), (mesh_of(MESH), (S(1), S(0))), (mesh_of((4,)), (S(1),))]
    plain = [torch.zeros(5, 3, dtype=torch.float64, requires_grad=True) for _ in meshes]
    dist = [sw.distribute_tensor(t, *place).detach().requires_grad_() for t, place in zip(plain, meshes, strict=True)]
    for at, (t, d) in enumerate(zip(plain, dist, strict=True)):
        t.grad = normal(5, 3) + at
        d.grad = sw.distribute_tensor(t.grad, *meshes[at])
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, foreach=foreach)
    found = torch.nn.utils.clip_grad_norm_(dist, 0.5, foreach=foreach)
    torch.testing.assert_close(found, expected)
    for t, d in zip(plain, dist, strict=True):
        torch.testing.assert_close(d.grad.full_tensor(), t.grad)


def test_a_number_beside_norms_keeps_its_sign() -> None:
    loss, norm, other = place(torch.tensor(-3.0), R, R, mesh=MESH), *(g.norm() for g in gradients(SPLIT)[1][:2])
    expected = [-3.0, *(g.norm().item() for g in gradients(SPLIT)[0][:2])]
    torch.testing.assert_close(torch.stack([loss.double(), norm, other]).full_tensor(), torch.tensor(expected).double())


def test_gradients_of_a_stack_of_norms() -> None:
    plain, dist = gradients(SPLIT)
    for tensors in (plain, dist):
        for t in tensors:
            t.requires_grad_()
        torch.stack([t.norm() for t in tensors]).norm().backward()
    for t, d in zip(plain, dist, strict=True):
        torch.testing.assert_close(d.grad.full_tensor(), t.grad)
