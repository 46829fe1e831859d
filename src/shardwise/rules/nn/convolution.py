"""Convolutions: by batch, by channels, by groups, and by spatial dims with a halo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout, chunk_sizes
from shardwise.rules.kit.empty import connected_zeros
from shardwise.rules.kit.notation import Factor, Factors
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Interval, Local, Resize, Rule, Strategy
from shardwise.rules.kit.windows import Fetch, Slide, around, even_pieces, held, inside, per_dim, with_halo
from shardwise.rules.math.reductions import PROGRAM_COST


def _convolution(call: Call) -> list[Strategy]:
    _check_channels(call)
    x, out, groups = call["input"], call.outputs[0], call["groups"]
    spatial: list[Factor] = [None] * (x.ndim - 2)
    into: Factor = "in" if groups == 1 else None
    onto: Factor = "out" if groups == 1 and x.shape[1] else None  # of no channels torch makes none
    channels = [into, onto] if call["transposed"] else [onto, into]
    ins: list[list[Factor]] = [["batch", into, *spatial], [*channels, *spatial]]
    linear = [frozenset({0}), frozenset({1})]
    if call["bias"] is not None:
        ins.append([onto])
        linear = [frozenset({0, 2}), frozenset({1, 2})]
    found = Factors(ins, [["batch", onto, *spatial]], linear=linear, addends=frozenset({2})).strategies()
    rest = (None,) * (len(call.inputs) - 1)
    for dim in range(2, x.ndim):
        resize = even_pieces(1, x.shape[dim], out.shape[dim])
        found.append(Strategy((dim, *rest), (dim,), PROGRAM_COST, resize))
    return found if groups == 1 else [*found, *_by_groups(call)]


def _check_channels(call: Call) -> None:
    """Kernels for meta tensors do not look, and of channels that are sharded, some ranks would find that they fit."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    channels = [weight.shape[:1], tuple(size * call["groups"] for size in weight.shape[1:2])]
    reads, makes = channels if call["transposed"] else reversed(channels)
    if weight.ndim != x.ndim or x.shape[1:2] != reads or (bias is not None and bias.shape != makes):
        given = ", ".join(str(list(value.shape)) for value in call.inputs)
        raise RuntimeError(f"convolution: input, weight and bias do not fit together: {given}, groups={call['groups']}")


def _by_groups(call: Call) -> list[Strategy]:
    """Channels by groups. The input may also be replicated: each rank takes the channels that its filters read.

    Input, output and bias have different numbers of channels, so even cuts of them need not agree on the groups: the
    outputs decide, and what they need of the rest is fetched.
    """
    x, weight, groups = call["input"], call["weight"], call["groups"]
    channels_out = call.outputs[0].shape[1]
    if not x.shape[1] or not channels_out:
        return []

    def by_groups(channels: int) -> Resize:
        each = channels // groups

        def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
            is_aligned = not any(size % each for size in sizes)
            shares = [size // each for size in sizes] if is_aligned else chunk_sizes(groups, (len(sizes),))
            return [tuple(share * (channels_out // groups) for share in shares)]

        return resize

    filters = (0,) * (len(call.inputs) - 1)
    return [
        Strategy((None, *filters), (1,), resize=by_groups(weight.shape[0])),
        Strategy((1, *filters), (1,), resize=by_groups(x.shape[1])),
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank makes of the outputs: its shape, what to add (or, if negative, to cut) before and after each dim of
    its inputs (of its outputs, if transposed), and its number of groups with the channels that these read."""

    shape: tuple[int, ...]
    pads: Sequence[tuple[int, int]]
    channels: tuple[int, int, int | None]

    def padded(self, x: Tensor) -> Tensor:
        flat = [side for pad in reversed(self.pads) for side in pad]
        return F.pad(x, flat) if any(flat) else x

    def taken(self, x: Tensor) -> Tensor:
        _, start, length = self.channels
        return x if length is None or length == x.shape[1] else x.narrow(1, start, length)


def _convolution_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, out, num_dims = ins[0], outs[0], len(ins[0].shape) - 2
    by_groups = call["groups"] > 1 and bool(ins[1].splits[0])
    shards = [shape for layout in (*ins, *outs) for shape in layout.held_shapes]
    some_lack = any(layout.has_empty for layout in ins)
    if not any(x.splits[2:]) and not by_groups and not some_lack and all(map(math.prod, shards)):
        return None
    num_held = len(out.held_shapes)
    padding, output_padding = per_dim(call["padding"], num_dims), per_dim(call["output_padding"], num_dims)
    fetches = _fetched_groups(call, ins, out) if by_groups else []
    pads = [[(0, 0)] * num_held for _ in range(num_dims)]
    for d, dim in enumerate(range(2, 2 + num_dims)):
        if x.splits[dim]:
            reads = _transposed_reads if call["transposed"] else _reads
            want, around_them = reads(_slide(call, d), x.shape[dim], out.intervals(dim))
            fetches.append(Fetch.of(x, dim, want))
            pads[d] = held(out, dim, around_them)
            padding[d] = output_padding[d] = 0
    channels = _channels(call, x, out) if by_groups else [(call["groups"], 0, None)] * num_held
    own = [_Part(*part) for part in zip(out.held_shapes, zip(*pads, strict=True), channels, strict=True)]
    settings = [call["stride"], padding, call["dilation"], call["transposed"], output_padding, some_lack]
    args = [call["input"], call["weight"], call["bias"], HeldValues(own), settings]
    return with_halo(_local_convolution, fetches, args)


def _slide(call: Call, d: int) -> Slide:
    num_dims = call.inputs[0].ndim - 2
    stride, padding, dilation = (per_dim(call[name], num_dims)[d] for name in ("stride", "padding", "dilation"))
    return Slide(stride, padding, dilation * (call["weight"].shape[2 + d] - 1) + 1)


Reads = tuple[list[Interval], list[tuple[int, int]]]


def _reads(slide: Slide, size: int, pieces: Sequence[Interval]) -> Reads:
    """The inputs that each piece of the outputs reads, and the zeros before and after them."""
    reads = [slide.reads(piece) for piece in pieces]
    return [inside(read, size) for read in reads], [around(read, size) for read in reads]


def _transposed_reads(slide: Slide, size: int, pieces: Sequence[Interval]) -> Reads:
    """The inputs that write to each piece of the outputs, and what to add before and after what they write."""
    want, pads = [], []
    for start, stop in pieces:
        first = -(-(start + slide.padding - slide.span + 1) // slide.stride)
        last = (stop - 1 + slide.padding) // slide.stride
        sources = inside((first, last + 1), size) if stop > start else (0, 0)
        written = slide.reads(sources)
        want.append(sources)
        pads.append((written[0] - start, stop - written[1]) if sources[1] > sources[0] else (0, 0))
    return want, pads


def _groups_of(call: Call, out: Layout) -> list[Interval]:
    """The groups that each piece of the output's channels is made of."""
    each = out.shape[1] // call["groups"]
    return [(start // each, stop // each) for start, stop in out.intervals(1)]


def _channels(call: Call, x: Layout, out: Layout) -> list[tuple[int, int, int]]:
    """For each held rank: its number of groups, and where in its shard of the input their channels are."""
    each = x.shape[1] // call["groups"]
    own = held(out, 1, _groups_of(call, out))
    return [(last - first, 0 if x.splits[1] else first * each, (last - first) * each) for first, last in own]


def _fetched_groups(call: Call, ins: Sequence[Layout], out: Layout) -> list[Fetch]:
    """What the groups of each rank need of input, filters and bias."""
    fetches, groups = [], _groups_of(call, out)
    for argument, (layout, dim) in enumerate(zip(ins, (1, 0, 0), strict=False)):
        each = layout.shape[dim] // call["groups"]
        if layout.splits[dim]:
            want = [(first * each, last * each) for first, last in groups]
            fetches.append(Fetch.of(layout, dim, want, argument))
    return fetches


def _local_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, part: _Part, settings: Sequence[Any]) -> Tensor:
    """The bias comes last where it also belongs to what no input writes to, or some ranks lack input or filters: these
    only add it, and replicas of its gradient are added up alike."""
    stride, padding, dilation, transposed, output_padding, some_lack = settings
    if not math.prod(part.shape):
        return connected_zeros(x, part.shape, weight, unsaved=[bias])
    if not weight.numel() or not all(x.shape[2:]):
        return _biased(connected_zeros(x, part.shape, weight), bias)
    x, groups = part.taken(x), part.channels[0]
    if transposed:
        out = torch.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)
        return _biased(part.padded(out), bias)
    first, last = (None, bias) if some_lack else (bias, None)
    out = torch.convolution(part.padded(x), weight, first, stride, padding, dilation, False, output_padding, groups)
    return _biased(out, last)


def _biased(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))


register("convolution", rule=Rule(_convolution, _convolution_local))
