"""Uneven splits, nested ones, other orders, sizes of each rank's own: all rows are there, whatever is done."""

from __future__ import annotations

import itertools

import torch
from compare import beside, check_shards, compare
from meshes import GRID, LINE, data
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor
from shardwise.comm import ranked

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def test_all_rows_of_an_uneven_nested_split() -> None:
    x = data(5, 3)
    d = sw.distribute_tensor(x, GRID, [S(0), S(0)])
    check_shards(d)
    assert torch.equal(d.redistribute(placements=[R, R]).full_tensor(), x)
    for middle in itertools.product([R, S(0), S(1)], repeat=2):
        assert torch.equal(d.redistribute(placements=middle).redistribute(placements=[S(0), S(0)]).full_tensor(), x)
        compare(
            lambda t, m=middle: t.redistribute(placements=m) if isinstance(t, DTensor) else t, [x], GRID, [[S(0)] * 2]
        )


def test_rowwise_then_data_parallel_on_the_same_dim() -> None:
    x = data(7, 3)
    d = sw.distribute_tensor(x, GRID, {0: ("tp", "dp")})
    assert torch.equal(d.full_tensor(), x) and torch.equal((d * 2).full_tensor(), 2 * x)
    assert d.placements == (S(0), S(0)) and d._layout is not sw.distribute_tensor(x, GRID, [S(0), S(0)])._layout
    rows = beside(d, torch.tensor([6, 0, 3]))
    d.requires_grad_()
    for function in (lambda t: t.cumsum(0), lambda t: t.flip(0), lambda t: t.sort(0)[1], lambda t: t.view(21)):
        torch.testing.assert_close(function(d.detach()).full_tensor(), function(x))
    (d[rows] ** 2).sum().backward()
    assert torch.equal(d.grad.full_tensor().sum(1).nonzero().flatten(), torch.tensor([0, 3, 6]))
    assert d.grad._layout is d._layout


def test_widths_that_differ_by_rank() -> None:
    pieces = [data(2, n) for n in (2, 3, 4, 5)]
    d = DTensor.from_local(ranked([p.clone() for p in pieces]), LINE, [S(1)])
    whole = torch.cat(pieces, 1)
    assert torch.equal(d.full_tensor(), whole)
    for function in (torch.sum, torch.t, lambda t: t @ t.t(), lambda t: t.cumsum(1), lambda t: t[:, 1:9], torch.argmax):
        torch.testing.assert_close(function(d).full_tensor(), function(whole))


def test_operands_with_different_row_splits() -> None:
    a = DTensor.from_local(ranked([data(n, 2) for n in (1, 4, 0, 3)]), LINE, [S(0)]).requires_grad_()
    b = DTensor.from_local(ranked([data(n, 2) for n in (3, 0, 1, 4)]), LINE, [S(0)]).requires_grad_()
    c = sw.distribute_tensor(data(8, 2), LINE, [S(0)])
    for x, y in ((a, b), (b, a), (a, c), (c, b)):
        torch.testing.assert_close((x + y).full_tensor(), x.full_tensor() + y.full_tensor())
        torch.testing.assert_close((x * y).full_tensor(), x.full_tensor() * y.full_tensor())
    (a * b).sum().backward()
    torch.testing.assert_close(a.grad.full_tensor(), b.detach().full_tensor())
    assert a.grad._layout is a._layout
    for join in (torch.maximum, torch.dot, torch.outer, F.mse_loss, lambda x, y: torch.where(x > 0, x, y)):
        x, y = a.detach()[:, 0], b.detach()[:, 1]
        torch.testing.assert_close(join(x, y).full_tensor(), join(x.full_tensor(), y.full_tensor()))
