"""Joining tensors: along a dim, along a new one, or as blocks of a matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.kit.dim_rebuild import Sizes, grown, joined
from shardwise.rules.kit.notation import Factor, Factors, dims_but, dims_of, factor_rule, moved
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PROGRAM_COST, Call, Collectives, Interval, Local, Resize, Rule, Strategy
from shardwise.rules.kit.windows import inside

Intervals = tuple[Interval, ...]
MANY = 16
"""Tensors joined along a sharded dim take an exchange each; so many are not worth it."""


# Along a dim


def _cat_dim(call: Call) -> int:
    return (call["dim"] or 0) % call.outputs[0].ndim


def _lengths(call: Call) -> list[int]:
    """How much each tensor adds to the dim. Torch ignores tensors of shape (0,), whatever the others' shapes."""
    dim, ndim = _cat_dim(call), call.outputs[0].ndim
    return [value.shape[dim] if value.ndim == ndim else 0 for value in call.inputs]


def _cat(call: Call) -> list[Strategy]:
    """Other dims are free. Tensors that are equally long may also be sharded along the dim itself: that dim is then cut
    evenly, or, with a single such tensor, stays on its ranks and grows at its ends."""
    dim, ndim, lengths = _cat_dim(call), call.outputs[0].ndim, _lengths(call)
    names = dims_but(ndim, [dim])
    found = moved([names if value.ndim == ndim else [None] for value in call.inputs], [names]).strategies()
    total: Counter[int] = Counter()
    for length in lengths:
        total[length] += length
    for length, _ in total.most_common(2):
        alike = [i for i, other in enumerate(lengths) if other == length]
        if length and len(alike) <= MANY:
            ins = tuple(dim if i in alike else None for i in range(len(lengths)))
            found.append(Strategy(ins, (dim,), PROGRAM_COST * (len(alike) - 1), resize=_joint_sizes(lengths, alike)))
    return found


def _joint_sizes(lengths: Sequence[int], alike: Sequence[int]) -> Resize:
    def resize(sizes: Sizes) -> list[Sizes | None]:
        if len(alike) > 1:
            return [None]
        return [grown(sizes, sum(lengths[: alike[0]]), sum(lengths[alike[0] + 1 :]))]

    return resize


def _cat_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    dim, lengths = _cat_dim(call), _lengths(call)
    give = outs[0].intervals(dim)
    if len(give) == 1:
        return None
    plans: list[tuple[Intervals, Intervals] | None] = []
    for layout, start, length in zip(ins, offsets(lengths), lengths, strict=True):
        if len(layout.shape) != len(outs[0].shape):  # of shape (0,): adds nothing, but is part of the graph
            plans.append(None)
        else:
            have = layout.intervals(dim)
            want = tuple(inside(piece, length, start) for piece in give)
            plans.append((have * len(give) if len(have) == 1 else have, want))
    return Local(_cat_split, [list(call.inputs), dim, tuple(plans)], groups=(outs[0].splits[dim],))


def _cat_split(group: Collectives, tensors: Sequence[Tensor], dim: int, plans: Sequence[Any]) -> Tensor:
    """Each tensor's part of our piece: cut out of a replicated tensor, fetched from one that is sharded."""
    parts = zip(tensors, plans, strict=True)
    return joined([x if plan is None else group.window(x, dim, *plan) for x, plan in parts], dim)


register("cat", rule=Rule(_cat, _cat_local))


# Along a new dim


def _stack(call: Call) -> Factors:
    names = dims_of(call.inputs[0].ndim)
    out: list[Factor] = list(names)
    out.insert((call["dim"] or 0) % (len(names) + 1), None)
    return moved([names] * len(call.inputs), [out])


register("stack", rule=factor_rule(_stack))


# As blocks: what is between them is zero, in every term of a pending sum too


def _block_diag(call: Call) -> Factors:
    return moved([[None] * value.ndim for value in call.inputs], [[None, None]])


register("block_diag", rule=factor_rule(_block_diag))
