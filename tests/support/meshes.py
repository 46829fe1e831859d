"""Small simulated meshes, and values to put on them."""

from __future__ import annotations

import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm import ranked

PAIR = sw.simulate((2,), ("tp",))
LINE = sw.simulate((4,), ("tp",))
GRID = sw.simulate((2, 2), ("dp", "tp"))


def numbers(*shape: int) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def data(*shape: int) -> Tensor:
    """Other values in every call."""
    return torch.randn(*shape, dtype=torch.float64)


def pending(*terms: list[float]) -> sw.DTensor:
    """A sum, of which each rank of a pair has one of the terms."""
    return sw.DTensor.from_local(ranked([torch.tensor(t, dtype=torch.float64) for t in terms]), PAIR, [sw.Partial()])
