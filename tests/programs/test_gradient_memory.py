"""No two gradients are one memory: whoever clips or scales one leaves the others alone."""

from __future__ import annotations

import pytest
import torch
from compare import full
from meshes import PAIR
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
EDGES = {"small": 4, "large": 300}
"""Where a value is made to count once, large tensors share memory that small ones do not: `redistribute/masks.py`."""


def leaf(edge: int, placement: sw.Placement) -> Tensor:
    whole = sw.distribute_tensor(torch.randn(edge, edge), PAIR, [R])
    return whole.redistribute(placements=[placement]).detach().requires_grad_()


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("target", [R, S(0), S(1), P()], ids=str)
@pytest.mark.parametrize("source", [R, S(0), P(), P("max")], ids=str)
def test_leaves_that_were_moved_and_added(source: sw.Placement, target: sw.Placement, edge: int) -> None:
    torch.manual_seed(0)
    one, two = leaf(edge, source), leaf(edge, source)
    (one.redistribute(placements=[target]) + two.redistribute(placements=[target])).square().sum().backward()
    assert one.grad is not None and two.grad is not None
    before = full(two.grad).clone()
    one.grad.mul_(3)
    assert torch.equal(full(two.grad), before)
