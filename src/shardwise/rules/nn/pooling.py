"""Pooling: by batch and channels; averages and maxima also by spatial dims, with a halo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, skipping_empty, unless_empty
from shardwise.rules.kit.indices import Bound, checked_call
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Interval, Local, Rule, Strategy
from shardwise.rules.kit.windows import Fetch, Slide, around, by_rank, even_pieces, held, inside, per_dim, with_halo
from shardwise.rules.math.reductions import PROGRAM_COST, wide


def _num_dims(call: Call) -> int:
    """The number of spatial dims, the last ones. Torch's 1-d pooling is made of that in two."""
    return 3 if "3d" in call.name else 2


def _batch_and_channels(call: Call) -> list[Strategy]:
    num_dims = _num_dims(call)
    names: list[Factor] = [*dims_of(call.inputs[0].ndim - num_dims), *[None] * num_dims]
    linear = [frozenset({0})] if "avg_pool" in call.name and call.inputs[0].dtype.is_floating_point else []
    return Factors([names] * len(call.inputs), [names] * len(call.outputs), linear=linear).strategies()


# Windows of a fixed size. Dilated ones need all of a dim


@dataclass(frozen=True, slots=True)
class _Part:
    """Along one dim of a size: the outputs that a rank makes, and which inputs they read."""

    slide: Slide
    outputs: Interval
    size: int

    @property
    def reads(self) -> Interval:
        return self.slide.reads(self.outputs)

    @property
    def fetched(self) -> Interval:
        return inside(self.reads, self.size)


def _slides(call: Call) -> list[Slide]:
    num_dims = _num_dims(call)
    kernel = per_dim(call["kernel_size"], num_dims)
    stride = per_dim(call["stride"], num_dims) if call["stride"] else kernel
    padding = per_dim(call["padding"], num_dims)
    return [Slide(s, p, k) for k, s, p in zip(kernel, stride, padding, strict=True)]


def _pool(call: Call) -> list[Strategy]:
    num_dims, x, out = _num_dims(call), call.inputs[0], call.outputs[0]
    found = _batch_and_channels(call)
    if not x.dtype.is_floating_point or set(per_dim(call.bound.get("dilation", 1), num_dims)) != {1}:
        return found
    for dim in range(x.ndim - num_dims, x.ndim):
        resize = even_pieces(len(call.outputs), x.shape[dim], out.shape[dim])
        found.append(Strategy((dim,), (dim,) * len(call.outputs), PROGRAM_COST, resize))
    return found


def _pool_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, out, num_dims = ins[0], outs[0], _num_dims(call)
    lead = len(x.shape) - num_dims
    if not any(x.splits[lead:]):
        return None
    fetches, parts = [], []
    for dim, slide in enumerate(_slides(call), lead):
        pieces = [_Part(slide, piece, x.shape[dim]) for piece in out.intervals(dim)]
        fetches.append(Fetch.of(x, dim, [piece.fetched for piece in pieces]))
        parts.append(held(out, dim, pieces))
    args = [call["self"], HeldValues(out.held_shapes), by_rank(parts), call.op]
    if call.name.startswith("avg"):
        options = [call["count_include_pad"], call["divisor_override"]]
        return with_halo(_local_average, fetches, [*args, *options])
    return with_halo(_local_maximum, fetches, args)


def _padded(x: Tensor, parts: Sequence[_Part], value: float) -> Tensor:
    flat = [side for part in reversed(parts) for side in around(part.reads, part.size)]
    return F.pad(x, flat, value=value) if any(flat) else x


def _local_average(
    x: Tensor, shape: Sequence[int], parts: Sequence[_Part], op: Any, include_pad: bool, divisor: int | None
) -> Tensor:
    """Sums over windows, padded with zeros, divided by what torch divides by at these places of the global tensor."""
    if not math.prod(shape):
        return connected_zeros(x, shape)
    kernel, stride = [part.slide.span for part in parts], [part.slide.stride for part in parts]
    sums = op(_padded(wide(x), parts, 0.0), kernel, stride, 0, False, True, 1)
    counts = (_count(part, include_pad, x.device) for part in parts)
    divisors = divisor or reduce(lambda outer, inner: outer.unsqueeze(-1) * inner, counts)
    return (sums / divisors).to(x.dtype)


def _count(part: _Part, include_pad: bool, device: torch.device) -> Tensor:
    """How many places each window has along one dim."""
    slide, size = part.slide, part.size
    start = torch.arange(*part.outputs, device=device) * slide.stride - slide.padding
    stop = (start + slide.span).clamp(max=size + slide.padding)
    return stop - start if include_pad else stop.clamp(max=size) - start.clamp(min=0)


def _local_maximum(x: Tensor, shape: Sequence[int], parts: Sequence[_Part], op: Any) -> tuple[Tensor, Tensor]:
    """Torch says where the maxima are; the values, and with them the gradients, are taken from there.

    Where all of a window is minus infinity torch names its first element, which here may be one of the padding: then
    the first that is not is meant.
    """
    if not math.prod(shape):
        return connected_zeros(x, shape), x.new_zeros(shape, dtype=torch.int64)
    num_dims, padded = len(parts), _padded(x.detach(), parts, -math.inf)
    flat = op(padded, [part.slide.span for part in parts], [part.slide.stride for part in parts])[1]
    local, index = torch.zeros_like(flat), torch.zeros_like(flat)
    places = torch.unravel_index(flat, padded.shape[-num_dims:])
    for d, (part, place) in enumerate(zip(parts, places, strict=True)):
        at = (place + part.reads[0]).clamp(min=0)
        index = index * part.size + at
        local = local * x.shape[d - num_dims] + at - part.fetched[0]
    return x.flatten(-num_dims).gather(-1, local.flatten(-num_dims)).reshape(shape), index


register(
    *("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    rule=skipping_empty(Rule(_pool, _pool_local)),
)


register(  # windows that adapt to the size
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    rule=skipping_empty(Rule(_batch_and_channels)),
)


# The inverse of a maximum: torch refuses indices outside of the result


def _unpool_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[1].splits):
        return None
    bound = Bound(range(math.prod(call["output_size"])), True, own=True)
    local = unless_empty(call, outs, Local(call.op, call.args))
    assert local is not None
    return checked_call(bound, ins[1], local, local.args.index(call["indices"]))


register("max_unpool2d", "max_unpool3d", rule=Rule(_batch_and_channels, _unpool_local))
