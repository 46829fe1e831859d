"""In the simulator every rank has storage of its own: a write reaches each rank's shard once."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

MESH = sw.simulate((2, 2), ("dp", "tp"))
PLACEMENTS = list(itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2))


def gathered(plain: Tensor, placements: tuple) -> DTensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
        return torch.linalg.matrix_exp(sw.distribute_tensor(plain, MESH, placements))


MAKERS: dict[str, Callable[[Tensor, tuple], DTensor]] = {
    "distribute_tensor": lambda plain, placements: sw.distribute_tensor(plain, MESH, placements),
    "without a source": lambda plain, p: sw.distribute_tensor(plain, MESH, p, src_data_rank=None),
    "from_local": lambda plain, placements: DTensor.from_local(plain, MESH, placements),
    "randn": lambda plain, placements: sw.randn(4, 4, device_mesh=MESH, placements=placements),
    "redistribute": lambda plain, p: sw.distribute_tensor(plain, MESH).redistribute(placements=p),
    "fallback": gathered,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_ranks_share_no_storage(make: Callable, placements: tuple) -> None:
    made = make(torch.randn(4, 4), placements)
    addresses = made.to_local().data_ptr().values
    assert len(set(addresses)) == len(addresses) == 4


@pytest.mark.parametrize("make", [MAKERS["distribute_tensor"], MAKERS["from_local"]], ids=["distribute", "from_local"])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_write_happens_once(make: Callable, placements: tuple) -> None:
    x = make(torch.randn(4, 4, dtype=torch.float64), placements)
    expected = x.full_tensor()
    x.mul_(2)
    expected = expected * 2
    torch.testing.assert_close(x.full_tensor(), expected)
    x.mul_(x)
    torch.testing.assert_close(x.full_tensor(), expected * expected)


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_gradients_of_a_plain_loss_share_no_storage(placements: tuple) -> None:
    x = sw.distribute_tensor(torch.randn(4, 4), MESH, placements).requires_grad_()
    (x.full_tensor() ** 2).sum().backward()
    before = x.grad.full_tensor()
    x.grad.mul_(0.5)
    torch.testing.assert_close(x.grad.full_tensor(), before * 0.5)
