"""Clipping by norm is done on the shards where it may be; that it is right is shown on ranks (`multiprocess/`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from saved import fake_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad, clip_grad_norm_

import shardwise as sw
from shardwise.dispatch import cache_info

SHARD, WHOLE = [sw.Shard(0)], [sw.Replicate()]
NUM_RANKS = 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(NUM_RANKS, names=("dp",), rank=1) as mesh:
        yield mesh


def parameters(mesh: DeviceMesh, *placements: list[Any]) -> list[Any]:
    made = [nn.Parameter(sw.distribute_tensor(torch.ones(8, 4), mesh, where)) for where in placements]
    for p in made:
        p.grad = torch.ones_like(p.detach())
    return made


def test_shards_are_clipped_at_once(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has two of eight rows; the fake group adds nothing to them. What is replicated is whole on each."""
    asked: list[Any] = []
    monkeypatch.setattr(sw.DTensor, "to", lambda *args: asked.append(args))
    params = parameters(mesh, SHARD, WHOLE)
    total = clip_grad_norm_(params, 1.0)
    assert not asked, "the device of each norm"
    assert total.item() == pytest.approx(40**0.5) and total.placements == (sw.Replicate(),)
    for p in params:
        torch.testing.assert_close(p.grad.to_local(), torch.full_like(p.grad.to_local(), 40**-0.5))


@pytest.mark.parametrize("way", ["foreach=False", "with a plain one", "watched", "non-finite", "infinite"])
def test_all_else_goes_torchs_way(way: str, mesh: DeviceMesh) -> None:
    params, options = parameters(mesh, SHARD, SHARD), {}
    if way == "with a plain one":
        params.append(nn.Parameter(torch.ones(3)))
        params[-1].grad = torch.zeros(3)
    if way == "foreach=False":
        options["foreach"] = False
    if way == "non-finite":
        options["error_if_nonfinite"] = True
    if way == "infinite":
        assert clip_grad_norm_(params, 1.0, float("inf")).item() == 1
        return
    before = cache_info()
    with sw.debug.CommDebugMode() as comms:
        total = clip_grad_norm_(params, 1.0, **options)
    assert total.item() == pytest.approx(4.0) and comms.get_total_counts() == 1
    assert cache_info().hits + cache_info().misses > before.hits + before.misses
    torch.testing.assert_close(params[0].grad.to_local(), torch.full((2, 4), 0.25))


def test_plain_programs_are_torchs() -> None:
    plain = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in plain:
        p.grad = torch.full((3,), 2.0)
    assert clip_grad._get_total_norm(p.grad for p in plain).item() == pytest.approx(24**0.5)
    assert clip_grad_norm_(iter(plain), 1.0).item() == pytest.approx(24**0.5)
    assert clip_grad_norm_(plain[0], 1.0).item() == pytest.approx(0.5**0.5, rel=1e-4)
    assert clip_grad_norm_([], 1.0).item() == 0
