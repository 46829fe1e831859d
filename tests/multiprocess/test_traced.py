"""On real ranks: a traced program gives, bit for bit, what the program gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from launch import Case

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from traced import PROGRAMS, collectives, shards, traced


def traced_program(rank: int, size: int, name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    program, expected = PROGRAMS[name]
    graph = make_fx(traced(program, mesh))(*[other(x) for x in shards(name, rank, size)])
    assert collectives(graph) == expected
    found, wanted = graph(*shards(name, rank, size)), program(mesh)(*shards(name, rank, size))
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(x, y), f"result {i}"


def other(x: torch.Tensor) -> torch.Tensor:
    """Other data of the same kind."""
    return torch.rand_like(x) if x.is_floating_point() else x.flip(0)


CASES = [Case(f"{name}-traced", 2, traced_program, (name,)) for name in PROGRAMS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_graph_gives_what_the_program_gives(case: Case, on_ranks: Callable[[Case], object]) -> None:
    on_ranks(case)
