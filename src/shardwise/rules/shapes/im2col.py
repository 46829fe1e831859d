"""Ops that trade channels for space: patches as columns and back, pixels and channels shuffled."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.rules.kit.dim_rebuild import Sizes
from shardwise.rules.kit.empty import skipping_empty
from shardwise.rules.kit.notation import dims_of, moved, moved_along
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PENDING, SUM, Call, Resize, Rule, Strategy


def _scaled(times: int, over: int = 1) -> Resize:
    """A dim that becomes `times / over` as long, in integral steps."""

    def resize(sizes: Sizes) -> list[Sizes | None] | None:
        if any(size % over for size in sizes):
            return None
        return [tuple(size * times // over for size in sizes)]

    return resize


def _batch(call: Call, num: int) -> list[Strategy]:
    """The first dims are free, all others unsharded."""
    x, out, names = call.inputs[0], call.outputs[0], dims_of(num)
    return moved([[*names, *[None] * (x.ndim - num)]], [[*names, *[None] * (out.ndim - num)]]).strategies()


def _scaling(dim: int, times: int, over: int = 1) -> Strategy:
    return Strategy((dim,), (dim,), resize=_scaled(times, over))


# Patches as columns: channels are the outermost part of a column, so their pieces stay on their ranks


def _im2col(call: Call) -> list[Strategy]:
    channel = call.inputs[0].ndim - 3
    return [*_batch(call, channel), _scaling(channel, math.prod(call["kernel_size"]))]


def _col2im(call: Call) -> list[Strategy]:
    """Patches add up where they overlap, so only a pending sum passes through."""
    channel = call.inputs[0].ndim - 2
    free = [way for way in _batch(call, channel) if PENDING not in way.ins]
    return [*free, Strategy((SUM,), (SUM,)), _scaling(channel, 1, math.prod(call["kernel_size"]))]


# Pixels: a channel of the small image is `factor` squared channels of the large one


def _pixel_shuffle(call: Call) -> list[Strategy]:
    channel, factor = call.inputs[0].ndim - 3, call["upscale_factor"]
    space = [_scaling(d, factor) for d in (channel + 1, channel + 2)]
    return [*_batch(call, channel), _scaling(channel, 1, factor * factor), *space]


def _pixel_unshuffle(call: Call) -> list[Strategy]:
    channel, factor = call.inputs[0].ndim - 3, call["downscale_factor"]
    space = [_scaling(d, 1, factor) for d in (channel + 1, channel + 2)]
    return [*_batch(call, channel), _scaling(channel, factor * factor), *space]


_RULES: dict[str, Callable[[Call], list[Strategy]]] = {
    "im2col": _im2col,
    "col2im": _col2im,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": lambda call: moved_along(call, [1]).strategies(),
}
for _name, _strategies in _RULES.items():
    register(_name, rule=skipping_empty(Rule(_strategies)))
