"""Batch norm. With a sharded batch (or spatial dim) the statistics are those of the whole batch, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import AxisPlacement, Call, Collectives, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.kit.windows import connected_zeros
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
        # Running statistics are written to, so they cannot be sharded on the way: they get those of all channels.
        found.append(Strategy(_ways(call, 1, 0, None), _outs(call, 1, None), PROGRAM_COST))
    return found


def _batch_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    x, channels = ins[0], ins[0].splits[1]
    batch = tuple(axis for dim, cut in enumerate(x.splits) if dim != 1 for axis in cut)
    operands = [call.bound.get(name) for name in ("input", *PARAMETERS, *RUNNING)]
    dtype, extra = call.outputs[1].dtype, len(call.outputs) - 3
    if not _trains(call):
        return Local(
            _evaluate,
            [call.op, HeldValues([shape[0] for shape in outs[1].held_shapes]), dtype, *call.args],
            call.kwargs,
        )
    apart = bool(channels) and not outs[1].splits[0]
    if not batch and not apart and all(map(math.prod, x.held_shapes)):
        return None
    count = math.prod(x.shape) // x.shape[1]
    sizes = x.pieces(1) if apart else None
    args = [*operands, call["momentum"], call["eps"], count, sizes, dtype, extra]
    return Local(_train, args, groups=(batch, channels if apart else ()))


def _train(
    batch: Collectives,
    channels: Collectives,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
    sizes: Sequence[int] | None,
    dtype: torch.dtype,
    extra: int,
) -> tuple[Tensor, ...]:
    """Normalise by the mean and variance of the whole batch; `sizes` are the channels' pieces where the statistics of
    all of them are wanted on every rank."""
    dims, shape = [d for d in range(x.dim()) if d != 1], [-1, *[1] * (x.dim() - 2)]
    wider = wide(x)
    mean = batch.psum(wider.sum(dims)) / count
    away = wider - batch.vary(mean).reshape(shape)
    var = batch.psum((away * away).sum(dims)) / count
    invstd = (var + eps).rsqrt()
    scale = batch.vary(invstd) if weight is None else batch.vary(invstd) * weight
    out = away * scale.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    dtype = stats_dtype(dtype, x, weight, bias, running_mean, running_var)
    stats = [mean.detach(), var.detach(), invstd.detach()]
    if sizes is not None:
        stats = [channels.gather(stat, 0, sizes) for stat in stats]
    if running_mean is not None and running_var is not None:
        _update(running_mean, stats[0], momentum)
        _update(running_var, stats[1] * count / (count - 1) if count > 1 else stats[1] / 0.0, momentum)
    rest = [x.new_empty(0, dtype=torch.uint8) for _ in range(extra)]
    return out.to(x.dtype), stats[0].to(dtype), stats[2].to(dtype), *rest


def _update(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(momentum * new + (1 - momentum) * running.detach())


def _evaluate(op: Any, num_channels: int, dtype: torch.dtype, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element, without statistics (of which not all ops return the same number)."""
    if x.numel():
        out, _, _, *rest = op(x, *args, **kwargs)
    else:
        out, rest = connected_zeros(x, x.shape, args[0], unsaved=[args[1]]), [x.new_empty(0, dtype=torch.uint8)]
    stats = x.new_zeros(num_channels, dtype=stats_dtype(dtype, x, *args[:4]))
    return (out, stats, stats.clone(), *rest)[: len(op._schema.returns)]


register(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "_batch_norm_no_update"),
    rule=Rule(_batch_norm, _batch_norm_local),
)
