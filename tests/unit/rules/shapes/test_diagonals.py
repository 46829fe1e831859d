"""Diagonals and triangles of sharded matrices."""

import pytest
import torch
from sweep import normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

OPS = {
    "tril": (lambda a: a.tril(), (5, 4)),
    "tril above": (lambda a: a.tril(1), (2, 3, 5)),
    "triu below": (lambda a: a.triu(-1), (5, 4)),
    "diagonal": (lambda a: a.diagonal(), (5, 4)),
    "diagonal above": (lambda a: a.diagonal(1, 0, 2), (5, 2, 6)),
    "diagonal below": (lambda a: a.diagonal(-2, 1, 0), (5, 6)),
    "diagonal outside": (lambda a: a.diagonal(9), (5, 4)),
    "diagonal_copy": (torch.diagonal_copy, (5, 4)),
    "linalg.diagonal": (torch.linalg.diagonal, (2, 5, 4)),
    "diag of a matrix": (torch.diag, (5, 4)),
    "diag of a vector": (lambda a: torch.diag(a, 1), (5,)),
    "diag_embed": (lambda a: torch.diag_embed(a, -1, 0, 2), (3, 5)),
    "diag_embed far": (lambda a: torch.diag_embed(a, 20), (3,)),
    "diagflat": (torch.diagflat, (2, 3)),
    "trace": (torch.trace, (5, 4)),
    "of a part": (lambda a: a[3:, 1:].tril(1).diagonal(-1).diag_embed(1).trace(), (9, 6)),
}


@pytest.mark.parametrize(("op", "shape"), OPS.values(), ids=OPS)
def test_diagonal(op, shape):
    sweep(op, normal(*shape))


@pytest.mark.parametrize("name", ["tril", "diagonal", "diag of a vector", "trace"])
def test_second_derivative(name):
    op, shape = OPS[name]
    sweep(lambda a: torch.autograd.grad((op(a) ** 3).sum(), a, create_graph=True)[0], normal(*shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", ["tril", "diagonal", "diag of a vector"])
def test_other_dtypes(name, dtype):
    op, shape = OPS[name]
    sweep(op, (normal(*shape) > 0).to(dtype))


def test_trace_of_integers():
    sweep(torch.trace, (normal(5, 4) * 10).to(torch.int32))


def test_triangles_in_place():
    accepted = sweep_in_place(lambda a: a.tril_(1), normal(5, 4))
    assert accepted == [((R,),), ((S(0),),), ((S(1),),), ((P(),),)]
    x, out = place(normal(6, 4), S(0)), place(normal(6, 4), S(0))
    torch.triu(x, -1, out=out)
    torch.testing.assert_close(out.full_tensor(), normal(6, 4).triu(-1))


STAYS = {
    "tril rows": (lambda a: a.tril(), S(0), "[8,6] S(0)@a"),
    "tril columns": (lambda a: a.tril(), S(1), "[8,6] S(1)@a"),
    "diagonal of rows": (lambda a: a.diagonal(), S(0), "[6] S(0=4+2)@a"),
    "diagonal of columns": (lambda a: a.diagonal(1), S(1), "[5] S(0=2+3)@a"),
    "trace": (lambda a: a.trace(), S(0), "[] P(sum)@a"),
    "batch": (lambda a: a.diag_embed(), S(0), "[8,6,6] S(0)@a"),
}


@pytest.mark.parametrize(("op", "where", "layout"), STAYS.values(), ids=STAYS)
def test_nothing_moves(op, where, layout):
    x = place(normal(8, 6), where)
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_total_counts() == 0
    assert str(result._layout) == layout


def test_rows_and_columns_sharded_at_once():
    x = normal(7, 5)
    d = place(x, S(0), S(1), mesh=(2, 2))
    with CommDebugMode() as comm:
        results = d.tril(-1), d.trace()
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(results[0].full_tensor(), x.tril(-1))
    torch.testing.assert_close(results[1].full_tensor(), x.trace())


@pytest.mark.parametrize("where", [R, S(0), S(1)])
def test_a_diagonal_is_a_view(where):
    x, expected = place(normal(6, 6), where), normal(6, 6)
    x.diagonal(1).zero_()
    expected.diagonal(1).zero_()
    torch.testing.assert_close(x.full_tensor(), expected)
    torch.diagonal_copy(x).zero_()
    torch.testing.assert_close(x.full_tensor(), expected)
