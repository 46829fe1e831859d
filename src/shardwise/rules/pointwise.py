"""Element-wise ops, found by torch's own tag: one factor per broadcast dim. Here too: copies, fills and `*_like`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.layout import Layout, Partial
from shardwise.rules.notation import Factor, Factors
from shardwise.rules.registry import register, register_pointwise
from shardwise.rules.types import PENDING, Call, HeldValues, Local, Rule, Strategy, replicated

JOINTLY = [frozenset({0, 1})]
EACH = [frozenset({0}), frozenset({1})]
FIRST = [frozenset({0})]

LINEAR_IN: dict[str, list[frozenset[int]]] = {
    "add": JOINTLY,
    "sub": JOINTLY,
    "rsub": JOINTLY,
    "mul": EACH,
    "div": FIRST,
    "neg": FIRST,
    "positive": FIRST,
    "clone": FIRST,
    "where": [frozenset({1, 2})],
    "real": FIRST,
    "imag": FIRST,
    "conj_physical": FIRST,
    "deg2rad": FIRST,
    "rad2deg": FIRST,
}
"""Inputs in which an op is linear, so that a pending sum passes through. A scalar added to a pending sum would be added
once per rank: ops whose second operand is a scalar are linear only in products."""


def broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[Factor, ...]:
    """The factors of an operand that broadcasts to `out`: dims counted from the right, stretched ones carry none."""
    lead = len(out) - len(shape)
    return tuple(None if size == 1 and out[lead + d] != 1 else lead + d for d, size in enumerate(shape))


def pointwise_factors(call: Call) -> Factors:
    shape = call.outputs[0].shape if call.outputs else call.inputs[0].shape
    ins = [broadcast(value.shape, shape) for value in call.inputs]
    outs = [tuple(range(len(shape)))] * len(call.outputs)
    return Factors(ins, outs, linear=linear_sets(call))


def linear_sets(call: Call) -> list[frozenset[int]]:
    base = call.name.rstrip("_")
    sets = LINEAR_IN.get(base, [])
    positions = len(call.inputs)
    if base in ("add", "sub", "rsub") and positions < 2:
        return []
    if base == "div" and call.bound.get("rounding_mode") is not None:
        return []
    return [together for together in sets if max(together) < positions]


def _strategies(call: Call) -> list[Strategy]:
    found = pointwise_factors(call).strategies()
    if call.name.rstrip("_") == "neg":
        found += [Strategy((Partial(a),), (Partial(b),)) for a, b in (("max", "min"), ("min", "max"))]
    return found


register_pointwise(Rule(_strategies))
register(  # element-wise, but without the tag
    *("rsub", "hardswish", "_prelu_kernel", "floor_divide", "complex", "polar", "masked_fill"),
    *("bernoulli", "uniform", "normal", "exponential", "random", "native_dropout", "cauchy", "log_normal", "geometric"),
    rule=Rule(_strategies),
)


# Copies that change nothing about the value: any pending reduction passes through.


def _identity(call: Call) -> list[Strategy]:
    dims = tuple(range(call.inputs[0].ndim))
    return [*Factors([dims], [dims]).strategies(), Strategy((PENDING,), (PENDING,))]


def _conversion(call: Call) -> list[Strategy]:
    """A change of dtype: sums survive it between floating types, and from integers to anything wider."""
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    exact = source == target
    linear = target.is_floating_point or target.is_complex or not (source.is_floating_point or source.is_complex)
    dims = tuple(range(call.inputs[0].ndim))
    found = Factors([dims], [dims], linear=FIRST if linear and target != torch.bool else []).strategies()
    return [*found, Strategy((PENDING,), (PENDING,))] if exact else found


register("detach", "alias", "clone", "contiguous", "lift_fresh", "positive", "conj", "_conj", rule=Rule(_identity))
register("_to_copy", rule=Rule(_conversion))


def _copy(call: Call) -> list[Strategy]:
    target, source = call.inputs
    dims = tuple(range(target.ndim))
    return Factors([dims, broadcast(source.shape, target.shape)], [dims], linear=JOINTLY).strategies()


register("copy", "copy_", rule=Rule(_copy))


def _fill(call: Call) -> list[Strategy]:
    """Every element becomes the same: right on every shard; on a pending value only zero is."""
    dims = tuple(range(call.inputs[0].ndim))
    zero = call.name.startswith("zero")
    rest: list[tuple[Factor, ...]] = [()] * (len(call.inputs) - 1)
    return Factors([dims, *rest], [dims], linear=FIRST if zero else []).strategies()


register("fill", "fill_", "zero", "zero_", rule=Rule(_fill))


# New tensors in the shape of another: its values are not read, so nothing about it needs to move.


def _like(call: Call) -> list[Strategy]:
    dims = tuple(range(call.inputs[0].ndim))
    return [*Factors([dims], [dims]).strategies(), Strategy((PENDING,), (None,))]


register(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"), rule=Rule(_like)
)


def _same_size(call: Call) -> bool:
    return call.outputs[0].shape == call.inputs[0].shape


def _new(call: Call) -> list[Strategy]:
    """A new tensor of the same size lies like the old one; of any other size, it is replicated."""
    (value,) = call.inputs
    keep = _same_size(call)
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


register("new_zeros", "new_ones", "new_empty", "new_full", rule=Rule(_new, _new_local))
