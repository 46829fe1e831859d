"""Normalisation. Over a sharded dim it runs as a small distributed program, without gathering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, skipping_empty
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.math.reductions import PROGRAM_COST, wide


def stats_dtype(planned: torch.dtype, x: Tensor, *params: Tensor | None) -> torch.dtype:
    """The dtype of statistics: on the CPU that of the input, or single precision where parameters have another."""
    if x.device.type != "cpu":
        return planned
    return torch.float32 if any(p.dtype != x.dtype for p in params if p is not None) else x.dtype


# Layer norm and RMS norm: leading dims are free; normalised dims may be sharded too, together with weight and bias


@dataclass(frozen=True, slots=True)
class _Inner:
    """The last dims, which are normalised: how many elements they have, and what is added to the variance."""

    dims: tuple[int, ...]
    count: int
    eps: Any  # None is the epsilon of the dtype
    stats: torch.dtype


def _inner_norm(call: Call) -> list[Strategy]:
    inner, ndim, params = len(call["normalized_shape"]), call.inputs[0].ndim, len(call.inputs) - 1
    num_stats = len(call.outputs) - 1
    lead, cost = ndim - inner, (2 if num_stats else 1) * PROGRAM_COST
    return [
        replicated(call),
        *(Strategy((dim, *[None] * params), (dim,) * (1 + num_stats)) for dim in range(lead)),
        *(Strategy((lead + d, *[d] * params), (lead + d, *[None] * num_stats), cost) for d in range(inner)),
    ]


def _inner_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    shape = call["normalized_shape"]
    axes = tuple(axis for cut in ins[0].splits[-len(shape) :] for axis in cut)
    if not axes:
        return None
    inner = _Inner(tuple(range(-len(shape), 0)), math.prod(shape), call["eps"], call.outputs[-1].dtype)
    if call.name == "rms_norm":
        return Local(_sharded_rms_norm, [inner, call["input"], call["weight"]], groups=(axes,))
    return Local(_sharded_layer_norm, [inner, call["input"], call["weight"], call["bias"]], groups=(axes,))


def _sharded_layer_norm(
    group: Collectives, inner: _Inner, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, stats = x.dtype, stats_dtype(inner.stats, x, weight, bias)
    x = wide(x).contiguous()  # as torch's result is, whatever the strides of the input
    mean = group.psum(x.sum(inner.dims, keepdim=True)) / inner.count
    centred = x - group.vary(mean)
    rstd = (group.psum((centred * centred).sum(inner.dims, keepdim=True)) / inner.count + inner.eps).rsqrt()
    out = _affine(centred * group.vary(rstd), weight, bias)
    return out.to(dtype), mean.detach().to(stats), rstd.detach().to(stats)


def _sharded_rms_norm(group: Collectives, inner: _Inner, x: Tensor, weight: Tensor | None) -> Tensor:
    """(Of complex numbers torch takes the mean of squares, not of magnitudes.)"""
    dtype, x = x.dtype, wide(x)
    squares = group.psum((x * x).sum(inner.dims, keepdim=True))
    eps = torch.finfo(x.dtype).eps if inner.eps is None else inner.eps
    return _affine(x * group.vary((squares / inner.count + eps).rsqrt()), weight, None).to(dtype)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


register("native_layer_norm", "rms_norm", rule=Rule(_inner_norm, _inner_norm_local))


# Group norm: the batch is free, and channels by groups. Otherwise the sums of each group are reduced


@dataclass(frozen=True, slots=True)
class _Groups:
    """A group norm: the channels and elements of each group, and what is added to the variance."""

    channels: int
    count: int
    eps: float


def _group_norm(call: Call) -> list[Strategy]:
    x = call.inputs[0]
    params = len(call.inputs) - 1
    channels = x.shape[1] // call["group"]

    def by_groups(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if any(size % channels for size in sizes):
            return None
        groups = tuple(size // channels for size in sizes)
        return [sizes, groups, groups]

    if not x.numel:
        return [replicated(call)]
    return [
        replicated(call),
        Strategy((0, *([None] * params)), (0, 0, 0)),
        Strategy((1, *([0] * params)), (1, 1, 1), resize=by_groups),
        Strategy((1, *([0] * params)), (1, None, None), 2 * PROGRAM_COST),
        *(Strategy((dim, *([None] * params)), (dim, None, None), 2 * PROGRAM_COST) for dim in range(2, x.ndim)),
    ]


def _group_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not call.inputs[0].numel:
        return None
    x, stats = ins[0], outs[1]
    channels, spatial = x.shape[1] // call["group"], math.prod(x.shape[2:])
    split_groups = bool(x.splits[1]) and not stats.splits[1]
    axes = tuple(axis for dim, cut in enumerate(x.splits) if dim >= 2 - split_groups for axis in cut)
    if axes:
        starts = [0 if stats.splits[1] else start[1] for start in x.held_starts]
        own = HeldValues([(shape[1], start) for shape, start in zip(stats.held_shapes, starts, strict=True)])
        groups = _Groups(channels, spatial * channels, call["eps"])
        return Local(_sharded_group_norm, [groups, own, *call.args[:3]], groups=(axes,))
    args, kwargs = call.replace(
        N=HeldValues([shape[0] for shape in x.held_shapes]),
        C=HeldValues([shape[1] for shape in x.held_shapes]),
        group=HeldValues([max(shape[1] // channels, 1) for shape in x.held_shapes]),
        HxW=spatial,
    )
    return Local(_local_group_norm, [HeldValues(stats.held_shapes), *args], kwargs)


def _local_group_norm(shape: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> Any:
    """The kernel takes contiguous tensors only, and no empty ones; torch sees to that before it calls it."""
    if x.numel():
        weight, bias = (None if param is None else param.contiguous() for param in (weight, bias))
        return torch.native_group_norm(x.contiguous(), weight, bias, *args)
    stats = connected_zeros(x, shape, dtype=stats_dtype(x.dtype, x, weight, bias), saves=False)
    return connected_zeros(x, x.shape, weight, unsaved=[bias]), stats, stats.clone()


def _sharded_group_norm(
    group: Collectives, groups: _Groups, own: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, stats, x = x.dtype, stats_dtype(x.dtype, x, weight, bias), wide(x)
    mean = group.psum(group.map(_sum_by_group, x, groups.channels, own)) / groups.count
    centred = x - group.map(_by_channel, group.vary(mean), x, groups.channels, own)
    squares = group.psum(group.map(_sum_by_group, centred * centred, groups.channels, own))
    rstd = (squares / groups.count + groups.eps).rsqrt()
    out = centred * group.map(_by_channel, group.vary(rstd), x, groups.channels, own)
    shape = [-1, *[1] * (x.dim() - 2)]
    # contiguous, as torch makes them: it saves a copy of what is not, and lets that be written to
    weight, bias = (None if param is None else param.contiguous().reshape(shape) for param in (weight, bias))
    return _affine(out, weight, bias).to(dtype), mean.to(stats), rstd.to(stats)


def _group_of(x: Tensor, channels: int, start: int) -> Tensor:
    """The number of the group of each channel held here."""
    return torch.arange(start, start + x.shape[1], device=x.device) // channels


def _sum_by_group(x: Tensor, channels: int, own: tuple[int, int]) -> Tensor:
    """[batch, channels, ...] -> [batch, groups]"""
    num_groups, start = own
    sums = x.flatten(2).sum(2) if x.dim() > 2 else x
    return x.new_zeros(x.shape[0], num_groups).index_add(1, _group_of(x, channels, start), sums)


def _by_channel(stats: Tensor, x: Tensor, channels: int, own: tuple[int, int]) -> Tensor:
    """[batch, groups] -> [batch, channels, 1...]"""
    return stats[:, _group_of(x, channels, own[1])].reshape(*x.shape[:2], *[1] * (x.dim() - 2))


register("native_group_norm", rule=Rule(_group_norm, _group_norm_local))


# Weight norm: the direction of each row (or column) and its length


def _weight_norm(call: Call) -> list[Strategy]:
    kept = call["dim"] % call.inputs[0].ndim
    return [replicated(call), Strategy((kept, kept), (kept, kept))]


register("_weight_norm_interface", rule=skipping_empty(Rule(_weight_norm)))
