"""Factories: made where they lie, and bit for bit what one device makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from compare import check_shards

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import MeshError

MESH = sw.simulate((2, 2), ("dp", "tp"))
PLACEMENTS = list(itertools.product([Replicate(), Shard(0), Shard(-1), Partial()], repeat=2))


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (sw.zeros, torch.zeros),
        (sw.ones, torch.ones),
        (sw.rand, torch.rand),
        (sw.randn, torch.randn),
        (lambda *s, **o: sw.full(s, 2.5, **o), lambda *s, **o: torch.full(s, 2.5, **o)),
    ],
    ids=["zeros", "ones", "rand", "randn", "full"],
)
def test_same_as_on_one_device(make: Callable, plain: Callable, placements: tuple) -> None:
    torch.manual_seed(1)
    d = make(5, 3, device_mesh=MESH, placements=placements, dtype=torch.float64, requires_grad=True)
    after = torch.rand(1)
    torch.manual_seed(1)
    expected = plain(5, 3, dtype=torch.float64)
    assert torch.equal(torch.rand(1), after), "the generator must advance as on one device"
    check_shards(d)
    assert d.requires_grad and d.is_leaf and d.dtype == torch.float64
    assert d.placements == tuple(Shard(1) if p == Shard(-1) else p for p in placements)
    assert torch.equal(d.detach().full_tensor(), expected)


def test_sizes_as_one_sequence_and_empty() -> None:
    assert sw.zeros((4, 3), device_mesh=MESH).shape == (4, 3)
    assert sw.empty(4, 3, device_mesh=MESH, placements=[Shard(0), Replicate()]).to_local().shape == (2, 3)
    assert sw.ones([], device_mesh=MESH).shape == ()
    assert sw.full((2,), 3, device_mesh=MESH).dtype == torch.int64


def test_bad_arguments() -> None:
    with pytest.raises(MeshError, match="no mesh was given: pass device_mesh=, or make it inside `with mesh:`"):
        sw.zeros(2)
    with pytest.raises(TypeError, match=r"DTensors are strided; layout=torch\.sparse_coo is not supported"):
        sw.ones(2, device_mesh=MESH, layout=torch.sparse_coo)


def test_factories_on_a_recorded_mesh_make_meta_shards() -> None:
    mesh = sw.recording((64, 16), ("dp", "tp"))
    d = sw.randn(1024, 512, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert d.device.type == "meta" and d.to_local().shape == (16, 32)
    assert d.normal_().shape == (1024, 512)
    assert torch.nn.functional.dropout(d).shape == (1024, 512)
