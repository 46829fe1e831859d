"""Random programs on real ranks: judged by all of them, and one that hangs does not take the others along."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shardwise as sw
from shardwise.proof.fuzz.judge import HUNG, RAISED, RIGHT, WRONG
from shardwise.proof.fuzz.program import Leaf, Line, Program
from shardwise.proof.fuzz.ranks import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

X = Leaf("x1", (3, 4), torch.float64, (sw.Replicate(),), 1)
RANK = "torch.distributed.get_rank()"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(2)
    yield made
    made.close()


def program(text: str, *gives: str) -> Program:
    return Program((2,), (X, Line(text, gives)))


def test_what_ranks_agree_on(world: World) -> None:
    assert world.judge(program("v1 = on.redistribute(x1, [Shard(0)]) * 2", "v1"), 60).kind == RIGHT
    raised = world.judge(program("if hasattr(x1, '_layout'): raise ValueError('no')"), 60)
    assert (raised.kind, raised.detail, raised.at) == (RAISED, "ValueError: no", 1)


def test_replicas_that_differ_are_found_by_comparing_ranks(world: World) -> None:
    text = f"v1 = x1 * 1; (v1.to_local().mul_(1 + {RANK} * 2**-52) if hasattr(v1, '_layout') else None)"
    verdict = world.judge(program(text, "v1"), 60)
    assert (verdict.kind, verdict.detail) == (WRONG, "v1: replicas differ")


def test_a_program_that_hangs_is_ended_and_the_next_one_runs(world: World) -> None:
    hung = world.judge(program(f"if {RANK} == 0: torch.distributed.barrier()"), 5)
    assert (hung.kind, hung.at) == (HUNG, 1)
    assert world.judge(program("v1 = x1 + 1", "v1"), 60).kind == RIGHT


def test_a_rank_that_raises_alone_makes_the_others_hang(world: World) -> None:
    text = f"v1 = int('no') if hasattr(x1, '_layout') and {RANK} else torch.distributed.barrier()"
    hung = world.judge(program(text, "v1"), 60)
    assert hung.kind == HUNG and hung.detail.startswith("rank 1: raised ValueError")
