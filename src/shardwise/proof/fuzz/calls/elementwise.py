"""Calls that work element by element."""

from __future__ import annotations

import torch

from shardwise.proof.fuzz.draw import FLOATS, Draw, Var, apart, off

SMOOTH = """
{x}.tanh() | {x}.sigmoid() | torch.sin({x}) | {x} * {c} | {c} - {x} | {x} + {c} | -{x} | {x} / {c}
{x}.square() | ({x} * {x} + 1).log() | ({x}.abs() + 0.5).sqrt() | torch.exp(-{x} * {x}) | {x} / (1 + {x} ** 2)
F.gelu({x}) | F.silu({x}) | F.softplus({x}) | torch.atan({x}) | {x}.clone() | {x}.detach() | {x}.erf()
torch.addcmul({x}, {x}, {x}, value={c}) | torch.rsqrt({x} * {x} + 0.3) | {x}.double() | torch.cos({x}) + {x}
"""
KINKED = "torch.relu({x}) | {x}.abs() | F.leaky_relu({x}, 0.2) | {x}.sign() * {x} | F.elu({x}) | {x}.clamp(min=0)"
BINARY = """
{x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y} * {y} + 0.5) | torch.atan2({x}, {y} * {y} + 0.5)
torch.add({x}, {y}, alpha={c}) | torch.lerp({x}, {y}, {c}) | torch.hypot({x} + 3, {y} + 3) | {y} - {x} * {c}
torch.addcdiv({x}, {y}, {y} * {y} + 1, value={c}) | torch.logaddexp({x}, {y})
"""
INTEGERS = """
{x} + 1 | {x} * 2 | {x} % 3 | {x} == {x} | {x}.double() * 0.5 | {x}.sum() | {x}.bool() | {x}.to(torch.float64)
"""
SORTING = "{x}.sort({d}) | {x}.topk(1, {d}) | {x}.argmax({d}) | {x}.argsort({d}) | {x}.max({d}) | {x}.median({d})"


def unary(d: Draw) -> str:
    return d.way(SMOOTH).format(x=d.tensor(0, 1, 2, 3, 4), c=d.number())


def kinked(d: Draw) -> str:
    return d.way(KINKED).format(x=off(d.tensor()))


def binary(d: Draw) -> str:
    x = d.tensor(0, 1, 2, 3)
    return d.way(BINARY).format(x=x, y=broadcastable(d, x), c=d.number())


def broadcastable(d: Draw, x: Var) -> Var:
    """A tensor that goes with another one: of its shape, or of fewer dims, or with ones among them."""
    shape = list(x.shape)
    if shape and d.likely(0.4):
        shape = shape[d.chance.randrange(len(shape)) :]
        shape = [1 if d.likely(0.25) else size for size in shape]
    return d.fit(shape, x.dtype)


def extrema(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    y = d.fit(x.shape, x.dtype)
    off(Var.of("", x.value - y.value))
    way = d.way("torch.maximum({x}, {y}) | torch.minimum({x}, {y}) | torch.where({x} > {y}, {x}, {y} * 2)")
    return way.format(x=x, y=y)


def where(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    mask = d.mask(x.shape)
    way = d.way("torch.where({m}, {x}, {y}) | torch.where({m}, {x}, 0.5) | {x}.masked_fill({m}, {c}) | {x} * {m}")
    return way.format(m=mask, x=x, y=broadcastable(d, x), c=d.number())


def compare(d: Draw) -> str:
    return d.way("{x} > 0 | {x} <= 0 | ({x} > 0).logical_not() | ({x} < 0).long()").format(x=off(d.tensor()))


def integers(d: Draw) -> str:
    x = d.some(lambda v: v.dtype not in FLOATS and not v.dtype.is_complex)
    x = x or d.leaf(d.shape(2), d.pick(torch.int64, torch.bool))
    return d.way(INTEGERS).format(x=x)


def clamped(d: Draw) -> str:
    x = off(d.tensor(), -0.9, 0.9)
    return d.way("{x}.clamp(-0.9, 0.9) | F.hardtanh({x}, -0.9, 0.9) | {x}.clamp_max(0.9)").format(x=x)


def sorting(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    dim = d.dim(x)
    apart(x, dim)
    return d.way(SORTING).format(x=x, d=dim)


CALLS = (*[unary] * 5, kinked, *[binary] * 5, extrema, where, compare, integers, clamped, sorting)
