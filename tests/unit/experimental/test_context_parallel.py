"""What `context_parallel` refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from saved import fake_mesh
from torch import nn

import shardwise as sw
from shardwise.errors import MeshError, ShardShapeError
from shardwise.experimental import context_parallel


@pytest.fixture
def mesh() -> Iterator[Any]:
    with fake_mesh(2, names=("cp",), rank=1) as made:
        yield made


def test_meshes() -> None:
    for mesh, says in (
        (sw.simulate((2,), ("cp",)), r"all ranks of .* are in one: distribute the inputs with Shard of their sequence"),
        (sw.simulate((2, 2), ("dp", "cp")), "splits sequences along one axis, and .* has 2: take one of them"),
    ):
        with pytest.raises(MeshError, match=says), context_parallel(mesh):
            pass


def test_buffers_are_as_they_were_when_one_is_refused(mesh: Any) -> None:
    first = torch.arange(8.0).view(4, 2)
    for second, dims, error, says in (
        (torch.ones(3), [0, 0], ShardShapeError, r"dim 0 of a buffer of shape \[3\] is no multiple of the 2 ranks"),
        (torch.ones(4), [0], ValueError, "2 buffers and 1 buffer_seq_dims"),
        (nn.Parameter(torch.ones(4)), [0, 0], TypeError, "plain tensors that are split, not a Parameter"),
    ):
        with pytest.raises(error, match=says), context_parallel(mesh, buffers=[first, second], buffer_seq_dims=dims):
            pass
        assert torch.equal(first, torch.arange(8.0).view(4, 2))
    left = "no_restore_buffers has a tensor that is none of buffers"
    with pytest.raises(ValueError, match=left), context_parallel(mesh, no_restore_buffers={first}):
        pass


def test_buffers_are_restored_when_the_program_fails(mesh: Any) -> None:
    x = torch.arange(8.0).view(2, 4)
    with pytest.raises(KeyError), context_parallel(mesh, buffers=[x], buffer_seq_dims=[-1]):
        assert torch.equal(x, torch.tensor([[2.0, 3.0], [6.0, 7.0]]))
        raise KeyError
    assert torch.equal(x, torch.arange(8.0).view(2, 4))
