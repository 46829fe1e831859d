"""Softmax and normalisation. Over a sharded dim they run as small distributed programs, without gathering."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.kit.windows import saved
from shardwise.rules.math.reductions import PROGRAM_COST, is_inexact, maximum, wide


def _softmax(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    if not is_inexact(call.inputs[0].dtype):
        torch.softmax(torch.zeros(1, dtype=call.inputs[0].dtype), 0)  # torch refuses
    names = dims_of(call.inputs[0].ndim)
    free = [None if d == dim else name for d, name in enumerate(names)]
    sharded = [Strategy((dim,), (dim,), 2 * PROGRAM_COST)] if call.inputs[0].ndim else []
    return [*Factors([free], [free]).strategies(), *sharded]


def _softmax_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    program, to_float = _PROGRAMS[call.name], call.bound.get("half_to_float") or call.bound.get("dtype")
    return Local(program, [call.inputs[0], dim, bool(to_float)], groups=(ins[0].splits[dim],))


def _sharded_softmax(group: Collectives, x: Tensor, dim: int, to_float: bool, *, log: bool = False) -> Tensor:
    with torch.no_grad():
        found = wide(x) - maximum(group, wide(x), (dim,))
        terms = found.exp() if log else found.exp_()
        total = group.reduce(terms.sum(dim, keepdim=True), "sum")
        found = found.sub_(total.log_()) if log else found.div_(total)
        found = found.to(torch.float32 if to_float else x.dtype)
    return group.softmax(x, found, dim, log=log)


def _sharded_safe_softmax(group: Collectives, x: Tensor, dim: int, to_float: bool) -> Tensor:
    """Zeros, not NaN, where all of a row is minus infinity."""
    top = maximum(group, x, (dim,))
    masked = top == -math.inf
    return torch.where(masked, 0, _sharded_softmax(group, torch.where(masked, 0, x), dim, to_float))


_PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "_softmax": _sharded_softmax,
    "_log_softmax": partial(_sharded_softmax, log=True),
    "_safe_softmax": _sharded_safe_softmax,
}

register(*_PROGRAMS, rule=Rule(_softmax, _softmax_local))


def stats_dtype(elsewhere: torch.dtype, x: Tensor, *params: Tensor | None) -> torch.dtype:
    """The dtype of statistics: on the CPU that of the input, or single precision where parameters have another."""
    if x.device.type != "cpu":
        return elsewhere
    return torch.float32 if any(p.dtype != x.dtype for p in params if p is not None) else x.dtype


# Layer norm


def _layer_norm(call: Call) -> list[Strategy]:
    """Leading dims are free. Normalised dims may be sharded too, together with weight and bias."""
    ndim, inner = call.inputs[0].ndim, len(call["normalized_shape"])
    lead = dims_of(ndim - inner)
    rest: list[Factor] = [None] * inner
    params = len(call.inputs) - 1
    stats = (*lead, *rest)
    found = Factors([stats, *[rest] * params], [stats, stats, stats]).strategies()
    for dim in range(inner):
        at = ndim - inner + dim
        found.append(Strategy((at, *([dim] * params)), (at, None, None), 2 * PROGRAM_COST))
    return found


def _layer_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    inner = len(call["normalized_shape"])
    axes = tuple(axis for cut in ins[0].splits[-inner:] for axis in cut)
    if not axes:
        return None
    dims, count = tuple(range(-inner, 0)), math.prod(call["normalized_shape"])
    args = [call["input"], call["weight"], call["bias"], call["eps"], dims, count, call.outputs[1].dtype]
    return Local(_sharded_layer_norm, args, groups=(axes,))


def _sharded_layer_norm(
    group: Collectives,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dims: tuple[int, ...],
    count: int,
    stats: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, stats = x.dtype, stats_dtype(stats, x, weight, bias)
    x = wide(x).contiguous()  # as torch's result is, whatever the strides of the input
    mean = group.psum(x.sum(dims, keepdim=True)) / count
    away = x - group.vary(mean)
    rstd = (group.psum((away * away).sum(dims, keepdim=True)) / count + eps).rsqrt()
    out = _affine(away * group.vary(rstd), weight, bias)
    return out.to(dtype), mean.detach().to(stats), rstd.detach().to(stats)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


register("native_layer_norm", rule=Rule(_layer_norm, _layer_norm_local))


def _rms_norm(call: Call) -> list[Strategy]:
    """The same for its root mean square. (Of complex numbers torch takes the mean of squares, not of magnitudes.)"""
    inner, ndim, params = len(call["normalized_shape"]), call.inputs[0].ndim, len(call.inputs) - 1
    found = [replicated(call), *(Strategy((dim, *([None] * params)), (dim,)) for dim in range(ndim - inner))]
    for dim in range(inner):
        at = ndim - inner + dim
        found.append(Strategy((at, *([dim] * params)), (at,), PROGRAM_COST))
    return found


def _rms_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    inner = len(call["normalized_shape"])
    axes = tuple(axis for cut in ins[0].splits[-inner:] for axis in cut)
    if not axes:
        return None
    args = [call["input"], call["weight"], call["eps"], tuple(range(-inner, 0)), math.prod(call["normalized_shape"])]
    return Local(_sharded_rms_norm, args, groups=(axes,))


def _sharded_rms_norm(
    group: Collectives, x: Tensor, weight: Tensor | None, eps: float | None, dims: tuple[int, ...], count: int
) -> Tensor:
    dtype, x = x.dtype, wide(x)
    squares = group.psum((x * x).sum(dims, keepdim=True))
    out = x * group.vary((squares / count + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt())
    return _affine(out, weight, None).to(dtype)


register("rms_norm", rule=Rule(_rms_norm, _rms_norm_local))


# Group norm: batch free; channels in whole groups. Otherwise the sums of each group are added up over the ranks


def _group_norm(call: Call) -> list[Strategy]:
    x = call.inputs[0]
    params = len(call.inputs) - 1
    channels = x.shape[1] // call["group"]

    def whole_groups(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if any(size % channels for size in sizes):
            return None
        groups = tuple(size // channels for size in sizes)
        return [sizes, groups, groups]

    found = [
        replicated(call),
        Strategy((0, *([None] * params)), (0, 0, 0)),
        Strategy((1, *([0] * params)), (1, 1, 1), resize=whole_groups),
    ]
    if not x.numel:
        return found[:1]
    found.append(Strategy((1, *([0] * params)), (1, None, None), 2 * PROGRAM_COST))
    spatial = range(2, x.ndim)
    return [*found, *(Strategy((dim, *([None] * params)), (dim, None, None), 2 * PROGRAM_COST) for dim in spatial)]


def _group_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not call.inputs[0].numel:
        return None
    shapes, shape = ins[0].held_shapes, call.inputs[0].shape
    channels = shape[1] // call["group"]
    split_groups = bool(ins[0].splits[1]) and not outs[1].splits[1]
    axes = tuple(axis for dim, cut in enumerate(ins[0].splits) if dim >= 2 - split_groups for axis in cut)
    if axes:
        starts = [0 if outs[1].splits[1] else ins[0].box(coordinate)[0][1] for coordinate in ins[0].mesh.held]
        args = [call["input"], call["weight"], call["bias"], call["eps"], channels, math.prod(shape[2:]) * channels]
        groups = HeldValues([out[1] for out in outs[1].held_shapes])
        return Local(_sharded_group_norm, [*args, groups, HeldValues(starts)], groups=(axes,))
    args, kwargs = call.replace(
        N=HeldValues([shape[0] for shape in shapes]),
        C=HeldValues([shape[1] for shape in shapes]),
        group=HeldValues([max(shape[1] // channels, 1) for shape in shapes]),
        HxW=math.prod(call.inputs[0].shape[2:]),
    )
    return Local(_group_norm_or_empty, args, kwargs)


def _sharded_group_norm(
    group: Collectives,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    channels: int,
    count: int,
    num_groups: Any,
    start: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, stats, x = x.dtype, stats_dtype(x.dtype, x, weight, bias), wide(x)
    mean = group.psum(group.map(_sum_by_group, x, channels, num_groups, start)) / count
    away = x - group.map(_by_channel, group.vary(mean), x, channels, start)
    squares = group.psum(group.map(_sum_by_group, away * away, channels, num_groups, start))
    rstd = (squares / count + eps).rsqrt()
    out = away * group.map(_by_channel, group.vary(rstd), x, channels, start)
    shape = [-1, *[1] * (x.dim() - 2)]
    # contiguous, as torch makes them: it saves a copy of what is not, and lets that be written to
    weight, bias = (None if param is None else param.contiguous().reshape(shape) for param in (weight, bias))
    return _affine(out, weight, bias).to(dtype), mean.to(stats), rstd.to(stats)


def _group_of(x: Tensor, channels: int, start: int) -> Tensor:
    """The number of the group of each channel at hand."""
    return torch.arange(start, start + x.shape[1], device=x.device) // channels


def _sum_by_group(x: Tensor, channels: int, num_groups: int, start: int) -> Tensor:
    """[batch, channels, ...] -> [batch, groups]"""
    sums = x.flatten(2).sum(2) if x.dim() > 2 else x
    return x.new_zeros(x.shape[0], num_groups).index_add(1, _group_of(x, channels, start), sums)


def _by_channel(stats: Tensor, x: Tensor, channels: int, start: int) -> Tensor:
    """[batch, groups] -> [batch, channels, 1...]"""
    return stats[:, _group_of(x, channels, start)].reshape(*x.shape[:2], *[1] * (x.dim() - 2))


def _group_norm_or_empty(x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float) -> Any:
    if x.numel():
        weight, bias = (
            None if param is None else param.contiguous() for param in (weight, bias)
        )  # as it must be given
        return torch.native_group_norm(x.contiguous(), weight, bias, n, c, hxw, group, eps)
    out = saved(x)
    for param in (weight, bias):  # nothing to normalise, but every rank takes part in backward
        out = out if param is None else out + param.sum() * param.new_zeros(())
    stats = x.sum(dim=tuple(range(1, x.ndim))).reshape(n, 1).expand(n, group if c else 0)
    stats = stats.to(stats_dtype(x.dtype, x, weight, bias))
    return out, stats, stats


register("native_group_norm", rule=Rule(_group_norm, _group_norm_local))


# Weight norm: the direction of each row (or column) and its length


def _weight_norm(call: Call) -> list[Strategy]:
    """The dim that is kept is free; over the others the length is added up."""
    ndim = call.inputs[0].ndim
    kept = call["dim"] % ndim
    away = [dim for dim in range(ndim) if dim != kept]
    found = [replicated(call), Strategy((kept, kept), (kept, kept))]
    return [*found, *(Strategy((dim, None), (dim, None), PROGRAM_COST) for dim in away)]


def _weight_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    ndim = call.inputs[0].ndim
    others = tuple(dim for dim in range(ndim) if dim != call["dim"] % ndim)
    axes = tuple(axis for dim in others for axis in ins[0].splits[dim])
    if not axes and all(map(math.prod, ins[0].held_shapes)):
        return None
    args = [call["v"], call["g"], others, call.outputs[1].dtype]
    return Local(_sharded_weight_norm, args, groups=(axes,))


def _sharded_weight_norm(
    group: Collectives, v: Tensor, g: Tensor, others: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    length = group.psum((wide(v) * wide(v)).sum(others, keepdim=True)).sqrt()
    return (v * (g / group.vary(length))).to(v.dtype), length.detach().to(dtype)


register("_weight_norm_interface", rule=Rule(_weight_norm, _weight_norm_local))
