"""What hands out memory of a GPU: refused, or done to the shard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from saved import fake_mesh, measure
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ShardMemoryError

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(2, names=("tp",), device="cuda") as mesh:
        yield mesh


def place(mesh: DeviceMesh, plain: Tensor) -> sw.DTensor:
    return sw.distribute_tensor(plain, mesh, [sw.Shard(0)])


def test_addresses_are_not_given(mesh: DeviceMesh) -> None:
    d = place(mesh, torch.ones(4, 2))
    for access in (
        lambda: d.data_ptr(),
        lambda: d.__cuda_array_interface__,
        lambda: torch.from_dlpack(d),
        lambda: d.cpu().untyped_storage(),
    ):
        with pytest.raises(ShardMemoryError, match=r"x\.to_local\(\) where the shard"):
            access()
    assert d.__dlpack_device__() == d.to_local().__dlpack_device__()


def test_streams_and_pinned_memory_are_the_shards(mesh: DeviceMesh) -> None:
    d = place(mesh, torch.ones(4, 2))
    d.record_stream(torch.cuda.Stream())
    pinned = d.cpu().pin_memory()
    assert pinned.is_pinned() and pinned.shape == (4, 2) and pinned.placements == (sw.Shard(0),)


def test_recurrent_weights_are_not_rearranged(mesh: DeviceMesh) -> None:
    layer = sw.distribute_module(nn.LSTM(2, 3, device="cuda"), mesh)
    layer.flatten_parameters()
    assert layer.to(torch.float64).weight_hh_l0.dtype == torch.float64


def test_a_block_saves_and_peaks_as_its_shards_do(mesh: DeviceMesh) -> None:
    """Columns, then rows: nothing is gathered, so nothing but the shards is kept."""

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, up)), down)

    shapes = [((64, 256), sw.Replicate()), ((1024, 256), sw.Shard(0)), ((256, 1024), sw.Shard(1))]
    ours = [sw.distribute_tensor(torch.randn(shape), mesh, [where]) for shape, where in shapes]
    plain = [d.to_local().clone().requires_grad_() for d in ours]
    for d in ours:
        d.requires_grad_()
    mine, theirs = measure(lambda: block(*ours), "cuda"), measure(lambda: block(*plain), "cuda")
    assert mine.saved == theirs.saved and mine.kept == theirs.kept
    assert mine.peak <= 1.02 * theirs.peak
