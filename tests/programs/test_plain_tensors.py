"""Plain tensors beside DTensors, as models make them for themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import beside, full
from meshes import PAIR
from sweep import normal, place
from torch import Tensor

import shardwise as sw
from shardwise.experimental import implicit_replication

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def test_loss_parallel_takes_a_plain_target() -> None:
    logits, target = torch.randn(4, 16), torch.randint(16, (4,))
    with sw.parallel.loss_parallel():
        loss = F.cross_entropy(place(logits, S(1)), target)
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, target))


PLACEMENTS = pytest.mark.parametrize("placement", [R, S(0), S(1), S(2)], ids=str)


@PLACEMENTS
def test_a_plain_tensor_is_converted_to_the_dtype_of_a_dtensor(placement: sw.Placement) -> None:
    d = sw.distribute_tensor(normal(3, 6, 8), PAIR, [placement])
    for made in (torch.arange(4).type_as(d), torch.arange(4).to(d)):
        assert type(made) is Tensor
        assert torch.equal(made, torch.arange(4, dtype=torch.float64))


@PLACEMENTS
def test_parts_of_a_plain_tensor_are_set_where_it_is_replicated_implicitly(placement: sw.Placement) -> None:
    """A mask, or a cache, that a model makes plain and fills with what it computes."""
    x = normal(3, 6, 8)
    d = sw.distribute_tensor(x, PAIR, [placement])
    kept: list[Tensor] = []
    for t in (x.clone().requires_grad_(), d.requires_grad_()):
        cache = torch.zeros(3, 6, 8, dtype=torch.float64)
        with implicit_replication():
            cache[:, 1:3] = t[:, 2:4] * t[:, :2]
            cache[torch.arange(3), (t[:, :, 0] > 0).sum(1) - 1] = 1.0
            (cache * t).sum().backward()
        kept += [cache, t.grad]
    torch.testing.assert_close(kept[2], kept[0])
    torch.testing.assert_close(full(kept[3]), kept[1])


def test_parts_of_a_plain_tensor_are_not_set_elsewhere() -> None:
    d = sw.distribute_tensor(torch.tensor([0, 2]), PAIR)
    plain = torch.zeros(3)
    with pytest.raises(sw.errors.MixedTensorError, match="nor named by one"):
        plain[d] = 1.0
    assert not plain.any()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("placement", [S(0), S(1), S(2)], ids=str)
def test_what_is_written_to_a_plain_tensor_has_a_gradient(placement: sw.Placement, times: int) -> None:
    """The sum over experts that many models make as `torch.zeros` and `index_add_` to."""
    x = normal(3, 6, 8)
    grads: list[Tensor] = []
    for t in (x.clone().requires_grad_(), sw.distribute_tensor(x, PAIR, [placement]).requires_grad_()):
        total = torch.zeros(3, 6, 8, dtype=torch.float64)
        with implicit_replication():
            for _ in range(times):
                total.index_add_(0, beside(t, torch.tensor([2, 0])), t[:2] * t[1:])
            (total * t).sum().backward()
        grads.append(full(t.grad))
    torch.testing.assert_close(*grads)
