"""Matrix products. A contracted dim that is sharded leaves a pending sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import Factor, Factors, einsum, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Local
from shardwise.rules.math.pointwise import broadcast, has_infinity

EITHER = [{0}, {1}]

register("mm", rule=einsum("ik,kj->ij", linear=EITHER))
register("bmm", rule=einsum("bik,bkj->bij", linear=EITHER))
register("mv", rule=einsum("ik,k->i", linear=EITHER))
register("dot", rule=einsum("k,k->", linear=EITHER))
register("vdot", rule=einsum("k,k->", linear=EITHER))


def _renamed(shape: tuple[int, ...], names: Sequence[Factor], out: tuple[int, ...]) -> tuple[Factor, ...]:
    """The factors of an operand that broadcasts to `out`, whose dims carry `names`."""
    return tuple(names[d] if isinstance(d, int) else None for d in broadcast(shape, out))


_PRODUCT = {
    "addmm": ("ik", "kj", "ij"),
    "addmv": ("ik", "k", "i"),
    "baddbmm": ("bik", "bkj", "bij"),
    "addr": ("i", "j", "ij"),
    "addbmm": ("bik", "bkj", "ij"),
}


def _sum_of_product(call: Call) -> Factors:
    """`self + a @ b`: self may be pending together with either factor of the product."""
    left, right, out = _PRODUCT[call.name.rstrip("_")]
    shape = call.outputs[0].shape
    addend = _renamed(call.inputs[0].shape, tuple(out), shape)
    if has_infinity(call):  # terms of a sum would be infinite, and their sum none
        uncontracted = [[factor if factor in out else None for factor in factors] for factors in (left, right)]
        return Factors([addend, *uncontracted], [tuple(out)])
    linear = [frozenset({0, 1}), frozenset({0, 2})]
    return Factors([addend, tuple(left), tuple(right)], [tuple(out)], linear=linear, addends=frozenset({0}))


def _sum_of_product_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Of an empty matrix, `addmv` returns the addend as it is, not as it broadcasts."""
    if not call.name.startswith("addmv") or ins[0].shape == outs[0].shape or all(map(math.prod, ins[1].held_shapes)):
        return None
    return Local(_expanded_first, [call.op, HeldValues(outs[0].held_shapes), *call.args], call.kwargs)


def _expanded_first(op: Any, shape: Sequence[int], addend: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return op(addend.expand(shape), *args, **kwargs)


register(*_PRODUCT, rule=factor_rule(_sum_of_product, _sum_of_product_local))


def _trilinear(call: Call) -> Factors:
    """The product of three tensors with dims added to each, summed over some dims: what `bilinear` is made of."""
    ndim = call.inputs[0].ndim + len(call["expand1"])
    ins: list[list[Factor]] = []
    for value, added in zip(call.inputs, ("expand1", "expand2", "expand3"), strict=True):
        there = [d for d in range(ndim) if d not in call[added]]
        ins.append([d if size != 1 else None for d, size in zip(there, value.shape, strict=True)])
    out = [d if any(d in dims for dims in ins) else None for d in range(ndim) if d not in call["sumdim"]]
    return Factors(ins, [out], linear=[frozenset({i}) for i in range(3)])


register("_trilinear", rule=factor_rule(_trilinear))


def _linear(call: Call) -> Factors:
    """`x[..., k] @ w[j, k].T + b[j]`."""
    batch = tuple(f"batch{d}" for d in range(call.inputs[0].ndim - 1))
    weight: tuple[Factor, ...] = ("j", "k") if call.inputs[1].ndim == 2 else ("k",)
    out = (*batch, *weight[:-1])
    ins: list[tuple[Factor, ...]] = [(*batch, "k"), weight]
    if len(call.inputs) == 3:
        ins.append(_renamed(call.inputs[2].shape, out, call.outputs[0].shape))
        return Factors(ins, [out], linear=[frozenset({0, 2}), frozenset({1, 2})], addends=frozenset({2}))
    return Factors(ins, [out], linear=[frozenset({0}), frozenset({1})])


def _linear_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """How torch adds up the gradient of a bias depends on whether the input is contiguous, as a thin shard may be on
    some ranks only: replicas of it would differ."""
    has_bias = len(call.inputs) == 3
    if not has_bias or call.inputs[0].ndim < 3 or not ins[0].thinness:
        return None
    return Local(_of_contiguous, [call.op, *call.args], call.kwargs)


def _of_contiguous(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return op(x.contiguous(), *args, **kwargs)


register("linear", rule=factor_rule(_linear, _linear_local))


def _matmul(call: Call) -> Factors:
    """Batches of matrices with broadcasting; vectors lose their dim."""
    a, b = call.inputs
    left: tuple[Factor, ...] = ("i", "k") if a.ndim > 1 else ("k",)
    right: tuple[Factor, ...] = ("k", "j") if b.ndim > 1 else ("k",)
    shape = call.outputs[0].shape
    matrix = (*(("i",) if a.ndim > 1 else ()), *(("j",) if b.ndim > 1 else ()))
    batch = shape[: len(shape) - len(matrix)]
    ins = [(*broadcast(value.shape[: value.ndim - len(tail)], batch), *tail) for value, tail in ((a, left), (b, right))]
    out = (*range(len(batch)), *matrix)
    return Factors(ins, [out], linear=[frozenset({0}), frozenset({1})])


register("matmul", rule=factor_rule(_matmul))
