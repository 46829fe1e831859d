"""Random programs give on DTensors what they give on one device. `make fuzz` runs many more, on real ranks too."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.proof.fuzz.families import draw
from shardwise.proof.fuzz.judge import FAILURES, INVALID, judge

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 150, 25))
def test_programs(first: int) -> None:
    for number in range(first, first + 25):
        program = draw(SEED, number)
        verdict = judge(program, sw.simulate(program.mesh))
        assert verdict.kind not in (*FAILURES, INVALID), f"shardwise fuzz --program {SEED}:{number}: {verdict.detail}"
