"""Ops that need what other ranks hold: indices, windows, views and expanded dims that cross shards."""

# ruff: noqa: B023 (functions made in loops are called in them)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, compare
from features import differentiates
from meshes import GRID, LINE, PAIR, data, numbers
from sweep import normal, place, same
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


def test_rows_picked_by_a_number_in_a_tensor() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        i = beside(x, torch.tensor(1))
        y = x[:, ::2]
        found = y[i], y[:, i], y[i, i], x[::2][i], x[1:][i, 1:], x.t()[1:][i]
        sum((part * part).sum() for part in found).backward()
        return *found, x.grad

    for mesh in MESHES:
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


def test_infinite_rows_that_nobody_looks_up() -> None:
    table, index = torch.zeros(4, 2), torch.tensor([[2, 3]])
    table[1, 0], table[2] = -math.inf, 5.0
    found = F.embedding_bag(place(index, R), place(table, S(0)), mode="max")
    assert torch.equal(found.full_tensor(), F.embedding_bag(index, table, mode="max"))


def test_infinite_weights_of_items_whose_rows_are_elsewhere() -> None:
    table, index, weights = (
        torch.ones(2, 3),
        torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([[1.0, math.inf], [1.0, 2.0]]),
    )
    expected = F.embedding_bag(index, table, per_sample_weights=weights, mode="sum")
    given = [place(x, p, mesh=(4,)) for x, p in ((index, R), (table, S(0)), (weights, R))]
    found = F.embedding_bag(given[0], given[1], per_sample_weights=given[2], mode="sum")
    assert torch.equal(found.full_tensor(), expected)


def test_indices_out_of_range_are_of_torchs_types() -> None:
    x, index, source = normal(3, 4, 2), torch.tensor([1, 4]), normal(3, 2, 2)
    calls: list[Callable[[Tensor, Tensor, Tensor], Any]] = [
        lambda x, i, s: x.index_add(1, i, s),
        lambda x, i, s: x.index_add(1, i, s, alpha=2),
        lambda x, i, s: x.transpose(0, 1).index_add(0, i, s.transpose(0, 1)),
        lambda x, i, s: x.transpose(0, 1).index_add(0, i, s.transpose(0, 1), alpha=3),
        lambda x, i, s: x.index_reduce(1, i, s, "amax", include_self=True),
        lambda x, i, s: x.index_reduce(1, i, s, "amax", include_self=False),
    ]
    for call in calls:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(x, index, source)
        for placement in (S(0), S(1)):
            with pytest.raises(expected.type, match=r"index 4 is out of bounds|out of range"):
                call(place(x, placement), place(index, R), place(source, S(0)))


def test_a_source_of_another_dtype_is_refused_before_anything_moves() -> None:
    x, index, source = (
        place(normal(4, 6), S(1)),
        place(torch.zeros(4, 2, dtype=torch.long), S(0)),
        place(torch.zeros(4, 2), S(0)),
    )
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match=r"Expected self.dtype to be equal to src.dtype"):
        x.scatter(1, index, source)
    assert comm.get_total_counts() == 0


def test_argmax_and_indices_are_global() -> None:
    assert sw.distribute_tensor(torch.tensor([10.0, 5, 3, 8]), PAIR, [S(0)]).argmax().item() == 0
    assert sw.distribute_tensor(torch.tensor([3.0, 5, 10, 8]), PAIR, [S(0)]).argmax().item() == 2
    x = data(3, 7)
    for placement, dim in itertools.product([S(0), S(1)], [0, 1]):
        compare(lambda t, dim=dim: t.max(dim=dim), [x], LINE, [[placement]])
        compare(lambda t, dim=dim: t.argmin(dim), [x], LINE, [[placement]], backward=False)
        for relative in (torch.sort, torch.median, torch.cummax, torch.min, torch.argsort, torch.aminmax):
            run = lambda t, f=relative, dim=dim: f(t, dim=dim)  # noqa: E731
            compare(run, [x], LINE, [[placement]], backward=differentiates(run, x))
        compare(lambda t, dim=dim: (t.topk(2, dim), t.kthvalue(2, dim), t.mode(dim)), [x], LINE, [[placement]])
    for placement in (S(0), S(1), S(2)):
        pool = lambda t: F.max_pool2d(t, 2, stride=1, return_indices=True)  # noqa: E731
        compare(pool, [data(2, 5, 6)], PAIR, [[placement]])


@pytest.mark.parametrize("placement", [S(0), S(1)])
def test_views_that_cross_shards(placement: sw.Placement) -> None:
    for shape in ((16, 6), (96,), (2, 6, 8), (24, 4), (4, 24), (8, 12)):
        compare(lambda t, s=shape: t.view(s), [data(12, 8)], LINE, [[placement]])


def test_expand_of_a_dim_of_size_one() -> None:
    for placement in (S(0), S(1), P(), R):
        compare(lambda t: t.expand(4, 4), [data(1, 4)], LINE, [[placement]])
        compare(lambda t: t.repeat(4, 2), [data(1, 4)], LINE, [[placement]])
        compare(lambda t, u: t * u, [data(1, 4), data(4, 4)], LINE, [[placement], [S(0)]])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("placements", list(itertools.product([R, S(0), S(1)], [R, S(0)])), ids=str)
def test_index_put_of_a_diagonal(placements: tuple, accumulate: bool) -> None:
    def put(t: Tensor, values: Tensor) -> Tensor:
        rows = beside(t, torch.arange(4))
        return torch.index_put(t, (rows, rows), values, accumulate=accumulate)

    out = compare(put, [torch.zeros(4, 4, dtype=torch.float64), numbers(4) + 1], LINE, [[p] for p in placements])
    assert torch.equal(out[0].full_tensor(), torch.diag(numbers(4) + 1))


READS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "index": lambda t, i, j, s: t[i],
    "index_select": lambda t, i, j, s: t.index_select(0, i),
    "gather": lambda t, i, j, s: t.gather(0, j),
    "take_along_dim": lambda t, i, j, s: t.take_along_dim(j, 0),
    "take": lambda t, i, j, s: t.take(j),
    "places": lambda t, i, j, s: t[i, i % 4],
    "scatter_add": lambda t, i, j, s: t.scatter_add(0, j, s),
    "scatter_reduce": lambda t, i, j, s: t.scatter_reduce(0, j, s, "amax"),
    "index_add": lambda t, i, j, s: t.index_add(0, i[:2], s),
    "index_copy": lambda t, i, j, s: t.index_copy(0, i[:2], s),
    "index_put": lambda t, i, j, s: t.index_put((i[:2],), s, accumulate=True),
    "embedding": lambda t, i, j, s: F.embedding(j, t),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("placement", [S(0), S(1), R, P()])
def test_indices_that_cross_shards(name: str, placement: sw.Placement) -> None:
    rows, wide = torch.tensor([5, 0, 3, 3]), torch.tensor([[5, 0, 3, 3], [1, 2, 2, 0]])
    for where in (R, S(0)):
        read = lambda t, s: READS[name](t, beside(t, rows, where), beside(t, wide, where), s)  # noqa: E731
        compare(read, [data(6, 4), data(2, 4)], LINE, [[placement], [R]])
        compare(read, [data(6, 4), data(2, 4)], LINE, [[placement], [S(1)]])


@pytest.mark.parametrize("placement", [S(0), S(1), S(2), S(3), R])
def test_convolution_with_a_sharded_dim(placement: sw.Placement) -> None:
    inputs = [data(2, 3, 6, 5), data(4, 3, 3, 3)]
    for options in ({"padding": 1}, {"stride": 2}, {"dilation": 2, "padding": "same"}):
        compare(lambda t, w, o=options: F.conv2d(t, w, **o), inputs, PAIR, [[placement], [R]])
    compare(lambda t, w: F.conv_transpose2d(t, w[:3], stride=2), inputs, PAIR, [[placement], [R]])
    compare(lambda t, w: F.conv2d(t, w, w[:, 0, 0, 0], padding=1), inputs, GRID, [[placement, S(1)], [R, R]])
    for pool in (F.max_pool2d, F.avg_pool2d):
        compare(lambda t, w, f=pool: f(t, 3, 2, 1), inputs, PAIR, [[placement], [R]])


@pytest.mark.parametrize("placements", list(itertools.product([R, S(0), S(1)], repeat=2)), ids=str)
def test_gather_with_a_shorter_index(placements: tuple) -> None:
    """Along dims that are not gathered, the index covers only the beginning."""
    wide = torch.tensor([[3, 0], [1, 2], [0, 0]])
    for dim, source in itertools.product((0, 1), (data(3, 2), data(5, 3))):
        functions: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
            lambda t, i, s: t.gather(dim, i),
            lambda t, i, s: t.scatter_add(dim, i, s),
            lambda t, i, s: t.scatter(dim, i, s),
            lambda t, i, s: t.scatter_reduce(dim, i, s, "mean"),
        ]
        for function in functions:
            run = lambda t, s, f=function: f(t, beside(t, wide, placements[1]), s)  # noqa: E731
            # torch has no gradient for a source that is longer than the index
            compare(run, [data(7, 5), source], LINE, [[placements[0]], [R]], backward=source.shape == wide.shape)


def test_a_replicated_tensor_in_sharded_heads() -> None:
    compare(lambda t, q: (t.unsqueeze(1).expand(2, 4, 3) * q).sum(-1), [data(2, 3), data(2, 4, 3)], LINE, [[R], [S(1)]])
    q, k = data(2, 8, 3, 4), data(2, 2, 3, 4)
    shared = lambda a, b: F.scaled_dot_product_attention(a, *[b.repeat_interleave(4, 1)] * 2)  # noqa: E731
    compare(shared, [q, k], LINE, [[S(1)], [R]])
    compare(lambda a, b: F.scaled_dot_product_attention(a, b, b, enable_gqa=True), [q, k], LINE, [[S(1)], [R]])
    compare(lambda a, b: torch.einsum("bhqd,bkd->bhqk", a, b[:, 0]), [q, k], LINE, [[S(1)], [R]])


@pytest.mark.parametrize("padding", [3, -1, None])
@pytest.mark.parametrize("placement", [S(0), S(1), R])
def test_embedding_with_a_padding_index(placement: sw.Placement, padding: int | None) -> None:
    at = torch.tensor([[0, 3, 9], [3, 5, 3]])
    for where, scale in itertools.product((R, S(0)), (False, True)):
        options = {"padding_idx": padding, "scale_grad_by_freq": scale}
        embed = lambda w: F.embedding(beside(w, at, where), w, **options)  # noqa: E731
        compare(embed, [data(10, 4)], LINE, [[placement]])


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("placement", [S(0), S(1), R])
def test_a_bag_that_spans_ranks(mode: str, placement: sw.Placement) -> None:
    at, flat, offsets = torch.tensor([[0, 3, 9], [3, 5, 7]]), torch.tensor([0, 3, 9, 5, 7]), torch.tensor([0, 3, 3])
    for where in (R, S(0)):
        bags = lambda w: F.embedding_bag(beside(w, at, where), w, mode=mode)  # noqa: E731
        compare(bags, [data(10, 4)], LINE, [[placement]])
        ragged = lambda w: F.embedding_bag(  # noqa: E731
            beside(w, flat, where), w, beside(w, offsets), mode=mode, padding_idx=3
        )
        compare(ragged, [data(10, 4)], LINE, [[placement]])
