"""Element-wise ops, found by torch's own tag: one factor per broadcast dim. Here too: copies, fills and `*_like`."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.agreement import refuse
from shardwise.rules.kit.indices import axes_of
from shardwise.rules.kit.notation import Factor, Factors, broadcast, factor_rule, other_dims
from shardwise.rules.kit.registry import register, register_pointwise
from shardwise.rules.kit.types import (
    ANY_PENDING,
    PENDING,
    SUM,
    Call,
    Collectives,
    HeldValues,
    Local,
    Rule,
    Strategy,
    Value,
    is_inexact,
    replicated,
)
from shardwise.rules.math.reductions import for_these_values

JOINTLY = [frozenset({0, 1})]
EACH = [frozenset({0}), frozenset({1})]
FIRST = [frozenset({0})]

LINEAR_IN: dict[str, list[frozenset[int]]] = {
    **dict.fromkeys(("add", "sub", "rsub", "lerp"), JOINTLY),
    **dict.fromkeys(("div", "neg", "positive", "clone", "real", "imag", "conj_physical", "deg2rad", "rad2deg"), FIRST),
    "mul": EACH,
    "where": [frozenset({1, 2})],
    "addcmul": [frozenset({0, 1}), frozenset({0, 2})],
}
"""Inputs in which an op is linear, so that a pending sum passes through. A pending sum is not divided by a tensor, nor
by the number zero: where one device divides a number by zero and gets infinity, a term that is itself zero would make
it NaN. An infinite factor does the same to a product; numbers are looked at, tensors are taken to be finite."""


def pointwise_factors(call: Call) -> Factors:
    shape = call.outputs[0].shape if call.outputs else call.inputs[0].shape
    ins = [broadcast(value.shape, shape) for value in call.inputs]
    outs = [tuple(range(len(shape)))] * len(call.outputs)
    return Factors(ins, outs, linear=linear_sets(call))


def linear_sets(call: Call) -> list[frozenset[int]]:
    base = call.name.rstrip("_")
    sets = LINEAR_IN.get(base, [])
    positions = len(call.inputs)
    if (base in ADDING and positions < 2) or has_infinity(call):
        return []
    if base == "div" and (positions > 1 or not call["other"] or call.bound.get("rounding_mode") is not None):
        return []
    return [together for together in sets if max(together) < positions]


def has_infinity(call: Call) -> bool:
    """Whether a number among the arguments is infinite in the dtype that is computed in, or its inverse is. (Keys tell
    such numbers from finite ones.)"""
    numbers = [arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, (float, complex))]
    return any(not cmath.isfinite(number) or _overflows(abs(number), call) for number in numbers)


def _overflows(size: float, call: Call) -> bool:
    dtype = call.outputs[0].dtype if call.outputs else call.inputs[0].dtype
    if not is_inexact(dtype):
        return False
    limits = torch.finfo(dtype if dtype.to_real() == torch.float64 else torch.float32)
    return size > limits.max or (call.name.startswith("div") and size < limits.tiny)


ADDING = ("add", "sub", "rsub")
AVG, MAX, MIN = Partial("avg"), Partial("max"), Partial("min")


def _strategies(call: Call) -> list[Strategy]:
    if not call.inputs:  # `normal` of two numbers: it has the global size among its arguments
        return [replicated(call)]
    return [*pointwise_factors(call).strategies(), *_averages(call)]


def _averages(call: Call) -> list[Strategy]:
    """What is added to a pending average is averaged with it, so a replicated value, or a number, is added as it is. A
    number that is added to a pending sum counts once: see `_counted_once`."""
    if call.name.rstrip("_") not in ADDING or has_infinity(call):
        return []
    if len(call.inputs) == 1:
        return [Strategy((pending,), (pending,)) for pending in (SUM, AVG)]
    return [Strategy(ways_in, (AVG,)) for ways_in in ((AVG, None), (None, AVG))]


def _by_value(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """What a pending sum passes through depends on numbers and dtypes, so then these are part of the plan."""
    pending = {p for layout in ins for p in layout.pending if p is not None}
    if _divides_by_numbers(call) and any(any(layout.splits) for layout in ins):
        return _divided(call, ins)
    if SUM in pending and len(call.inputs) == 1 and call.name.rstrip("_") in ADDING:
        return _counted_once(call, ins[0], "other")
    divided = call.name.rstrip("_") == "div" and isinstance(call["other"], float)
    return for_these_values(call) if pending and (divided or call.name == "copy_") else None


def _divides_by_numbers(call: Call) -> bool:
    """Whether a call divides by a tensor in a way that has no answer for integers and zero."""
    base = call.name.rstrip("_")
    if base not in ("floor_divide", "remainder", "fmod") and (base != "div" or call.bound.get("rounding_mode") is None):
        return False
    return isinstance(call["other"], Value)


def _divided(call: Call, ins: Sequence[Layout]) -> Local:
    """For all dtypes, since a plan made for floats may serve integers too."""
    options = {"rounding_mode": call["rounding_mode"]} if "rounding_mode" in call.bound else {}
    op = partial(call.op.overloadpacket, **options)
    return Local(_divide, [op, call["self"], call["other"]], groups=(axes_of(ins),))


def _divide(group: Collectives, op: Any, x: Any, y: Tensor) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        refuse(group, _is_zero, y, "ZeroDivisionError")
    return group.map(op, x, y)


def _is_zero(x: Tensor) -> Tensor:
    return x == 0


def _counted_once(call: Call, layout: Layout, name: str) -> Local:
    """A number that is added to a pending sum: one rank adds it, the others add zero."""
    summed = [axis for axis, pending in enumerate(layout.pending) if pending == SUM]
    number = call[name]
    terms = [type(number)(0) if any(at[axis] for axis in summed) else number for at in layout.mesh.held]
    return for_these_values(call, **{name: HeldValues(terms)})


ELEMENTWISE = Rule(_strategies, _by_value)
register_pointwise(ELEMENTWISE)
register(  # element-wise, but without the tag, at least in the oldest torch that will do
    *("_conj_physical", "rsub", "leaky_relu", "hardswish", "_prelu_kernel", "floor_divide", "complex", "polar"),
    *("masked_fill", "log_sigmoid_forward"),
    *("elu_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
    *("leaky_relu_backward", "softplus_backward", "softshrink_backward", "rrelu_with_noise", "_prelu_kernel_backward"),
    *("bernoulli", "uniform", "normal", "exponential", "random", "native_dropout", "cauchy", "log_normal", "geometric"),
    rule=ELEMENTWISE,
)


# Element-wise in all dims but one


register("glu", rule=factor_rule(lambda call: other_dims(call, call.dims())))


# Copies that change nothing about the value: any pending reduction passes through.


def _identity(call: Call) -> list[Strategy]:
    return [*other_dims(call).strategies(), ANY_PENDING]


def _conversion(call: Call) -> list[Strategy]:
    """A change of dtype: sums survive it between floating types, and from integers to anything wider."""
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    dims = tuple(range(call.inputs[0].ndim))
    found = Factors([dims], [dims], linear=FIRST if _keeps_sums(source, target) else []).strategies()
    return [*found, ANY_PENDING] if source == target else found


def _keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    if target == torch.bool or (source.is_complex and not target.is_complex):
        return source == target
    return is_inexact(target) or not source.is_floating_point


register("detach", "alias", "clone", "lift_fresh", "_conj", rule=Rule(_identity))
register("_to_copy", rule=Rule(_conversion))


def _copy(call: Call) -> list[Strategy]:
    target, *sources = call.inputs
    dims = tuple(range(target.ndim))
    if not sources:  # a number
        return Factors([dims], [dims]).strategies()
    (source,) = sources
    linear = JOINTLY if _keeps_sums(source.dtype, target.dtype) else []
    return Factors([dims, broadcast(source.shape, target.shape)], [dims], linear=linear).strategies()


register("copy", "copy_", rule=Rule(_copy, _by_value))


def _fill(call: Call) -> list[Strategy]:
    """Every element becomes the same, on every shard, and in every pending term; but of a sum, in one term only."""
    dims = tuple(range(call.inputs[0].ndim))
    rest: list[tuple[Factor, ...]] = [()] * (len(call.inputs) - 1)
    found = Factors([dims, *rest], [dims]).strategies()
    if len(call.inputs) == 1:
        found += [Strategy((pending,), (pending,)) for pending in (SUM, AVG, MAX, MIN)]
    return found


def _fill_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if SUM not in ins[0].pending or len(call.inputs) > 1 or call.name.startswith("zero"):
        return None
    return _counted_once(call, ins[0], "value")


register("fill", "fill_", "zero", "zero_", rule=Rule(_fill, _fill_local))


# New tensors in the shape of another: its values are not read, so nothing about it needs to move.


def _like(call: Call) -> list[Strategy]:
    return [*other_dims(call).strategies(), Strategy((PENDING,), (None,))]


register(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"), rule=Rule(_like)
)


def _new(call: Call) -> list[Strategy]:
    """A new tensor of the same size is sharded like the old one; of any other size, or with strides, replicated."""
    (value,) = call.inputs
    keep = call.outputs[0].shape == value.shape and "stride" not in call.bound
    return [
        replicated(call),
        *(Strategy((dim,), (dim if keep else None,)) for dim in range(value.ndim)),
        Strategy((PENDING,), (None,)),
    ]


def _new_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if outs[0].replicated:
        return None
    args, kwargs = call.replace(size=HeldValues(outs[0].held_shapes))
    return Local(call.op, args, kwargs, resized=True)


register("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", rule=Rule(_new, _new_local))
