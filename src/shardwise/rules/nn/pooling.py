"""Pooling: by batch and channels; averages and maxima also by spatial dims, with a halo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.agreement import unknown
from shardwise.rules.kit.empty import connected_zeros, unless_empty
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Interval, Local, Rule, Strategy
from shardwise.rules.kit.windows import Fetch, Slide, around, by_rank, even_pieces, held, inside, per_dim, with_halo
from shardwise.rules.math.reductions import LAST, PROGRAM_COST, wide

aten = torch.ops.aten

NUM_DIMS = {
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
}
"""Spatial dims, the last ones. Torch's 1-d pooling is made of these."""


def _batch_and_channels(call: Call, num_dims: int) -> list[Strategy]:
    names: list[Factor] = [*dims_of(call.inputs[0].ndim - num_dims), *[None] * num_dims]
    linear = [frozenset({0})] if "avg_pool" in call.name and call.inputs[0].dtype.is_floating_point else []
    return Factors([names], [names] * len(call.outputs), linear=linear).strategies()


# Windows of a fixed size


def _slides(call: Call) -> list[Slide]:
    num_dims = NUM_DIMS[call.name]
    kernel = per_dim(call["kernel_size"], num_dims)
    stride = per_dim(call["stride"], num_dims) if call["stride"] else kernel
    padding, dilation = per_dim(call["padding"], num_dims), per_dim(call.bound.get("dilation", 1), num_dims)
    return [Slide(s, p, d * (k - 1) + 1) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)]


def _pool(call: Call) -> list[Strategy]:
    num_dims, x, out = NUM_DIMS[call.name], call.inputs[0], call.outputs[0]
    found = _batch_and_channels(call, num_dims)
    if not x.dtype.is_floating_point or not _reads_something(call):
        return found
    for dim in range(x.ndim - num_dims, x.ndim):
        resize = even_pieces(len(call.outputs), x.shape[dim], out.shape[dim])
        found.append(Strategy((dim,), (dim,) * len(call.outputs), PROGRAM_COST, resize))
    return found


def _reads_something(call: Call) -> bool:
    """Whether every output has an input. A dilated window may step over all of them; torch's answer then is its own."""
    num_dims = NUM_DIMS[call.name]
    sizes = zip(call.inputs[0].shape[-num_dims:], call.outputs[0].shape[-num_dims:], strict=True)
    dilation = per_dim(call.bound.get("dilation", 1), num_dims)
    for slide, step, (size, size_out) in zip(_slides(call), dilation, sizes, strict=True):
        for i in range(size_out):
            start, stop = slide.reads((i, i + 1))
            if not any(0 <= at < size for at in range(start, stop, step)):
                return False
    return True


def _pool_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    num_dims, x = NUM_DIMS[call.name], ins[0]
    lead = len(x.shape) - num_dims
    if not any(x.splits[lead:]):
        return unless_empty(call, outs)
    fetches, starts, pads = [], [], []
    for dim, slide in enumerate(_slides(call), lead):
        pieces = outs[0].intervals(dim)
        reads = [slide.reads(piece) for piece in pieces]
        fetches.append(Fetch(dim, x.intervals(dim), tuple(inside(read, x.shape[dim]) for read in reads)))
        starts.append(held(outs[0], dim, pieces))
        pads.append(held(outs[0], dim, [around(read, x.shape[dim]) for read in reads]))
    args = [call["self"], by_rank(pads), by_rank(starts), HeldValues(outs[0].held_shapes), x.shape[lead:]]
    slides, kernel = _slides(call), per_dim(call["kernel_size"], num_dims)
    if call.name.startswith("avg"):
        rule = (slides, call["count_include_pad"], call["divisor_override"])
        return with_halo(_local_average, fetches, x, [*args, aten.__getattr__(call.name).default, *rule])
    dilation = per_dim(call["dilation"], num_dims)
    return with_halo(_local_maximum, fetches, x, [*args, call.op, slides, kernel, dilation])


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    flat = [side for pad in reversed(pads) for side in pad]
    return F.pad(x, flat, value=value) if any(flat) else x


def _local_average(
    x: Tensor,
    pads: Sequence[tuple[int, int]],
    pieces: Sequence[Interval],
    shape: Sequence[int],
    sizes: Sequence[int],
    op: Any,
    slides: Sequence[Slide],
    include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Sums over windows, padded with zeros, divided by what torch divides by at these places of the whole."""
    if not math.prod(shape):
        return connected_zeros(x, shape)
    kernel, stride = [slide.span for slide in slides], [slide.stride for slide in slides]
    sums = op(_padded(wide(x), pads, 0.0), kernel, stride, 0, False, True, 1)
    if divisor is None:
        counts = []
        for slide, piece, size in zip(slides, pieces, sizes, strict=True):
            start = torch.arange(*piece, device=x.device) * slide.stride - slide.padding
            stop = (start + slide.span).clamp(max=size + slide.padding)
            counts.append(stop - start if include_pad else stop.clamp(max=size) - start.clamp(min=0))
        divisors: Any = reduce(lambda outer, inner: outer.unsqueeze(-1) * inner, counts)
    else:
        divisors = divisor
    return (sums / divisors).to(x.dtype)


def _local_maximum(
    x: Tensor,
    pads: Sequence[tuple[int, int]],
    pieces: Sequence[Interval],
    shape: Sequence[int],
    sizes: Sequence[int],
    op: Any,
    slides: Sequence[Slide],
    kernel: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Torch says where the maxima are; the values, and with them the gradients, are taken from there.

    Where all of a window is minus infinity torch names its first element, which here may be one of the padding; the
    first that is not is what torch means.
    """
    num_dims = len(sizes)
    if not math.prod(shape):
        return connected_zeros(x, shape), x.new_zeros(shape, dtype=torch.int64)
    padded = _padded(x.detach(), pads, -math.inf)
    places = op(padded, kernel, [slide.stride for slide in slides], 0, dilation, False)[1]
    here, there = torch.zeros_like(places), torch.zeros_like(places)
    within = _coordinates(places, padded.shape[-num_dims:])
    for d, (slide, piece, size) in enumerate(zip(slides, pieces, sizes, strict=True)):
        at = within[d] + slide.reads(piece)[0]
        at = torch.where(at < 0, at % dilation[d], at)
        there = there * size + at
        here = here * x.shape[d - num_dims] + at - inside(slide.reads(piece), size)[0]
    values = x.flatten(-num_dims).gather(-1, here.flatten(-num_dims)).reshape(shape)
    return values, there


def _coordinates(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Indices into flattened dims as one index per dim."""
    found: list[Tensor] = []
    for size in reversed(sizes):
        found.insert(0, flat % size)
        flat = flat // size
    return found


register(
    *("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"), rule=Rule(_pool, _pool_local)
)


# Windows that adapt to the size: a sharded dim, if it is cut into whole windows, all of one size


def _adaptive(call: Call) -> list[Strategy]:
    num_dims, x, out = NUM_DIMS[call.name], call.inputs[0], call.outputs[0]
    found = _batch_and_channels(call, num_dims)
    for dim in range(x.ndim - num_dims, x.ndim):
        window, rest = divmod(x.shape[dim], out.shape[dim]) if out.shape[dim] else (0, 1)
        if not rest and window:
            resize = _whole_windows(window, len(call.outputs))
            found.append(Strategy((dim,), (dim,) * len(call.outputs), resize=resize))
    return found


def _whole_windows(window: int, num_outputs: int) -> Any:
    def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if any(size % window for size in sizes):
            return None
        return [tuple(size // window for size in sizes)] * num_outputs

    return resize


def _adaptive_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    num_dims = NUM_DIMS[call.name]
    lead = len(ins[0].shape) - num_dims
    if not any(ins[0].splits[lead:]):
        return unless_empty(call, outs)
    sizes = HeldValues([shape[lead:] for shape in outs[0].held_shapes])
    if len(outs) == 1:
        return unless_empty(call, outs, Local(call.op, [call["self"], sizes]))
    starts = HeldValues([start[lead:] for start in ins[0].held_starts])
    args = [call.op, call["self"], sizes, starts, ins[0].shape[lead:]]
    return unless_empty(call, outs, Local(_adaptive_maximum, args))


def _adaptive_maximum(
    op: Any, x: Tensor, output_size: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Indices count places of the whole."""
    values, places = op(x, output_size)
    there = torch.zeros_like(places)
    for at, start, size in zip(_coordinates(places, x.shape[-len(sizes) :]), starts, sizes, strict=True):
        there = there * size + at + start
    return values, there


register(
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    rule=Rule(_adaptive, _adaptive_local),
)


# Pooling into random windows, and the way back from a maximum


def _fractional(call: Call) -> list[Strategy]:
    """Given the samples nothing is random any more. An image without a batch has samples with a batch of one."""
    num_dims = 2 if call.name.endswith("2d") else 3
    lead = ["batch", "channel"][num_dims + 2 - call.inputs[0].ndim :]
    names: list[Factor] = [*lead, *[None] * num_dims]
    samples: list[Factor] = ["batch" if "batch" in lead else None, "channel", None]
    return Factors([names, samples], [names, names]).strategies()


def _unpool(call: Call) -> list[Strategy]:
    num_dims = 2 if call.name.endswith("2d") else 3
    names: list[Factor] = [*dims_of(call.inputs[0].ndim - num_dims), *[None] * num_dims]
    return Factors([names, names], [names]).strategies()


def _unpool_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    axes = tuple(axis for cut in ins[1].splits for axis in cut)
    if not axes:
        return None
    shapes = HeldValues(outs[0].held_shapes)
    return Local(_checked_unpool, [call.op, shapes, list(call["output_size"]), *call.args], groups=(axes,))


def _checked_unpool(
    group: Collectives, op: Any, shape: Any, sizes: Sequence[int], x: Tensor, indices: Tensor, *rest: Any
) -> Tensor:
    """Torch refuses indices outside of the result; all ranks do if one has such an index."""
    if indices.device.type == "cpu":
        first = int(group.reduce(group.map(_first_outside, indices, math.prod(sizes)), "min"))
        if first != LAST:
            volumes = "x".join(map(str, sizes))
            raise RuntimeError(f"Found an invalid max index: {first} (output volumes are of size {volumes})")
    elif indices.is_meta:
        unknown(group, indices)
    return group.map(_unpool_or_empty, op, shape, x, indices, *rest)


def _first_outside(index: Tensor, size: int) -> Tensor:
    outside = index[(index < 0) | (index >= size)]
    return outside[0] if outside.numel() else index.new_full((), LAST)


def _unpool_or_empty(op: Any, shape: Sequence[int], x: Tensor, *args: Any) -> Tensor:
    return op(x, *args) if math.prod(shape) else connected_zeros(x, shape)


def _fractional_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return unless_empty(call, outs)


register("fractional_max_pool2d", "fractional_max_pool3d", rule=Rule(_fractional, _fractional_local))
register("max_unpool2d", "max_unpool3d", rule=Rule(_unpool, _unpool_local))
