"""Replicas of gradients are equal to the last bit, in the simulator and on real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from bodies import AXES, held
from bodies_replicas import (
    bias_of_a_convolution,
    bias_on_thin_inputs,
    biases,
    drawn,
    replicas,
    strided_bias,
    wide_bias,
)
from launch import Case

BIASES = biases, wide_bias, strided_bias, bias_on_thin_inputs, bias_of_a_convolution


def check(found: sw.DTensor, shards: Sequence[torch.Tensor], name: str) -> None:
    everywhere = list(itertools.product(*map(range, found.layout_on_mesh.mesh.shape)))
    for group in replicas(found, shards, everywhere):
        for shard in group:
            assert torch.equal(shard, group[0]), f"{name}: replicas of {found.layout_on_mesh} differ"


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_on_the_simulator(shape: tuple[int, ...]) -> None:
    mesh = sw.simulate(shape, AXES[len(shape)])
    for seed in range(25):
        for found in drawn(seed, mesh):
            check(found, list(held(found).values()), f"program {seed}")
    if len(shape) == 1:
        for program in BIASES:
            for found in program(mesh):
                check(found, list(held(found).values()), program.__name__)


def run(rank: int, size: int, shape: tuple[int, ...], seeds: range) -> None:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    programs: dict[str, Callable[[Any], list[sw.DTensor]]] = {
        f"program {seed}": lambda mesh, seed=seed: drawn(seed, mesh) for seed in seeds
    }
    if len(shape) == 1:
        programs |= {made.__name__: made for made in BIASES}
    for name, program in programs.items():
        for found in program(mesh):
            shards: list[Any] = [None] * size
            dist.all_gather_object(shards, found.to_local())
            check(found, shards, name)


CASES = [Case(f"replicas-{shape}", torch.Size(shape).numel(), run, (shape, range(12))) for shape in ((2,), (2, 2))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
