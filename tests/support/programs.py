"""Run a whole program on a model and on a copy of it with sharded parameters, and compare what comes of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch
from sweep import mesh_of
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.record import Comm
from shardwise.debug import CommDebugMode

To = Callable[..., Tensor]
"""Brings a tensor to the mesh, where there is one: into the placements given, or any."""

Step = Callable[[nn.Module, To], list[Tensor]]


def anywhere(x: Tensor, mesh: Any, chance: random.Random) -> sw.DTensor:
    """A tensor in some layout."""
    ways = [sw.Replicate(), *(sw.Shard(dim) for dim in range(x.dim()))]
    return sw.distribute_tensor(x, mesh, [chance.choice(ways) for _ in range(mesh.ndim)])


def sharded(model: nn.Module, mesh: Any, chance: random.Random) -> nn.Module:
    """A copy of a model with its parameters in some layouts; those that are shared stay shared."""
    model = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(anywhere(p.detach(), mesh, chance))
                module._parameters[name] = made[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = sw.distribute_tensor(buffer, mesh)
    return model


def check_program(
    make: Callable[[], nn.Module],
    step: Step,
    *,
    mesh: tuple[int, ...] = (2, 2),
    seeds: int = 2,
    meta: str = "the same",
) -> None:
    """`step` does the same to a model wherever its parameters and data lie; and without data it communicates the same,
    unless `meta` says what comes of that instead."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        chance, lying = random.Random(seed), mesh_of(mesh)
        plain = make()
        dist = sharded(plain, lying, chance)
        torch.manual_seed(seed)
        expected = step(plain, lambda x, *where: x)
        torch.manual_seed(seed)
        with CommDebugMode() as comm:
            found = step(dist, _bringing(lying, chance))
        for e, f in zip(expected, found, strict=True):
            torch.testing.assert_close(f.detach().full_tensor(), e.detach())
        for (name, p), q in zip(plain.named_parameters(), dist.parameters(), strict=True):
            torch.testing.assert_close(q.detach().full_tensor(), p.detach(), msg=lambda m, name=name: f"{name}: {m}")
            if p.grad is not None:
                torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=lambda m, name=name: f"grad {name}: {m}")
        for p, q in zip(plain.buffers(), dist.buffers(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p)
        check_on_meta(make, step, lying, seed, comm.comms, meta)


def _bringing(mesh: Any, chance: random.Random) -> To:
    return lambda x, *where: sw.distribute_tensor(x, mesh, where) if where else anywhere(x, mesh, chance)


def check_on_meta(
    make: Callable[[], nn.Module], step: Step, mesh: Any, seed: int, comms: list[Comm], expected: str
) -> None:
    """The same program without data, built on the meta device, on one rank of a mesh of the same shape."""
    torch.manual_seed(seed)
    chance, recording = random.Random(seed), sw.recording(mesh.shape, mesh.names)

    def run() -> None:
        with torch.device("meta"):
            model = make()
        model = sharded(model, recording, chance)
        torch.manual_seed(seed)
        with comm:
            step(model, _bringing(recording, chance))

    comm = CommDebugMode()
    if expected in REFUSALS:
        with pytest.raises(REFUSALS[expected], match="meta"):
            run()
        return
    run()
    if expected == "the same":
        pairs = zip_longest(map(facts, comm.comms), map(facts, comms))
        different = [f"{i}: {a} on meta, {b} in the simulator" for i, (a, b) in enumerate(pairs) if a != b]
        assert not different, "\n".join(different[:4])


REFUSALS: dict[str, type[Exception]] = {"needs data": sw.errors.NoDataError, "refused by torch": RuntimeError}
"""What may come of a program on meta tensors but `the same` communication, or `less` of it, where torch skips steps."""


def facts(comm: Comm) -> tuple[Any, ...]:
    """What every port records of a collective."""
    return comm.kind, comm.axes, comm.ranks, comm.bytes, comm.backward
