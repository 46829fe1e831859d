"""`parallel.clip_grad_norm_` works on the shards where it may; that it is right is shown on ranks (`multiprocess/`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from saved import fake_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import utils

import shardwise as sw
from shardwise.dispatch import cache_info
from shardwise.parallel import clip_grad_norm_

SHARD, WHOLE = [sw.Shard(0)], [sw.Replicate()]
NUM_RANKS = 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(NUM_RANKS, names=("dp",), rank=1) as mesh:
        yield mesh


def parameters(mesh: DeviceMesh, *placements: list[Any]) -> list[Any]:
    made = [nn.Parameter(sw.distribute_tensor(torch.arange(32.0).view(8, 4), mesh, where)) for where in placements]
    for p in made:
        p.square().sum().backward()
    return made


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("placements", [[SHARD, SHARD], [SHARD, WHOLE], [WHOLE, WHOLE]], ids=str)
def test_it_gives_what_torchs_gives_to_the_last_bit(mesh: DeviceMesh, placements: Any, order: float) -> None:
    mine, theirs = parameters(mesh, *placements), parameters(mesh, *placements)
    total, wanted = clip_grad_norm_(mine, 1.0, order), utils.clip_grad_norm_(theirs, 1.0, order)
    assert torch.equal(total.full_tensor(), wanted.full_tensor())  # type: ignore[attr-defined]
    for found, right in zip(mine, theirs, strict=True):
        assert torch.equal(found.grad.to_local(), right.grad.to_local())


def calls(params: Any, **options: Any) -> int:
    """How many calls dispatch has seen."""
    before = cache_info()
    assert clip_grad_norm_(params, 1.0, **options).item() > 1
    after = cache_info()
    return after.hits + after.misses - before.hits - before.misses


def test_gradients_of_shards_are_not_looked_at_one_by_one(mesh: DeviceMesh) -> None:
    assert calls(parameters(mesh, *[SHARD] * 20)) == calls(parameters(mesh, *[SHARD] * 2)) < 10


@pytest.mark.parametrize("way", ["foreach=False", "a plain one", "non-finite", "watched"])
def test_all_else_goes_torchs_way(way: str, mesh: DeviceMesh) -> None:
    params, options = parameters(mesh, SHARD, SHARD), {}
    if way == "a plain one":
        params.append(nn.Parameter(torch.ones(3)))
        params[-1].grad = torch.zeros(3)
    if way in ("foreach=False", "non-finite"):
        options["foreach" if way == "foreach=False" else "error_if_nonfinite"] = way != "foreach=False"
    with sw.debug.CommDebugMode() as comms:
        total = clip_grad_norm_(params, 1.0, **options)
    assert comms.get_total_counts() == 1
    torch.testing.assert_close(total, clip_grad_norm_(parameters(mesh, SHARD, SHARD), 1.0))


def test_gradients_of_two_dtypes(mesh: DeviceMesh) -> None:
    """torch makes two lists of them."""

    def mixed() -> list[Any]:
        params = parameters(mesh, SHARD, SHARD, SHARD)
        params[1] = nn.Parameter(params[1].detach().double() / 3)
        params[1].square().sum().backward()
        return params

    mine, theirs = mixed(), mixed()
    found, wanted = clip_grad_norm_(mine, 1.0, 3.0), utils.clip_grad_norm_(theirs, 1.0, 3.0)
    assert torch.equal(found.full_tensor(), wanted.full_tensor())  # type: ignore[attr-defined]
    assert all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in zip(mine, theirs, strict=True))


def test_a_norm_that_is_not_finite_is_refused_on_request(mesh: DeviceMesh) -> None:
    params = parameters(mesh, SHARD, SHARD)
    params[1].grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(params, 1.0).isinf().item()


def test_a_view_of_a_gradient_that_is_a_copy_shows_the_clipped_one(mesh: DeviceMesh) -> None:
    (p,) = parameters(mesh, SHARD)
    row = p.grad[3]  # this rank's, which the others have a copy of
    clip_grad_norm_([p], 1.0)
    assert row.norm().item() < 1 and torch.equal(row.to_local(), p.grad.to_local()[1])


def test_plain_programs_are_torchs() -> None:
    plain = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in plain:
        p.grad = torch.full((3,), 2.0)
    assert clip_grad_norm_(iter(plain), 1.0).item() == pytest.approx(24**0.5)
    assert clip_grad_norm_(plain[0], 1.0).item() == pytest.approx(0.5**0.5, rel=1e-4)
    assert clip_grad_norm_([], 1.0).item() == 0
