"""The GPT of examples/gpt.py gives one device's losses and gradient norms however its ranks are used."""

from __future__ import annotations

import pytest

import shardwise as sw
from factorisations import AXES, TOLERANCE, Shape, differences, factorisations, on_mesh

STEPS = 6  # benchmarks/factorisations.py makes 50


@pytest.mark.parametrize("shape", list(factorisations(8)), ids=str)
def test_eight_ranks(shape: Shape) -> None:
    found, _ = on_mesh(sw.simulate(shape, AXES), STEPS)
    assert max(differences(found, STEPS)) <= TOLERANCE
