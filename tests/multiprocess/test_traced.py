"""On real ranks: a traced program gives, bit for bit, what the program gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from launch import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from traced import PROGRAMS, collectives, shards, traced


def traced_programs(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for name, (program, expected) in PROGRAMS.items():
        graph = make_fx(traced(program, mesh))(*[torch.rand_like(x) for x in shards(name, rank, size)])
        assert collectives(graph) == expected, name
        found, wanted = graph(*shards(name, rank, size)), program(mesh)(*shards(name, rank, size))
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(x, y), f"{name}, result {i}"


@pytest.mark.multiprocess
def test_a_graph_gives_what_the_program_gives() -> None:
    run_ranks(traced_programs, 2)
