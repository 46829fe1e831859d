"""Ops that trade channels for space: patches as columns and back, pixels and channels shuffled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.layout import Layout
from shardwise.rules.kit.dim_rebuild import Sizes
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import ANY_PENDING, SUM, Call, HeldValues, Local, Resize, Rule, Strategy


def _scaled(times: int, over: int = 1) -> Resize:
    """A dim that becomes `times / over` as long, in whole steps."""

    def resize(sizes: Sizes) -> list[Sizes | None] | None:
        if any(size % over for size in sizes):
            return None
        return [tuple(size * times // over for size in sizes)]

    return resize


def _batch(call: Call, num: int) -> list[Strategy]:
    """The first dims are free, all others whole."""
    x, out = call.inputs[0], call.outputs[0]
    names: list[Factor] = list(dims_of(num))
    ins, outs = [*names, *[None] * (x.ndim - num)], [*names, *[None] * (out.ndim - num)]
    return [*Factors([ins], [outs]).strategies(), ANY_PENDING]


def _unless_empty(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """The op itself, but for empty shards: torch refuses some of them."""
    if all(map(math.prod, ins[0].held_shapes)):
        return None
    args = [call[argument.name] for argument in call.op._schema.arguments[1:] if not argument.is_out]
    return Local(_or_empty, [OPS[call.name], call.inputs[0], HeldValues(outs[0].held_shapes), args])


def _or_empty(op: Callable[..., Tensor], x: Tensor, shape: tuple[int, ...], args: Sequence[Any]) -> Tensor:
    return op(x, *args) if x.numel() else x.new_zeros(shape) + x.sum(dtype=x.dtype)


# Patches as columns: channels lie outermost in a column, so their pieces stay whole


def _im2col(call: Call) -> list[Strategy]:
    channel = call.inputs[0].ndim - 3
    columns = Strategy((channel,), (channel,), resize=_scaled(math.prod(call["kernel_size"])))
    return [*_batch(call, channel), columns]


register("im2col", rule=Rule(_im2col, _unless_empty))


def _col2im(call: Call) -> list[Strategy]:
    """Patches add up where they overlap: sharded, they leave a pending sum."""
    channel = call.inputs[0].ndim - 2
    images = Strategy((channel,), (channel,), resize=_scaled(1, math.prod(call["kernel_size"])))
    found = [way for way in _batch(call, channel) if way is not ANY_PENDING]
    return [*found, Strategy((SUM,), (SUM,)), images, Strategy((channel + 1,), (SUM,))]


def _col2im_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not ins[0].splits[-1]:
        return _unless_empty(call, ins, outs)
    boxes = [ins[0].box(coordinate) for coordinate in ins[0].mesh.held]
    missing = [(start[-1], ins[0].shape[-1] - start[-1] - size[-1]) for start, size in boxes]
    args = [call[argument.name] for argument in call.op._schema.arguments[1:] if not argument.is_out]
    return Local(_col2im_part, [call.inputs[0], HeldValues(outs[0].held_shapes), HeldValues(missing), args])


def _col2im_part(x: Tensor, shape: tuple[int, ...], missing: tuple[int, int], args: Sequence[Any]) -> Tensor:
    """The patches we have, and zeros for those we have not."""
    return _or_empty(torch.ops.aten.col2im.default, pad(x, missing), shape, args)


register("col2im", rule=Rule(_col2im, _col2im_local))


# Pixels: a channel of the small image is `factor` squared channels of the large one


def _pixel_shuffle(call: Call) -> list[Strategy]:
    channel, factor = call.inputs[0].ndim - 3, call["upscale_factor"]
    return [
        *_batch(call, channel),
        Strategy((channel,), (channel,), resize=_scaled(1, factor * factor)),
        *(Strategy((d,), (d,), resize=_scaled(factor)) for d in (channel + 1, channel + 2)),
    ]


def _pixel_unshuffle(call: Call) -> list[Strategy]:
    channel, factor = call.inputs[0].ndim - 3, call["downscale_factor"]
    return [
        *_batch(call, channel),
        Strategy((channel,), (channel,), resize=_scaled(factor * factor)),
        *(Strategy((d,), (d,), resize=_scaled(1, factor)) for d in (channel + 1, channel + 2)),
    ]


register("pixel_shuffle", rule=Rule(_pixel_shuffle, _unless_empty))
register("pixel_unshuffle", rule=Rule(_pixel_unshuffle, _unless_empty))


def _channel_shuffle(call: Call) -> list[Strategy]:
    names = [None if d == 1 else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return [*Factors([names], [names]).strategies(), ANY_PENDING]


register("channel_shuffle", rule=Rule(_channel_shuffle, _unless_empty))

OPS: dict[str, Callable[..., Tensor]] = {
    "im2col": torch.ops.aten.im2col.default,
    "col2im": torch.ops.aten.col2im.default,
    "pixel_shuffle": torch.pixel_shuffle,
    "pixel_unshuffle": torch.pixel_unshuffle,
    "channel_shuffle": torch.channel_shuffle,
}
