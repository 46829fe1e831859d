"""A plain tensor among DTensors: the error names the call, the argument, and the two ways to fix it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise.errors import MixedTensorError

MESH = sw.simulate((2,), ("tp",))
PLAIN, ROWS = torch.ones(8, 4), torch.tensor([0, 1])
REST = (
    " is a plain torch.Tensor, and its layout on the mesh is unknown. Make it a DTensor with "
    "shardwise.distribute_tensor(tensor, mesh, placements), or, if every rank holds the same values, run the call "
    "inside shardwise.experimental.implicit_replication()"
)
D = "DTensor f32[8,4] S(0)@tp"

SAID: dict[str, Callable[[Tensor], Any]] = {
    f"torch.add(input: {D}, other: plain f32[8,4]): argument 'other'": lambda d: torch.add(d, PLAIN),
    f"torch.add(input: {D}, other: plain f32[8,4], alpha: 2): argument 'other'": lambda d: torch.add(
        d, other=PLAIN, alpha=2
    ),
    f"torch.Tensor.add(self: plain f32[8,4], other: {D}): argument 'self'": lambda d: PLAIN + d,
    f"torch.Tensor.__eq__(self: {D}, other: plain f32[8,4]): argument 'other'": lambda d: d == PLAIN,
    f"torch.Tensor.copy_(self: {D}, src: plain f32[8,4]): argument 'src'": lambda d: d.copy_(PLAIN),
    f"torch.Tensor.__getitem__(self: {D}, index: plain i64[2]): argument 'index'": lambda d: d[ROWS],
    f"torch.Tensor.__getitem__(self: {D}, index: [1, plain i64[2]]): argument 'index[1]'": lambda d: d[1, ROWS],
    f"torch.Tensor.__setitem__(self: {D}, index: 0, value: plain f32[4]): argument 'value'": lambda d: d.__setitem__(
        0, PLAIN[0]
    ),
    f"torch.cat(tensors: [{D}, plain f32[8,4]]): argument 'tensors[1]'": lambda d: torch.cat([d, PLAIN]),
    f"_foreach_add(self: [{D}, {D}], other: [{D}, plain f32[8,4]]): argument 'other[1]'": lambda d: torch._foreach_add(
        [d, d], [d, PLAIN]
    ),
    f"torch.nn.functional.linear(input: {D}, weight: plain f32[8,4]): argument 'weight'": lambda d: F.linear(d, PLAIN),
    f"torch.nn.functional.layer_norm(input: {D}, normalized_shape: [4], weight: plain f32[4]): argument 'weight'": (
        lambda d: F.layer_norm(d, (4,), PLAIN[0])
    ),
    f"torch.nn.functional.embedding(input: plain i64[2], weight: {D}): argument 'input'": lambda d: F.embedding(
        ROWS, d
    ),
    f"torch.where(condition: DTensor bool[8,4] S(0)@tp, input: {D}, other: plain f32[8,4]): argument 'other'": (
        lambda d: torch.where(d > 0, d, PLAIN)
    ),
    f"aten.mul.Tensor(self: {D}, other: plain f32[8,4]): argument 'other'": lambda d: torch.ops.aten.mul.Tensor(
        d, PLAIN
    ),
    f"torch.functional.einsum(1: 'ij,kj->ik', 2: {D}, 3: plain f32[8,4]): argument '3'": lambda d: torch.einsum(
        "ij,kj->ik", d, PLAIN
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_names_the_call_and_the_argument(said: str) -> None:
    with pytest.raises(MixedTensorError) as error:
        SAID[said](sw.distribute_tensor(PLAIN, MESH, [sw.Shard(0)]))
    assert str(error.value) == said + REST


def test_both_ways_to_fix_it_work() -> None:
    d = sw.distribute_tensor(PLAIN, MESH, [sw.Shard(0)])
    assert torch.equal((d + sw.distribute_tensor(PLAIN, MESH, [sw.Shard(0)])).full_tensor(), PLAIN + PLAIN)
    with sw.experimental.implicit_replication():
        assert torch.equal((d + PLAIN).full_tensor(), PLAIN + PLAIN)
