"""Softmax and normalisation. Over a sharded dim they run as small distributed programs, without gathering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.notation import Factor, Factors, dims_of
from shardwise.rules.reductions import PROGRAM_COST, maximum, wide
from shardwise.rules.registry import register
from shardwise.rules.types import Call, Collectives, HeldValues, Local, Rule, Strategy, replicated


def _softmax(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    names = dims_of(call.inputs[0].ndim)
    free = [None if d == dim else name for d, name in enumerate(names)]
    sharded = [Strategy((dim,), (dim,), 2 * PROGRAM_COST)] if call.inputs[0].ndim else []
    return [*Factors([free], [free]).strategies(), *sharded]


def _softmax_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    program = _sharded_log_softmax if call.name == "_log_softmax" else _sharded_softmax
    return Local(program, [call.inputs[0], dim, call["half_to_float"]], groups=(ins[0].splits[dim],))


def _sharded_softmax(group: Collectives, x: Tensor, dim: int, to_float: bool) -> Tensor:
    dtype, x = torch.float32 if to_float else x.dtype, wide(x)
    terms = (x - maximum(group, x, (dim,))).exp()
    total = group.psum(terms.sum(dim, keepdim=True))
    return (terms / group.vary(total)).to(dtype)


def _sharded_log_softmax(group: Collectives, x: Tensor, dim: int, to_float: bool) -> Tensor:
    dtype, x = torch.float32 if to_float else x.dtype, wide(x)
    x = x - maximum(group, x, (dim,))
    total = group.psum(x.exp().sum(dim, keepdim=True))
    return (x - group.vary(total.log())).to(dtype)


register("_softmax", "_log_softmax", rule=Rule(_softmax, _softmax_local))


# `_safe_softmax` gives zeros, not NaN, for rows that are masked everywhere


def _safe_softmax(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    free = [None if d == dim else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return Factors([free], [free]).strategies()


register("_safe_softmax", rule=Rule(_safe_softmax))


# Layer norm


def _layer_norm(call: Call) -> list[Strategy]:
    """Leading dims are free. A single normalised dim may be sharded too, together with weight and bias."""
    ndim, inner = call.inputs[0].ndim, len(call["normalized_shape"])
    lead = dims_of(ndim - inner)
    rest: list[Factor] = [None] * inner
    params = [rest] * (len(call.inputs) - 1)
    stats = (*lead, *rest)
    found = Factors([stats, *params], [stats, stats, stats]).strategies()
    if inner == 1:
        found.append(Strategy((ndim - 1, *([0] * len(params))), (ndim - 1, None, None), 2 * PROGRAM_COST))
    return found


def _layer_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not ins[0].splits[-1]:
        return None
    args = [call["input"], call["weight"], call["bias"], call["eps"], call.inputs[0].shape[-1]]
    return Local(_sharded_layer_norm, args, groups=(ins[0].splits[-1],))


def _sharded_layer_norm(
    group: Collectives, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, x = x.dtype, wide(x)
    mean = group.psum(x.sum(-1, keepdim=True)) / count
    away = x - group.vary(mean)
    rstd = (group.psum((away * away).sum(-1, keepdim=True)) / count + eps).rsqrt()
    out = away * group.vary(rstd)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype), mean, rstd


register("native_layer_norm", rule=Rule(_layer_norm, _layer_norm_local))


# Group norm: batch free; channels in whole groups


def _group_norm(call: Call) -> list[Strategy]:
    x = call.inputs[0]
    params = len(call.inputs) - 1
    channels = x.shape[1] // call["group"]

    def whole_groups(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if any(size % channels for size in sizes):
            return None
        groups = tuple(size // channels for size in sizes)
        return [sizes, groups, groups]

    return [
        replicated(call),
        Strategy((0, *([None] * params)), (0, 0, 0)),
        Strategy((1, *([0] * params)), (1, 1, 1), resize=whole_groups),
    ]


def _group_norm_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    shapes = ins[0].held_shapes
    channels = call.inputs[0].shape[1] // call["group"]
    args, kwargs = call.replace(
        N=HeldValues([shape[0] for shape in shapes]),
        C=HeldValues([shape[1] for shape in shapes]),
        group=HeldValues([max(shape[1] // channels, 1) for shape in shapes]),
        HxW=math.prod(call.inputs[0].shape[2:]),
    )
    return Local(_group_norm_or_empty, args, kwargs)


def _group_norm_or_empty(x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float) -> Any:
    if x.numel():
        return torch.native_group_norm(x.contiguous(), weight, bias, n, c, hxw, group, eps)
    out = x * 1
    for param in (weight, bias):  # nothing to normalise, but every rank takes part in backward
        out = out if param is None else out + param.sum() * 0
    stats = x.sum(dim=tuple(range(1, x.ndim))).reshape(n, 1).expand(n, group if c else 0)
    return out, stats, stats


register("native_group_norm", rule=Rule(_group_norm, _group_norm_local))


# Attention: batch and heads are free; so are queries, unless the mask is causal


def _attention(call: Call) -> list[Strategy]:
    query, key, value = call["query"], call["key"], call["value"]
    mask = call["attn_mask"]
    batch = query.ndim - 2
    if not query.ndim == key.ndim == value.ndim or (mask is not None and mask.ndim > query.ndim):
        return [replicated(call)]
    lead: list[Factor] = [
        name if query.shape[d] == key.shape[d] == value.shape[d] else None for d, name in enumerate(dims_of(batch))
    ]
    rows: Factor = None if call["is_causal"] else "row"
    ins: list[list[Factor]] = [[*lead, rows, None], [*lead, None, None], [*lead, None, "v"]]
    if mask is not None:
        full = [*lead, rows, None]
        shape = (*query.shape[:-1], key.shape[-2])
        skip = len(full) - mask.ndim
        ins.append(
            [None if size == 1 and shape[skip + d] != 1 else full[skip + d] for d, size in enumerate(mask.shape)]
        )
    return Factors(ins, [[*lead, rows, "v"]]).strategies()


def _attention_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if all(map(math.prod, outs[0].held_shapes)):
        return None
    return Local(_attention_or_empty, [HeldValues(outs[0].held_shapes), *call.args], call.kwargs)


def _attention_or_empty(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
    """Where there is nothing to attend, some releases of torch crash and others leave the mask out of the graph, in
    which every rank must take part."""
    if math.prod(shape):
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    connected = [x.sum() * 0 for x in inputs if x.is_floating_point()]
    return inputs[0].new_zeros(shape) + sum(connected)


register("scaled_dot_product_attention", rule=Rule(_attention, _attention_local))
