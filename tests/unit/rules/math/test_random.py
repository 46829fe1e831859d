"""Random ops: what they write to, whatever they draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sweep import place
from torch import Tensor

import shardwise as sw

R, S = sw.Replicate(), sw.Shard


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize(("function", "num_dims"), [(F.dropout1d, 2), (F.dropout3d, 4)], ids=["1d", "3d"])
def test_channels_without_a_batch_are_dropped(
    function: Callable[..., Tensor], num_dims: int, placement: sw.Placement
) -> None:
    """Torch adds a dim to the argument meanwhile, in place if the call is."""
    shape = (64, *[2] * (num_dims - 1))
    x = place(torch.ones(shape), placement)
    out = function(x, 0.5)
    assert (x.full_tensor() == 1).all()
    assert function(x, 0.5, inplace=True) is x and x.shape == shape
    for dropped in (out, x):
        channels = dropped.full_tensor().flatten(1)
        assert (channels == channels[:, :1]).all(), "a channel is dropped as a whole"
        assert set(channels[:, 0].tolist()) == {0.0, 2.0}
