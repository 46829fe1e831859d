"""Plain tensors of which each rank has a part of the sequence: attention, and its gradients, are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from bodies import doubles
from launch import Case
from shardwise.debug import CommDebugMode
from shardwise.experimental import context_parallel, context_parallel_unshard

BATCH, HEADS, TIME, WIDTH = 2, 4, 12, 8


def attention(x: Tensor, positions: Tensor, weights: Tensor, heads: int, causal: bool) -> Tensor:
    x = x + positions
    q, k, v = (x @ w for w in weights)
    q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (q, k[..., :heads], v[..., :heads]))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads < WIDTH)
    return mixed.transpose(1, 2).flatten(2)


def on_parts(rank: int, size: int, heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    x, positions = doubles(BATCH, TIME, WIDTH).requires_grad_(), doubles(TIME, WIDTH)
    weights = doubles(3, WIDTH, WIDTH).requires_grad_()
    whole = attention(x, positions, weights, heads, causal)
    gradients = torch.autograd.grad(whole.square().sum(), (x, weights))

    given, kept = x.detach().clone(), positions.clone()
    ours = weights.detach().clone().requires_grad_()
    with context_parallel(mesh, buffers=[given, positions], buffer_seq_dims=[1, 0], no_restore_buffers={given}):
        assert given.shape == (BATCH, TIME // size, WIDTH) and positions.shape == (TIME // size, WIDTH)
        given.requires_grad_()
        with CommDebugMode() as comms:
            part = attention(given, positions, ours, heads, causal)
            part.square().sum().backward()
        assert comms.get_comm_counts() == {"all_gather": 2, "reduce_scatter": 2}
        with pytest.raises(ValueError, match="no rank knows which part of the whole attn_mask is meant"):
            F.scaled_dot_product_attention(*[given.detach().unsqueeze(1)] * 3, torch.ones(TIME, TIME).bool())
    assert torch.equal(positions, kept) and given.shape == (BATCH, TIME // size, WIDTH)
    found = context_parallel_unshard(mesh, [part.detach(), given.grad], [1, 1])  # type: ignore[list-item]
    torch.distributed.all_reduce(ours.grad)
    torch.testing.assert_close([*found, ours.grad], [whole.detach(), *gradients])
    assert F.scaled_dot_product_attention(*[x.detach()] * 3).shape == x.shape, "and nothing is left behind"


CASES = [
    Case(f"context-parallel-{size}-{heads}-{causal}", size, on_parts, (heads, causal))
    for size in (2, 4)
    for heads, causal in ((WIDTH, True), (WIDTH, False), (WIDTH // 2, True))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
