"""Run a whole program on a model and on a copy of it with sharded parameters, and compare what comes of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from sweep import mesh_of
from torch import Tensor, nn

import shardwise as sw

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


def check_program(make: Callable[[], nn.Module], step: Step, *, mesh: tuple[int, ...] = (2, 2), seeds: int = 2) -> None:
    """`step` does the same to a model wherever its parameters and data lie."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        chance, lying = random.Random(seed), mesh_of(mesh)
        plain = make()
        dist = sharded(plain, lying, chance)
        torch.manual_seed(seed)
        expected = step(plain, lambda x, *where: x)
        torch.manual_seed(seed)
        found = step(
            dist,
            lambda x, *where: sw.distribute_tensor(x, lying, where) if where else anywhere(x, lying, chance),  # noqa: B023
        )
        for e, f in zip(expected, found, strict=True):
            torch.testing.assert_close(f.detach().full_tensor(), e.detach())
        for (name, p), q in zip(plain.named_parameters(), dist.parameters(), strict=True):
            torch.testing.assert_close(q.detach().full_tensor(), p.detach(), msg=lambda m, name=name: f"{name}: {m}")
            if p.grad is not None:
                torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=lambda m, name=name: f"grad {name}: {m}")
        for p, q in zip(plain.buffers(), dist.buffers(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p)
