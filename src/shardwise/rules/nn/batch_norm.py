"""Batch norm. With a sharded batch (or spatial dim) the statistics are those of the global batch, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import AxisPlacement, Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.math.reductions import PROGRAM_COST, wide
from shardwise.rules.nn.norms import stats_dtype

ALWAYS_TRAINING = ("_batch_norm_with_update",)
PARAMETERS = ("weight", "bias")
RUNNING = ("running_mean", "running_var")


def _trains(call: Call) -> bool:
    return call.name in ALWAYS_TRAINING or bool(call.bound.get("training"))


def _ways(call: Call, x: AxisPlacement, params: AxisPlacement, running: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """Placements of the inputs that are there."""
    by_name = {"input": x, **dict.fromkeys(PARAMETERS, params), **dict.fromkeys(RUNNING, running)}
    return tuple(placement for name, placement in by_name.items() if call.bound.get(name) is not None)


def _outs(call: Call, x: AxisPlacement, stats: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """The result, two statistics (which may be empty, too), and whatever else an op returns (an empty tensor)."""
    stats = stats if call.outputs[1].numel else None
    return (x, stats, stats, *[None] * (len(call.outputs) - 3))


def _batch_norm(call: Call) -> list[Strategy]:
    x, training = call["input"], _trains(call)
    if not x.numel:
        return [replicated(call)]
    cost = 2 * PROGRAM_COST if training else 0.0
    found = [
        replicated(call),
        Strategy(_ways(call, 1, 0, 0), _outs(call, 1, 0)),
        *(Strategy(_ways(call, dim, None, None), _outs(call, dim, None), cost) for dim in range(x.ndim) if dim != 1),
    ]
    if training and call.bound.get("running_mean") is not None:
        # Replicated running statistics are written to, so they must not be sharded for the call: all are gathered.
        found.append(Strategy(_ways(call, 1, 0, None), _outs(call, 1, None), PROGRAM_COST))
    return found


@dataclass(frozen=True, slots=True)
class _Norm:
    """A batch norm in training: its options, and its global sizes."""

    momentum: float
    eps: float
    count: int  # elements of each channel
    channels: tuple[int, ...] | None  # how they are sharded, where statistics are gathered
    dtype: torch.dtype  # of the statistics
    num_extra: int  # further results, which are empty


def _batch_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, channels = ins[0], ins[0].splits[1]
    batch = tuple(axis for dim, cut in enumerate(x.splits) if dim != 1 for axis in cut)
    dtype = call.outputs[1].dtype
    if not _trains(call):
        sizes = HeldValues([shape[0] for shape in outs[1].held_shapes])
        return Local(_evaluate, [call.op, sizes, dtype, *call.args], call.kwargs)
    gathered = bool(channels) and not outs[1].splits[0]
    if not batch and not gathered and not x.has_empty:
        return None
    pieces, count = x.pieces(1) if gathered else None, math.prod(x.shape) // x.shape[1]
    norm = _Norm(call["momentum"], call["eps"], count, pieces, dtype, len(call.outputs) - 3)
    operands = [call.bound.get(name) for name in ("input", *PARAMETERS, *RUNNING)]
    return Local(_train, [norm, *operands], groups=(batch, channels if gathered else ()))


def _train(
    batch: Collectives, channels: Collectives, norm: _Norm, x: Tensor, *params: Tensor | None
) -> tuple[Tensor, ...]:
    """Normalise by the mean and variance of the global batch."""
    weight, bias, running_mean, running_var = params
    dims, shape = [d for d in range(x.dim()) if d != 1], [-1, *[1] * (x.dim() - 2)]
    wider = wide(x)
    mean = batch.psum(wider.sum(dims)) / norm.count
    centred = wider - batch.vary(mean).reshape(shape)
    var = batch.psum((centred * centred).sum(dims)) / norm.count
    invstd = (var + norm.eps).rsqrt()
    scale = batch.vary(invstd) if weight is None else batch.vary(invstd) * weight
    out = centred * scale.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    stats = [mean.detach(), var.detach(), invstd.detach()]
    if norm.channels is not None:
        stats = [channels.gather(stat, 0, norm.channels) for stat in stats]
    if running_mean is not None and running_var is not None:
        freedom = norm.count - 1
        _update(running_mean, stats[0], norm.momentum)
        _update(running_var, stats[1] * norm.count / freedom if freedom else stats[1] / 0.0, norm.momentum)
    dtype = stats_dtype(norm.dtype, x, *params)
    extra = [x.new_empty(0, dtype=torch.uint8) for _ in range(norm.num_extra)]
    return out.to(x.dtype), stats[0].to(dtype), stats[2].to(dtype), *extra


def _update(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(momentum * new + (1 - momentum) * running.detach())


def _evaluate(op: Any, num_channels: int, dtype: torch.dtype, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element, without statistics (of which not all ops return the same number). Where channels have one
    element for each row, as they may on a shard, the gradient in torch's kernel takes parameters for contiguous."""
    if x.numel():
        params = [param if param is None else param.contiguous() for param in args[:4]]
        out, _, _, *rest = op(x, *params, *args[4:], **kwargs)
    else:
        out, rest = connected_zeros(x, x.shape, args[0], unsaved=[args[1]]), [x.new_empty(0, dtype=torch.uint8)]
    stats = x.new_zeros(num_channels, dtype=stats_dtype(dtype, x, *args[:4]))
    return (out, stats, stats.clone(), *rest)[: len(op._schema.returns)]


register(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "_batch_norm_no_update"),
    rule=Rule(_batch_norm, _batch_norm_local),
)
