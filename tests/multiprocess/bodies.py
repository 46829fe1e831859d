"""Test bodies that run unchanged on the simulator and on real processes, and what they are written with.

A body takes a mesh and compares with single-device torch. `@body(2, 2)` names the mesh it wants: axes `dp` and `tp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.comm import as_mesh, ranked

AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}


@dataclass(frozen=True)
class Body:
    """A test body, the mesh it wants, and whether both ports must communicate exactly alike in it."""

    function: Callable[[Any], None]
    shape: tuple[int, ...]
    same_record: bool

    @property
    def axes(self) -> tuple[str, ...]:
        return AXES[len(self.shape)]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)

    def __call__(self, mesh: Any) -> None:
        torch.manual_seed(0)
        self.function(mesh)


BODIES: dict[str, Body] = {}


def body(*shape: int, same_record: bool = True) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        add_body(function.__name__, Body(function, shape, same_record))
        return function

    return add


def add_body(name: str, made: Body) -> None:
    assert name not in BODIES, f"two bodies are called {name}"
    BODIES[name] = made


# Ranks: what one process holds, and what all of them hold


def per_rank(mesh: Any, make: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """The local tensor in which the rank at each coordinate holds `make(coordinate)`."""
    shards = [make(coordinate) for coordinate in as_mesh(mesh).held]
    return shards[0] if len(shards) == 1 else ranked(shards)


def held(x: sw.DTensor) -> dict[tuple[int, ...], Tensor]:
    """The shards in this process, by coordinate."""
    with torch._C.DisableTorchFunctionSubclass():
        shards = [shard.detach().as_subclass(Tensor) for shard in (x, *x.__dict__.get("_peers", ()))]
    return dict(zip(x.layout_on_mesh.mesh.held, shards, strict=True))


def everywhere(values: dict[tuple[int, ...], Any]) -> dict[tuple[int, ...], Any]:
    """What every rank knows, from what the ranks in this process know, by coordinate."""
    if not dist.is_initialized():
        return values
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return {coordinate: value for entry in found for coordinate, value in entry.items()}


def assert_close(actual: Tensor, expected: Tensor, what: object = "") -> None:
    if isinstance(actual, sw.DTensor):
        what = f"{what} {actual.layout_on_mesh}"
        actual = actual.detach().full_tensor()
    torch.testing.assert_close(actual, expected.detach(), atol=1e-9, rtol=1e-7, msg=lambda text: f"{what}\n{text}")


def leaf(x: Tensor, mesh: Any, placements: Any) -> sw.DTensor:
    """A distributed copy that wants a gradient. All ranks have made the same tensor, so none sends it to others."""
    made = sw.distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_(x.is_floating_point())


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_move(x: sw.DTensor, whole: Tensor, placements: Any) -> None:
    """Redistribute; the value stays, and so does the gradient of a weighted sum."""
    what = f"{x.layout_on_mesh} → {placements}"
    moved = x.redistribute(placements=placements)
    assert_close(moved, whole, what)
    weight = doubles(*whole.shape)
    x.grad = None
    (moved * sw.distribute_tensor(weight, x.device_mesh, src_data_rank=None)).sum().backward()
    assert_close(x.grad, weight, f"gradient of {what}")


R, P = sw.Replicate(), sw.Partial()


def S(dim: int) -> sw.Shard:
    return sw.Shard(dim)
