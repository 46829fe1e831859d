"""Reshapes. A sharded dim survives one if it is the outermost of the dims that are merged or split with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.layout import Layout, intervals
from shardwise.rules.kit.dim_rebuild import Sizes
from shardwise.rules.kit.notation import other_dims
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import ANY_PENDING, Call, HeldValues, Local, Resize, Rule, Strategy, replicated


def matching_dims(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Cut a reshape into the smallest groups of dims, input and output, with the same product.

    >>> matching_dims((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    groups = []
    left, right = deque(enumerate(source)), deque(enumerate(target))
    while left or right:
        ins, outs = ([dims.popleft()] if dims else [] for dims in (left, right))
        while (size_in := _size(ins)) != (size_out := _size(outs)):
            if not right or (size_in < size_out and left):
                ins.append(left.popleft())
            else:
                outs.append(right.popleft())
        groups.append(([dim for dim, _ in ins], [dim for dim, _ in outs]))
    return groups


def _size(dims: list[tuple[int, int]]) -> int:
    return math.prod(size for _, size in dims)


def _view(call: Call) -> list[Strategy]:
    """A sharded dim survives a reshape if it is the outermost of its group on both sides. Where the new dim cannot be
    cut where the old one is, the pieces are exchanged first."""
    if "dtype" in call.bound:
        return _reinterpretation(call)
    found = [replicated(call), ANY_PENDING]
    for group in _outermost(call):
        found.append(Strategy((group.dim_in,), (group.dim_out,), resize=_rescale(group.inner_in, group.inner_out)))
    return found


@dataclass(frozen=True, slots=True)
class _Reshaped:
    """A group of dims of a reshape that may be sharded: its dims, the outermost ones of more than one index, and how
    many elements each index of those has."""

    dims: tuple[int, ...]
    dim_in: int
    dim_out: int
    inner_in: int
    inner_out: int


def _outermost(call: Call) -> list[_Reshaped]:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    found: list[_Reshaped] = []
    if 0 in source:
        return found
    for ins, outs in matching_dims(source, target):
        wide_in = [d for d in ins if source[d] != 1]
        wide_out = [d for d in outs if target[d] != 1]
        if wide_in and wide_out:
            inner_in = math.prod(source[d] for d in wide_in[1:])
            inner_out = math.prod(target[d] for d in wide_out[1:])
            found.append(_Reshaped(tuple(ins), wide_in[0], wide_out[0], inner_in, inner_out))
        elif ins and outs and not wide_in and not wide_out:  # one index, which one rank has
            found.append(_Reshaped(tuple(ins), ins[0], outs[0], 1, 1))
    return found


def _reinterpretation(call: Call) -> list[Strategy]:
    """`x.view(dtype)`: the same bytes, so pending terms mean nothing. A last dim whose size changes is unsharded."""
    changed = call.inputs[0].shape != call.outputs[0].shape
    return other_dims(call, [call.inputs[0].ndim - 1] if changed else []).strategies()


def _rescale(inner_in: int, inner_out: int) -> Resize:
    def resize(sizes: Sizes) -> list[Sizes | None]:
        if any(size * inner_in % inner_out for size in sizes):
            return [None]
        return [tuple(size * inner_in // inner_out for size in sizes)]

    return resize


def _view_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """`reshape` is a view wherever the shard's strides allow one; they may differ from the global tensor's."""
    if "dtype" in call.bound:
        return None
    x, shapes = call.inputs[0], HeldValues(outs[0].held_shapes)
    steps, groups = [], []
    for group in reversed(_outermost(call)):  # from the right: the dims before stay where they are
        have = tuple(size * group.inner_in for size in ins[0].pieces(group.dim_in))
        give = tuple(size * group.inner_out for size in outs[0].pieces(group.dim_out))
        if have != give:
            steps.append((group.dims, have, give))
            groups.append(ins[0].splits[group.dim_in])
    if steps:
        return Local(_exchanged_view, [x, tuple(steps), shapes], groups=tuple(groups))
    if call.name == "view" and x.shape == call.outputs[0].shape:  # strides of thin shards too stay what they are
        return Local(Tensor.expand, [x, shapes], resized=True)
    return Local(Tensor.reshape, [x, shapes], resized=True)


def _exchanged_view(*arguments: Any) -> Tensor:
    """`(a group for each step, x: S, steps, shape) -> S`: groups of dims as one each, recut, then reshaped."""
    *groups, x, steps, shape = arguments
    for group, (dims, have, give) in zip(groups, steps, strict=True):
        x = group.window(x.flatten(dims[0], dims[-1]), dims[0], intervals(have), intervals(give))
    return groups[0].map(Tensor.reshape, x, shape)


VIEW = register("view", "_unsafe_view", "_reshape_alias", rule=Rule(_view, _view_local))
