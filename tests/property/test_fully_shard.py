"""Random models, sharded at random places with random options, train as on one device."""

from __future__ import annotations

import pytest
from random_modules import train

import shardwise as sw

MESHES = [
    sw.simulate((2,), ("dp",)),
    sw.simulate((3,), ("dp",)),
    sw.simulate((2, 2), ("replicate", "shard")),
]


@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed: int) -> None:
    train(seed, MESHES[seed % 3], own=seed % 2 == 0)
