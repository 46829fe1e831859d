"""Random ops on shards: distinct streams for distinct shards, equal ones for replicas, state advanced alike everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.comm.ranked import join, pick
from shardwise.dispatch.trace import flat_tensors
from shardwise.layout import Layout
from shardwise.rules import Call

_disabled = torch._C.DisableTorchFunctionSubclass


def is_random(call: Call) -> bool:
    """Whether a call draws random numbers."""
    if call.name == "scaled_dot_product_attention":
        return bool(call["dropout_p"])
    return torch.Tag.nondeterministic_seeded in call.op.tags


def stream_of(layout: Layout, coordinate: tuple[int, ...]) -> int:
    """The number of the shard at a coordinate among the distinct shards of a layout: equal for replicas."""
    number = 0
    for dim, axes in enumerate(layout.splits):
        pieces = math.prod(layout.mesh.shape[axis] for axis in axes)
        number = number * pieces + layout.piece_index(dim, coordinate)
    for axis, pending in enumerate(layout.pending):
        if pending is not None:
            number = number * layout.mesh.shape[axis] + coordinate[axis]
    return number


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the device's default generator runs from `seed`; outside it goes on as if nothing had happened."""
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else getattr(torch, device.type).default_generators[device.index or 0]
    )
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)


def draw_seed() -> int:
    """One number from the CPU generator, which all ranks keep in step."""
    return int(torch.empty((), dtype=torch.int64).random_(2**62))


class RandomCall:
    """A local function that draws random numbers, run with the stream of the shard it makes."""

    __slots__ = ("function", "streams")

    def __init__(self, function: Callable, layout: Layout) -> None:
        self.function = function
        self.streams = [stream_of(layout, coordinate) for coordinate in layout.mesh.held]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disabled():
            seed = draw_seed()
            tensors = flat_tensors(args)
            device = tensors[0].device if tensors else torch.device("cpu")
            results = []
            for rank, stream in enumerate(self.streams):
                with seeded(seed + stream, device):
                    results.append(self.function(*pick(args, rank), **pick(kwargs, rank)))
            return join(results) if len(results) > 1 else results[0]
