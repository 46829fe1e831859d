"""Results in the dtype that torch gives them, on every rank: kernels for meta tensors name another for some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import as_tensors
from sweep import mesh_of
from torch import Tensor

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.dispatch import clear_cache

R, S = sw.Replicate(), sw.Shard


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(function: Callable[..., Any], inputs: Sequence[Tensor | None], placements: Sequence[sw.Placement]) -> None:
    """Compare values and dtypes, those of every shard, on two ranks and on four, of which some may hold nothing."""
    expected = as_tensors(function(*(None if x is None else x.clone() for x in inputs)))
    for ranks in (2, 4):
        clear_cache()
        laid = [
            None if x is None else sw.distribute_tensor(x, mesh_of((ranks,)), [where])
            for x, where in zip(inputs, placements, strict=True)
        ]
        found = as_tensors(function(*laid))
        for x, whole in zip(found, expected, strict=True):
            assert {shard.dtype for shard in shards_of(x.to_local())} == {whole.dtype}, (ranks, placements)
            torch.testing.assert_close(x.full_tensor(), whole, atol=2e-2, rtol=2e-2)


HALVES = (torch.bfloat16, torch.float16)
NORMS: dict[str, Callable[..., Any]] = {
    "layer": lambda x, w, b, m, v: torch.native_layer_norm(x, (4,), w, b, 1e-5),
    "group": lambda x, w, b, m, v: torch.native_group_norm(x, w, b, 6, 4, 1, 2, 1e-5),
    "batch": lambda x, w, b, m, v: (*torch.native_batch_norm(x, w, b, m, v, True, 0.1, 1e-5), *given(m, v)),
    "batch without history": lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    "batch, evaluated": lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, False, 0.1, 1e-5),
    "batch with update": lambda x, w, b, m, v: updated(x, w, b, m, v),
}


def given(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def updated(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (*torch.ops.aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5)[:3], m, v)


@pytest.mark.parametrize("where", [R, S(0), S(1)])
@pytest.mark.parametrize("params", ["alike", "single", "none"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NORMS)
def test_statistics(name: str, dtype: torch.dtype, params: str, where: sw.Placement) -> None:
    if name == "batch with update" and params == "none":
        pytest.skip("torch's kernel for meta tensors takes no call without parameters")
    other = torch.float32 if params == "single" else dtype
    weight, bias = (None, None) if params == "none" else (normal(4).to(other), normal(4).to(other))
    history = [torch.zeros(4, dtype=other), torch.ones(4, dtype=other)]
    check(NORMS[name], [normal(6, 4).to(dtype), weight, bias, *history], [where, R, R, R, R])


@pytest.mark.parametrize("where", [R, S(0), S(1)])
def test_masks_looked_up(where: sw.Placement) -> None:
    table, index = normal(6, 3) > 0, torch.tensor([[0, 5, 2], [5, 1, 0]])
    for split in (R, S(0), S(1)):
        check(lambda t, i: F.embedding(i, t), [table, index], [where, split])


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "amax", "amin"])
def test_masks_reduced_into_rows(reduce: str) -> None:
    into, index, rows = normal(5, 3) > 0, torch.tensor([4, 0, 4, 1]), normal(4, 3) > 0
    for where in (R, S(0), S(1)):
        check(lambda x, i, y: x.index_reduce(0, i, y, reduce), [into, index, rows], [where, R, R])
