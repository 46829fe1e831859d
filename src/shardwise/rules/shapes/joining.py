"""Joining tensors: along a dim, along a new one, or as blocks of a matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.layout import Layout, offsets
from shardwise.rules.kit.dim_rebuild import Sizes, fetch, grown, intervals, joined
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PENDING, Call, Collectives, Interval, Local, Resize, Rule, Strategy
from shardwise.rules.math.reductions import PROGRAM_COST

MANY = 16
"""Tensors joined along a sharded dim take an exchange each; so many are not worth it."""


def _joined(call: Call, names: Sequence[Sequence[Factor]], out: Sequence[Factor]) -> list[Strategy]:
    """Whatever is pending on all tensors alike is pending on what they make together."""
    pending = Strategy((PENDING,) * len(call.inputs), (PENDING,))
    return [*Factors(names, [out]).strategies(), *([pending] if call.inputs else [])]


# Along a dim


def _cat_dim(call: Call) -> int:
    return (call["dim"] or 0) % call.outputs[0].ndim


def _lengths(call: Call) -> list[int]:
    """How much each tensor adds to the dim. Torch ignores tensors of shape (0,), whatever the others' shapes."""
    dim, ndim = _cat_dim(call), call.outputs[0].ndim
    return [value.shape[dim] if value.ndim == ndim else 0 for value in call.inputs]


def _cat(call: Call) -> list[Strategy]:
    """Other dims are free. Tensors that are equally long may also be sharded along the dim itself: that dim is then cut
    evenly, or, with a single such tensor, stays where it lies and grows at its ends."""
    dim, ndim, lengths = _cat_dim(call), call.outputs[0].ndim, _lengths(call)
    names = [None if d == dim else name for d, name in enumerate(dims_of(ndim))]
    found = _joined(call, [names if value.ndim == ndim else [None] for value in call.inputs], names)
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
    give = intervals(outs[0].pieces(dim))
    if len(give) == 1:
        return None
    plans = []
    for layout, start, length in zip(ins, offsets(lengths), lengths, strict=True):
        want = tuple(_within(piece, start, length) for piece in give)
        legacy = len(layout.shape) != len(outs[0].shape)
        plans.append((None if legacy else tuple(intervals(layout.pieces(dim))), want))
    args = [list(call.inputs), dim, tuple(plans)]
    return Local(_cat_split, args, groups=(outs[0].splits[dim],))


def _within(piece: Interval, start: int, length: int) -> Interval:
    """The part of a piece of the joined dim that comes from the tensor whose part begins at `start`."""
    first, last = max(piece[0] - start, 0), min(piece[1] - start, length)
    return (first, last) if first < last else (0, 0)


def _cat_split(group: Collectives, tensors: Sequence[Tensor], dim: int, plans: Sequence[Any]) -> Tensor:
    """Each tensor's part of our piece: cut out of a whole tensor, fetched from one that is sharded."""
    parts = []
    for x, (have, want) in zip(tensors, plans, strict=True):
        if have is None:  # of shape (0,): adds nothing, but is part of the graph
            parts.append(x)
        else:
            parts.append(fetch(group, x, dim, have * group.size if len(have) == 1 else have, want))
    return joined(parts, dim)


register("cat", rule=Rule(_cat, _cat_local))


# Along a new dim


def _stack(call: Call) -> list[Strategy]:
    names = dims_of(call.inputs[0].ndim)
    out: list[Factor] = list(names)
    out.insert((call["dim"] or 0) % (len(names) + 1), None)
    return _joined(call, [names] * len(call.inputs), out)


register("stack", rule=Rule(_stack))


# As blocks: what is between them is zero, in every term of a pending sum too


def _block_diag(call: Call) -> list[Strategy]:
    return _joined(call, [[None] * value.ndim for value in call.inputs], [None, None])


register("block_diag", rule=Rule(_block_diag))
