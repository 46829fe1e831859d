"""Attention: batch and heads are free, and so are the queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, unless_empty
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, HeldValues, Local, Rule, Strategy


def _attention(call: Call) -> list[Strategy]:
    """Batch dims broadcast. One in which the sizes differ otherwise (the heads, where some share keys and values) must
    not be sharded."""
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    batch = call.outputs[0].shape[:-2]
    operands = (query, key, value)
    lead = [
        name if all(_size(x.shape[:-2], d - len(batch)) in (1, batch[d]) for x in operands) else None
        for d, name in enumerate(dims_of(len(batch)))
    ]
    columns: Factor = None if call["dropout_p"] else "v"  # all columns of the values are weighted alike
    tails: list[list[Factor]] = [["row", None], [None, None], [None, columns]]
    ins = [[*_of_operand(x.shape[:-2], lead, batch), *tail] for x, tail in zip(operands, tails, strict=True)]
    if mask is not None:
        ins.append(_of_operand(mask.shape, [*lead, "row", None], (*batch, query.shape[-2], key.shape[-2])))
    return [*Factors(ins, [[*lead, "row", columns]]).strategies(), *_grouped_heads(call)]


def _size(shape: tuple[int, ...], dim: int) -> int:
    """The size of a dim, counted from the end; one where there is none."""
    return shape[dim] if -dim <= len(shape) else 1


def _of_operand(shape: tuple[int, ...], full: Sequence[Factor], sizes: tuple[int, ...]) -> list[Factor]:
    """The factors of what broadcasts to dims of these sizes, which carry the factors `full`."""
    skip = len(full) - len(shape)
    return [None if size == 1 and sizes[skip + d] != 1 else full[skip + d] for d, size in enumerate(shape)]


def _grouped_heads(call: Call) -> list[Strategy]:
    """Several heads of queries share one of keys and values. Queries may be sharded alone, or all by groups."""
    query, key, value = call["query"], call["key"], call["value"]
    heads = query.ndim - 3
    if not call.bound.get("enable_gqa") or call["attn_mask"] is not None or heads < 0:
        return []
    if not key.shape[heads] == value.shape[heads] != query.shape[heads] or query.shape[heads] % key.shape[heads]:
        return []
    shared = query.shape[heads] // key.shape[heads]

    def whole_groups(sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        return [sizes] if len(set(sizes)) == 1 and sizes[0] % shared == 0 else None

    found = [Strategy((heads, heads, heads), (heads,), resize=whole_groups)]
    return [*found, Strategy((heads, None, None), (heads,))]


def _attention_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    query, key = call["query"], call["key"]
    rows, heads = query.ndim - 2, query.ndim - 3
    if not all(x.numel for x in (query, key, call["value"])):
        mask = call["attn_mask"] if _masks_of_nothing_count() else None
        return Local(_of_nothing, [HeldValues(outs[0].held_shapes), query, key, call["value"], mask])
    causal = bool(call["is_causal"]) and bool(ins[0].splits[rows])
    grouped = bool(call.bound.get("enable_gqa")) and heads >= 0 and query.shape[heads] != key.shape[heads]
    alone = grouped and bool(ins[0].splits[heads]) and not ins[1].splits[heads]
    local = None
    if causal or alone:
        first_rows = HeldValues([start[rows] for start in ins[0].held_starts]) if causal else None
        first_heads = HeldValues([start[heads] for start in ins[0].held_starts]) if alone else None
        shared = query.shape[heads] // key.shape[heads] if alone else 1
        local = Local(_local_attention, [first_rows, first_heads, shared, *call.bound.values()])
    local = unless_empty(call, outs, local)
    return local if local is None or not call["dropout_p"] else _rank_by_rank(local)


def _of_nothing(shape: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Where there is nothing to attend to, or nobody who attends."""
    return connected_zeros(query, shape, key, value, mask, saves=False)


@cache
def _masks_of_nothing_count() -> bool:
    """Whether torch makes a mask part of the graph though there is nothing to attend to: up to 2.12 it did."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
        nothing, mask = torch.zeros(0, 1, 1, 1, device="cpu"), torch.zeros(1, 1, device="cpu", requires_grad=True)
        return F.scaled_dot_product_attention(nothing, nothing, nothing, mask).requires_grad


def _rank_by_rank(local: Local) -> Local:
    """A call that draws random numbers, with arguments of its own on each rank. Such calls are made one rank at a time,
    each from its own stream: a program of a group without axes is run that way."""
    return Local(_without_group, [local.function, *local.args], local.kwargs, groups=((),))


def _without_group(group: Collectives, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _local_attention(first_row: int | None, first_head: int | None, shared: int, *args: Any) -> Tensor:
    """Some rows of queries, from `first_row` on, and some heads, of which `shared` share one of keys and values."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = args
    if first_head is not None:
        heads = torch.arange(first_head, first_head + query.shape[-3], device=query.device) // shared
        key, value, enable_gqa = key.index_select(-3, heads), value.index_select(-3, heads), False
    if first_row is not None:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask, is_causal = seen.tril(first_row), False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


register("scaled_dot_product_attention", rule=Rule(_attention, _attention_local))


# The kernel for CPUs, called by its name: it returns the logarithms of the sums as well


def _flash_for_cpu(call: Call) -> list[Strategy]:
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    lead: list[Factor] = [
        name if query.shape[d] == key.shape[d] == value.shape[d] else None for d, name in enumerate(("batch", "head"))
    ]
    rows: Factor = None if call["is_causal"] else "row"
    ins: list[list[Factor]] = [[*lead, rows, None], [*lead, None, None], [*lead, None, None]]
    if mask is not None:
        ins.append(_of_operand(mask.shape, [*lead, rows, None], (*query.shape[:-1], key.shape[-2])))
    return Factors(ins, [[*lead, rows, None], [*lead, rows]]).strategies()


def _flash_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if all(map(math.prod, outs[0].held_shapes)):
        return None
    args = [HeldValues(outs[0].held_shapes), call.op, *call.args]
    return _rank_by_rank(Local(_flash_or_empty, args, call.kwargs))


def _flash_or_empty(shape: tuple[int, ...], op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The logarithms have no gradient, on no rank."""
    if math.prod(shape):
        return op(*args, **kwargs)
    query, key, value = args[:3]
    out = connected_zeros(query, shape, key, value, unsaved=[kwargs.get("attn_mask")])
    return out, query.new_zeros(shape[:-1])


register("_scaled_dot_product_flash_attention_for_cpu", rule=Rule(_flash_for_cpu, _flash_local))
