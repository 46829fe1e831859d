"""Convolutions: by batch, by channels, by groups, and by spatial dims with a halo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout, chunk_sizes
from shardwise.rules.kit.empty import connected_zeros
from shardwise.rules.kit.notation import Factor, Factors, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Interval, Local, Resize, Rule, Strategy
from shardwise.rules.kit.windows import Fetch, Slide, around, by_rank, even_pieces, held, inside, per_dim, with_halo
from shardwise.rules.math.reductions import PROGRAM_COST


def _convolution(call: Call) -> list[Strategy]:
    _check_channels(call)
    x, out, groups = call["input"], call.outputs[0], call["groups"]
    spatial: list[Factor] = [None] * (x.ndim - 2)
    into: Factor = "in" if groups == 1 else None
    onto: Factor = (
        "out" if groups == 1 and x.shape[1] else None
    )  # of no channels torch makes none, whatever the filters
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
    """Channels in whole groups. The input may also be whole: each rank takes the channels that its filters read.

    Channels come in, go out and are biased in different numbers, so even cuts of them need not agree on the groups: the
    outputs decide, and what they need of the rest is fetched.
    """
    x, weight, groups = call["input"], call["weight"], call["groups"]
    channels_out = call.outputs[0].shape[1]
    if not x.shape[1] or not channels_out:
        return []

    def whole_groups(channels: int) -> Resize:
        each = channels // groups

        def resize(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
            is_whole = not any(size % each for size in sizes)
            shares = [size // each for size in sizes] if is_whole else chunk_sizes(groups, (len(sizes),))
            return [tuple(share * (channels_out // groups) for share in shares)]

        return resize

    filters = (0,) * (len(call.inputs) - 1)
    return [
        Strategy((None, *filters), (1,), resize=whole_groups(weight.shape[0])),
        Strategy((1, *filters), (1,), resize=whole_groups(x.shape[1])),
    ]


def _convolution_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    shards = [shape for layout in (*ins, *outs) for shape in layout.held_shapes]
    groups = _groups_of(call, outs[0]) if call["groups"] > 1 and ins[1].splits[0] else None
    if not any(ins[0].splits[2:]) and groups is None and all(map(math.prod, shards)):
        return None
    fetches, pads, num_dims = [], [], call.inputs[0].ndim - 2
    transposed = call["transposed"]
    padding, output_padding = per_dim(call["padding"], num_dims), per_dim(call["output_padding"], num_dims)
    for d in range(num_dims):
        fetch, pad = (_transposed_reads if transposed else _reads)(call, ins[0], outs[0], d)
        fetches.append(fetch)
        pads.append(held(outs[0], d + 2, pad))
        if ins[0].splits[d + 2]:
            padding[d] = output_padding[d] = 0
    args = [
        *(call["input"], call["weight"], call["bias"]),
        *(by_rank(pads), HeldValues(outs[0].held_shapes), _channels(call, ins, outs[0], groups)),
        *(call["stride"], padding, call["dilation"], output_padding),
    ]
    local = with_halo(_local_transposed if transposed else _local_convolution, fetches, ins[0], args)
    return local if groups is None else _with_whole_groups(local, groups, call["groups"], ins)


def _slide(call: Call, d: int, *, padding: int) -> Slide:
    num_dims = call.inputs[0].ndim - 2
    stride, dilation = (per_dim(call[name], num_dims)[d] for name in ("stride", "dilation"))
    return Slide(stride, padding, dilation * (call["weight"].shape[2 + d] - 1) + 1)


def _reads(call: Call, x: Layout, out: Layout, d: int) -> tuple[Fetch, list[tuple[int, int]]]:
    """The inputs that each piece of the outputs reads, and the zeros before and after them."""
    dim, have = d + 2, x.intervals(d + 2)
    if not x.splits[dim]:
        return Fetch(dim, have, have), [(0, 0)]
    slide = _slide(call, d, padding=per_dim(call["padding"], call.inputs[0].ndim - 2)[d])
    reads = [slide.reads(piece) for piece in out.intervals(dim)]
    size = x.shape[dim]
    return Fetch(dim, have, tuple(inside(read, size) for read in reads)), [around(read, size) for read in reads]


def _transposed_reads(call: Call, x: Layout, out: Layout, d: int) -> tuple[Fetch, list[tuple[int, int]]]:
    """The inputs that write to each piece of the outputs, and what to add (or, if negative, to cut) before and after
    what they write to make it that piece."""
    dim, have = d + 2, x.intervals(d + 2)
    if not x.splits[dim]:
        return Fetch(dim, have, have), [(0, 0)]
    slide = _slide(call, d, padding=per_dim(call["padding"], call.inputs[0].ndim - 2)[d])
    want: list[Interval] = []
    pads: list[tuple[int, int]] = []
    for start, stop in out.intervals(dim):
        first = -(-(start + slide.padding - slide.span + 1) // slide.stride)
        last = (stop - 1 + slide.padding) // slide.stride
        sources = inside((first, last + 1), x.shape[dim]) if stop > start else (0, 0)
        want.append(sources)
        written = slide.reads(sources)
        pads.append((written[0] - start, stop - written[1]) if sources[1] > sources[0] else (0, 0))
    return Fetch(dim, have, tuple(want)), pads


def _groups_of(call: Call, out: Layout) -> list[Interval]:
    """The groups that each piece of the output's channels is made of."""
    each = out.shape[1] // call["groups"]
    return [(start // each, stop // each) for start, stop in out.intervals(1)]


def _channels(call: Call, ins: Sequence[Layout], out: Layout, groups: Sequence[Interval] | None) -> Any:
    """For each held rank: its number of groups, and which of the input's channels at hand they read."""
    if groups is None:
        return (call["groups"], 0, None)
    each = call["input"].shape[1] // call["groups"]
    return HeldValues(
        [
            (last - first, 0 if ins[0].splits[1] else first * each, (last - first) * each)
            for first, last in held(out, 1, groups)
        ]
    )


def _with_whole_groups(local: Local, groups: Sequence[Interval], num_groups: int, ins: Sequence[Layout]) -> Local:
    """Run a local function after every rank has fetched what its groups need and others hold."""
    fetches = {}
    for position, (layout, dim) in enumerate(zip(ins, (1, 0, 0), strict=False)):
        each, have = layout.shape[dim] // num_groups, layout.intervals(dim)
        want = tuple((first * each, last * each) for first, last in groups)
        if layout.splits[dim] and any(_differ(*pair) for pair in zip(have, want, strict=True)):
            fetches[position] = Fetch(dim, have, want)
    if not fetches:
        return local
    program = _WithWholeGroups(local.function, len(local.groups), fetches)
    return Local(program, local.args, groups=(*local.groups, ins[1].splits[0]))


def _differ(have: Interval, want: Interval) -> bool:
    """Whether two intervals hold different places. It does not matter where nothing lies."""
    return have != want and (have[0] < have[1] or want[0] < want[1])


class _WithWholeGroups:
    __slots__ = ("fetches", "function", "num_groups")

    def __init__(self, function: Callable[..., Any], num_groups: int, fetches: dict[int, Fetch]) -> None:
        self.function, self.num_groups, self.fetches = function, num_groups, fetches

    def __call__(self, *args: Any) -> Any:
        others, group, rest = args[: self.num_groups], args[self.num_groups], list(args[self.num_groups + 1 :])
        for position, fetch in self.fetches.items():
            rest[position] = group.window(rest[position], fetch.dim, fetch.have, fetch.want)
        return self.function(*others, *rest) if others else group.map(self.function, *rest)


def _taken(x: Tensor, channels: tuple[int, int, int | None]) -> Tensor:
    _, start, length = channels
    return x if length is None or length == x.shape[1] else x.narrow(1, start, length)


def _local_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pads: Any, shape: Any, channels: Any, *settings: Any
) -> Tensor:
    if not math.prod(shape):  # torch's result of no channels has none either, whatever the bias
        return connected_zeros(x, shape, weight, unsaved=[bias])
    if not weight.numel():
        return _biased(connected_zeros(x, shape, weight), bias)
    x = F.pad(_taken(x, channels), _flat(pads)) if any(map(any, pads)) else _taken(x, channels)
    stride, padding, dilation, output_padding = settings
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, output_padding, channels[0])


def _local_transposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, pads: Any, shape: Any, channels: Any, *settings: Any
) -> Tensor:
    """The bias is added last: it also belongs where no input writes."""
    if not math.prod(shape) or not weight.numel() or not all(x.shape[2:]):
        return _biased(connected_zeros(x, shape, weight), bias)
    stride, padding, dilation, output_padding = settings
    taken = _taken(x, channels)
    out = torch.convolution(taken, weight, None, stride, padding, dilation, True, output_padding, channels[0])
    return _biased(F.pad(out, _flat(pads)) if any(map(any, pads)) else out, bias)


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Padding as `F.pad` takes it: the last dim first."""
    return [side for pad in reversed(pads) for side in pad]


def _biased(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))


register("convolution", rule=Rule(_convolution, _convolution_local))


# Time, batch, channels: the time must be whole


def _conv_tbc(call: Call) -> Factors:
    return Factors(
        [[None, "batch", "in"], [None, "in", "out"], ["out"]],
        [[None, "batch", "out"]],
        linear=[frozenset({0, 2}), frozenset({1, 2})],
        addends=frozenset({2}),
    )


register("conv_tbc", rule=factor_rule(_conv_tbc))
