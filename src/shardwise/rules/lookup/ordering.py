"""Sorting, and the largest elements. Other dims are free, so a sharded dim is usually sorted after an all-to-all that
shards another; where there is no other dim, ranks exchange sorted parts, and none ever holds more than two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import Layout, chunk_sizes, intervals, offsets
from shardwise.rules.kit.dim_rebuild import joined
from shardwise.rules.kit.indices import owned
from shardwise.rules.kit.notation import other_dims
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PROGRAM_COST, Call, Collectives, Local, Rule, Strategy, Value
from shardwise.rules.math.reductions import reduction_ways

Part = tuple[Tensor, Tensor]
"""Sorted values, and where they were in the unsorted dim."""

EXCHANGES = 30 * PROGRAM_COST
"""What exchanging sorted parts counts for where another dim could take the sharding: more than an all-to-all."""


def _sort(call: Call) -> list[Strategy]:
    value, (dim,) = call.inputs[0], call.dims()
    found = other_dims(call, [dim]).strategies()
    if value.ndim:
        found.append(Strategy((dim,), (dim, dim), _exchange_cost(value, dim)))
    return found


def _exchange_cost(value: Value, dim: int) -> float:
    alone = value.numel == value.shape[dim]  # no other dim that could take the sharding
    return 3 * PROGRAM_COST if alone else EXCHANGES + value.numel


def _sort_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    pieces = ins[0].pieces(dim)
    args = [call.inputs[0], dim, bool(call["descending"]), pieces, pieces]
    return Local(_sharded_sort, args, groups=(ins[0].splits[dim],))


def _sharded_sort(
    group: Collectives, x: Tensor, dim: int, descending: bool, pieces: Sequence[int], wanted: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A sorting network whose comparators merge two ranks' sorted parts and split them again. Of what it sorts, in
    `pieces`, it gives pieces of the `wanted` sizes, which may be the first elements only.

    It needs parts of one size. Cut as `torch.chunk` cuts, only the last ones are smaller; they are as if filled up with
    elements that come after all others, which never leave the end. Ties are decided by index: the sort is stable.
    """
    even = chunk_sizes(sum(pieces), (group.size,))
    x = _recut(group, x, dim, pieces, even)
    values, indices = group.map(_sorted_part, x, dim, descending, group.index(), offsets(even))
    have = intervals(even)
    for pairs in network(sum(size > 0 for size in even)):
        want = [have[pairs[i]] if i in pairs else (0, 0) for i in range(group.size)]
        theirs = group.window(values, dim, have, want), group.window(indices, dim, have, want)
        values, indices = group.map(_Merge(dim, descending, pairs), group.index(), (values, indices), theirs)
    return _recut(group, values, dim, even, wanted), _recut(group, indices, dim, even, wanted)


def network(size: int) -> list[dict[int, int]]:
    """Batcher's merge exchange for any number of inputs: rounds of disjoint pairs, each as a mapping both ways."""
    rounds = []
    top = 1 << max(size - 1, 0).bit_length() >> 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs = [(i, i + d) for i in range(size - d) if i & p == r]
            rounds.append({a: b for pair in pairs for a, b in (pair, pair[::-1])})
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return rounds


def _recut(group: Collectives, x: Tensor, dim: int, have: Sequence[int], want: Sequence[int]) -> Tensor:
    return x if list(have) == list(want) else group.window(x, dim, intervals(have), intervals(want))


def _sorted_part(x: Tensor, dim: int, descending: bool, index: int, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(dim=dim, descending=descending, stable=True)
    return values, indices + starts[index]


@dataclass(frozen=True, slots=True)
class _Merge:
    """A round of the network on one rank: in `pairs`, the lower rank keeps the first elements of both parts, as many as
    it had, and the other one the last."""

    dim: int
    descending: bool
    pairs: dict[int, int]

    def __call__(self, me: int, mine: Part, theirs: Part) -> Part:
        dim, size = self.dim, mine[0].shape[self.dim]
        both = joined([mine[0], theirs[0]], dim)
        if me not in self.pairs:  # nothing came, but the exchange is part of the graph on every rank
            return both, mine[1]
        places = torch.cat([mine[1], theirs[1]], dim)
        by_index = places.argsort(dim)
        ordered = both.detach().gather(dim, by_index)
        order = by_index.gather(dim, ordered.sort(dim=dim, descending=self.descending, stable=True).indices)
        order = order.narrow(dim, 0 if me < self.pairs[me] else order.shape[dim] - size, size)
        return both.gather(dim, order), places.gather(dim, order)


register("sort", rule=Rule(_sort, _sort_local))


# The k largest. If they are few: each rank's own candidates, and the largest among all ranks'; if many: the first k of
# all in order, which stay where the order puts them


def _topk(call: Call) -> list[Strategy]:
    value, (dim,) = call.inputs[0], call.dims()
    found = other_dims(call, [dim]).strategies()
    if value.ndim and 4 * call["k"] <= value.shape[dim]:
        found.append(Strategy((dim,), (None, None), 2 * PROGRAM_COST))
    elif value.ndim:
        found.append(Strategy((dim,), (dim, dim), _exchange_cost(value, dim), resize=lambda sizes: [None, None]))
    return found


def _topk_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    pieces, groups, k, largest = ins[0].pieces(dim), (ins[0].splits[dim],), call["k"], bool(call["largest"])
    if outs[0].splits[dim]:
        return Local(_sharded_sort, [call.inputs[0], dim, largest, pieces, outs[0].pieces(dim)], groups=groups)
    args = [call.inputs[0], dim, k, largest, bool(call["sorted"]), pieces]
    return Local(_sharded_topk, args, groups=groups)


def _sharded_topk(
    group: Collectives, x: Tensor, dim: int, k: int, largest: bool, ordered: bool, pieces: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    counts = _counts(pieces, k)
    if counts is not None:
        values, indices = group.map(_candidates, x.detach(), dim, k, largest, group.offset(0, dim))
    else:
        counts = chunk_sizes(k, (group.size,))
        values, indices = _sharded_sort(group, x.detach(), dim, largest, pieces, counts)
    values, indices = group.gather(values, dim, counts), group.gather(indices, dim, counts)
    if sum(counts) > k:  # else they are in order
        values, at = values.topk(k, dim, largest, ordered)
        indices = indices.gather(dim, at)
    return take(group, x, dim, indices) if x.requires_grad else values, indices


def _counts(pieces: tuple[int, ...], k: int) -> tuple[int, ...] | None:
    """How many candidates each rank has, if all of them are less than what every rank gets in a sorting network."""
    counts = tuple(min(k, size) for size in pieces)
    part = chunk_sizes(sum(pieces), (len(pieces),))[0]
    return counts if sum(counts) <= k + part * len(network(len(pieces))) else None


def _candidates(x: Tensor, dim: int, k: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(min(k, x.shape[dim]), dim, largest, True)
    return values, indices + offset


def take(group: Collectives, x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """S -> R: the elements at the same global indices for all. The gradient goes to them."""
    return group.psum(group.map(_own, x, dim, indices, group.offset(0, dim)))


def _own(x: Tensor, dim: int, indices: Tensor, offset: int) -> Tensor:
    """Those of the elements that are held here, and zeros, which are part of the graph even where there are none."""
    size = x.shape[dim]
    if not size:
        return x.sum(dim, keepdim=True).to(x.dtype).expand(indices.shape)
    mine, local = owned(indices, offset, size)
    # not `gather`, which keeps all of `x` for its gradient: torch's topk keeps indices, and `x` may be written to
    places = torch.meshgrid(*(torch.arange(n, device=x.device) for n in indices.shape), indexing="ij")
    places = tuple(local.clamp(0, size - 1) if d == dim % x.ndim else at for d, at in enumerate(places))
    return torch.where(mine, x[places], 0)


register("topk", rule=Rule(_topk, _topk_local))


# The k-th smallest element, the mode: along a dim that is not sharded

register("kthvalue", "median", "nanmedian", "mode", rule=Rule(lambda call: reduction_ways(call, None)))
