"""Random ops on shards, by two policies.

*Exact*: bit for bit what one device draws from the same generator state. *Parallel*: distinct streams for distinct
shards, equal ones for replicas. Either way the generators of all ranks advance alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from shardwise.comm.agreement import largest
from shardwise.comm.captured import noters, running_mesh
from shardwise.comm.ranked import join, pick, ranked, shards_of
from shardwise.dispatch.planning.local_calls import EachRank
from shardwise.dispatch.planning.realise import Realised
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.errors import ReplicaError
from shardwise.layout import Layout, Mesh
from shardwise.local import part
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
def seeded(seed: int, generator: torch.Generator | None) -> Iterator[None]:
    """Inside, a generator runs from `seed`; outside it goes on as if nothing had happened."""
    if generator is None:  # meta tensors: nothing is drawn
        yield
        return
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)


_in_step: WeakSet[Mesh] = WeakSet()


def check_in_step(mesh: Mesh) -> None:
    """The first time numbers are drawn on a mesh, make sure that its ranks were seeded alike. All ranks find out."""
    mesh = running_mesh(mesh)
    if mesh in _in_step:
        return
    generators = (torch.default_generator, default_generator(torch.device(mesh.device_type)))
    seeds = [_signed(generator.initial_seed()) for generator in generators if generator is not None]
    # The largest of `~seed` is that of the smallest seed: one reduction finds both ends.
    found = largest(mesh, [*seeds, *(~seed for seed in seeds)])
    for high, low in zip(found, found[len(seeds) :]):
        if high != ~low:
            raise ReplicaError(
                f"random numbers on {mesh} need its ranks in step, but their generators were seeded differently, "
                f"from {~low} to {high}; call torch.manual_seed with the same seed on every rank"
            )
    _in_step.add(mesh)


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def draw_seed(generator: torch.Generator | None = None) -> int:
    """One number from a generator (by default the CPU's), which all ranks keep in step."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(2**62, generator=generator))


def _given_generator(args: tuple, kwargs: dict[str, Any]) -> torch.Generator | None:
    return next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)), None)


def default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def random_call(function: Callable, call: Call, layouts: Realised, arguments: Container[int]) -> RandomCall | ExactCall:
    """How a call that draws runs on the shards, exact or parallel; `arguments` are the user's own tensors.

    Writing to a tensor of the user's and making one like it are initialisation: exact. Anything else, dropout say, is
    drawn in parallel.
    """
    if isinstance(function, EachRank):
        function = function.function  # each rank has a stream of its own: one at a time
    layout = drawn(call, layouts)
    if is_exact(call, layouts, arguments):
        return ExactCall(function, layout, in_place=bool(call.mutated))
    return RandomCall(function, layout)


def is_exact(call: Call, layouts: Realised, arguments: Container[int]) -> bool:
    """Whether a call that draws initialises a tensor."""
    writes_argument = any(call.inputs[position].index in arguments for position in call.mutated)
    initialises = writes_argument or call.name.endswith("_like")
    return len(call.inputs) == 1 and initialises and not drawn(call, layouts).has_pending


def streams(layout: Layout) -> list[int]:
    """The streams that the ranks held here draw from, to fill a tensor of a layout."""
    return [stream_of(layout, coordinate) for coordinate in layout.mesh.held]


def drawn(call: Call, layouts: Realised) -> Layout:
    """The layout of what is drawn: a number for each element of the result, as a rule. Attention draws one for each
    query and key, whatever columns of the values it is for."""
    layout = layouts.outs[0] if call.outputs else layouts.ins[0]
    if call.name == "scaled_dot_product_attention":
        return layout.with_(splits=(*layout.splits[:-1], ()), sizes=(*layout.sizes[:-1], None))
    return layout


class RandomCall:
    """A local function that draws random numbers, run with the stream of the shard it makes."""

    __slots__ = ("function", "mesh", "streams")

    def __init__(self, function: Callable, layout: Layout) -> None:
        self.function = function
        self.mesh = layout.mesh
        self.streams = streams(layout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disabled():
            given = _given_generator(args, kwargs)
            if given is None:
                check_in_step(self.mesh)
            results = []
            for rank, stream in enumerate(self._streams(given, args)):
                with stream:
                    results.append(self.function(*pick(args, rank), **pick(kwargs, rank)))
            return join(results) if len(results) > 1 else results[0]

    def _streams(self, given: torch.Generator | None, args: tuple) -> list[AbstractContextManager[None]]:
        """Where the ranks held here draw from."""
        if noters:
            drawn = noters[-1].seed(partial(draw_seed, given))
            return [noters[-1].stream(drawn, number) for number in self.streams]
        seed, tensors = draw_seed(given), flat_tensors(args)
        generator = given or default_generator(tensors[0].device if tensors else torch.device("cpu"))
        return [seeded(seed + number, generator) for number in self.streams]


class ExactCall:
    """A function that fills a tensor, run for all of it, as one device would run it (in the order of a contiguous
    tensor); every shard takes its part."""

    __slots__ = ("function", "in_place", "layout")

    def __init__(self, function: Callable, layout: Layout, *, in_place: bool) -> None:
        self.function = function
        self.in_place = in_place
        self.layout = layout

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _disabled():
            if _given_generator(args, kwargs) is None:
                check_in_step(self.layout.mesh)

            def draw(shape: tuple[int, ...]) -> Tensor:
                return self.function(torch.empty(shape, dtype=x.dtype, device=x.device), *args, **kwargs)

            with torch.no_grad():
                made = drawn_shards(draw, self.layout)
                if not self.in_place:
                    return ranked(made) if len(made) > 1 else made[0]
                for shard, part in zip(shards_of(x), made, strict=True):
                    shard.copy_(part)
            return x


SLAB = 2**22
"""How many numbers are drawn at a time, where that gives the same as drawing all of them at once."""


def drawn_shards(draw: Callable[[tuple[int, ...]], Tensor], layout: Layout) -> list[Tensor]:
    """The shards held here of what `draw` gives for the shape of the whole tensor. A CPU draws number after number,
    in groups of at most 16: slabs of that many rows, one after the other, are what it draws at once, and the whole is
    never in memory."""
    boxes = [layout.box(coordinate) for coordinate in layout.mesh.held]
    if layout.mesh.device_type != "cpu" or layout.numel <= 2 * SLAB:
        whole = draw(layout.shape)
        return [part(whole, *box).clone() for box in boxes]
    num_rows, rest = layout.shape[0], layout.shape[1:]
    rows = max(SLAB // math.prod(rest) // 16, 1) * 16
    starts = range(0, max(num_rows - rows, 1), rows)
    shards: list[Any] = [None] * len(boxes)  # the last slab takes what is left: fewer than 16 are drawn otherwise
    for start in starts:
        count = rows if start != starts[-1] else num_rows - start
        slab = draw((count, *rest))
        for at, (begins, extents) in enumerate(boxes):
            if shards[at] is None:
                shards[at] = slab.new_empty(extents)
            first, last = max(begins[0], start), min(begins[0] + extents[0], start + count)
            if first < last:
                rows_here = part(slab, (first - start, *begins[1:]), (last - first, *extents[1:]))
                shards[at][first - begins[0] : last - begins[0]] = rows_here
    return shards
