"""Sorting and the largest elements."""

import math
from itertools import product

import pytest
import torch
from compare import check_shards
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.rules.lookup.ordering import network

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
inf, nan = math.inf, math.nan

OPS = {
    "sort": lambda a: a.sort(0),
    "sort last": lambda a: a.sort(-1, descending=True),
    "sort stable": lambda a: a.sort(dim=0, stable=True, descending=True),
    "argsort": lambda a: a.argsort(0),
    "argsort stable": lambda a: a.argsort(dim=0, stable=True),
    "msort": lambda a: a.msort(),
    "topk": lambda a: a.topk(1, 0),
    "topk smallest": lambda a: a.topk(min(2, a.shape[0]), 0, largest=False),
    "topk last": lambda a: a.topk(min(2, a.shape[-1]), -1),
    "topk all": lambda a: a.topk(a.shape[0], 0),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("shape", [(9,), (9, 3), (3, 2), (1, 6), (6, 1)])
def test_order(op, shape):
    sweep(op, normal(*shape))


@pytest.mark.parametrize("name", ["sort", "argsort", "msort"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)])
def test_almost_nothing_to_sort(name, shape):
    if name == "msort" and not shape:
        pytest.skip("torch has none")
    sweep(OPS[name], normal(*shape))


@pytest.mark.parametrize("size", range(1, 20))
def test_network_sorts(size):
    """A network that sorts zeros and ones sorts everything: all of them where there are few."""
    rounds = network(size)
    assert all(pairs[pairs[i]] == i != pairs[i] for pairs in rounds for i in pairs)
    inputs = product((0, 1), repeat=size) if size <= 9 else torch.randint(0, 2, (300, size)).tolist()
    for values in map(list, inputs):
        for pairs in rounds:
            for i, j in pairs.items():
                if i < j:
                    values[i], values[j] = sorted((values[i], values[j]))
        assert values == sorted(values)


def uneven(x: torch.Tensor, widths: tuple[int, ...]) -> sw.DTensor:
    parts = [part.clone() for part in x.split(list(widths))]
    return sw.DTensor.from_local(
        sw.comm.ranked(parts), mesh_of((len(widths),)), [S(0)], shape=x.shape, stride=x.stride()
    )


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("widths", [(1, 20, 0, 2), (0, 0, 23, 0), (5, 6, 6, 6), (3, 4, 4, 4, 4, 4), (12, 11)])
def test_distributed_sort_is_stable(widths, descending):
    """Many ties, uneven shards; NaNs, infinities and signed zeros where torch puts them."""
    x = torch.randint(-2, 3, (23,)).double()
    x[::5], x[3::7], x[4], x[11] = nan, inf, -0.0, -inf
    d, plain = uneven(x, widths).requires_grad_(), x.clone().requires_grad_()
    result, expected = d.sort(stable=True, descending=descending), plain.sort(stable=True, descending=descending)
    for a, e in zip(result, expected, strict=True):
        check_shards(a)
        assert a.placements == (S(0),)
        torch.testing.assert_close(a.full_tensor(), e.detach(), rtol=0, atol=0, equal_nan=True)
    w = torch.randn(23).double()
    (result.values * sw.distribute_tensor(w, d.device_mesh)).sum().backward()
    (expected.values * w).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad, rtol=0, atol=0)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_sort_over_a_dim_that_two_axes_split(mesh):
    x = normal(31)
    for where in ({0: ("a", "b")}, {0: ("b", "a")}):
        d = sw.distribute_tensor(x, mesh_of(mesh), where)
        with sw.strict():
            values, indices = d.sort()
        assert torch.equal(values.full_tensor(), x.sort().values)
        assert torch.equal(indices.full_tensor(), x.argsort())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    x = (normal(23) * 3).to(dtype)
    d = place(x, S(0), mesh=(4,))
    for result, expected in zip(d.sort(stable=True), x.sort(stable=True), strict=True):
        assert torch.equal(result.full_tensor(), expected)
    if dtype != torch.bool:
        values, indices = d.topk(4)
        assert torch.equal(values.full_tensor(), x.topk(4).values)
        assert torch.equal(x[indices.full_tensor()], values.full_tensor())
        assert len(set(indices.full_tensor().tolist())) == 4


def test_second_derivatives_of_a_sort():
    x, w = normal(9), torch.arange(9.0).double()

    def second(a, w):
        (g,) = torch.autograd.grad((a.sort().values.sin() * w).sum(), a, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), a)[0]

    d = place(x, S(0), mesh=(4,)).requires_grad_()
    result = second(d, sw.distribute_tensor(w, mesh_of((4,))))
    torch.testing.assert_close(result.full_tensor(), second(x.clone().requires_grad_(), w))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("widths", [(1, 20, 0, 2), (6, 6, 6, 5), (0, 23)])
def test_topk_with_ties_and_nans(widths, largest):
    """Which of equal elements is taken is nobody's business, but it is that element that has the gradient."""
    x = torch.randint(-2, 3, (23,)).double()
    x[7], x[20] = nan, -inf
    d = uneven(x, widths).requires_grad_()
    with CommDebugMode() as comm:
        values, indices = d.topk(5, largest=largest)
    assert max(c.bytes for c in comm.comms) <= 5 * 8
    torch.testing.assert_close(values.full_tensor(), x.topk(5, largest=largest).values, equal_nan=True)
    chosen = indices.full_tensor()
    torch.testing.assert_close(x[chosen], values.full_tensor(), equal_nan=True)
    values.sum().backward()
    assert torch.equal(d.grad.full_tensor(), torch.zeros(23).double().index_fill(0, chosen, 1))
    assert len(set(chosen.tolist())) == 5


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("widths", [(1, 20, 0, 2), (6, 6, 6, 5), (0, 23), (3, 4, 4, 4, 4, 4)])
@pytest.mark.parametrize("k", [7, 12, 23])
def test_many_of_the_largest_stay_sharded(widths, largest, k):
    """In order, and as before: of equal elements one that is given has the gradient."""
    x = torch.randint(-2, 3, (23,)).double()
    x[7], x[20], x[21] = nan, -inf, nan
    d = uneven(x, widths).requires_grad_()
    with CommDebugMode() as comm, sw.strict():
        values, indices = d.topk(k, largest=largest)
        values.nansum().backward()
    assert set(comm.get_comm_counts()) == {"all_to_all"}
    assert max(c.bytes for c in comm.comms) <= max(*widths, -(-23 // len(widths))) * 8
    for result in (values, indices):
        check_shards(result)
        assert result.placements == (S(0),)
    torch.testing.assert_close(values.full_tensor(), x.topk(k, largest=largest).values, equal_nan=True)
    chosen = indices.full_tensor()
    torch.testing.assert_close(x[chosen], values.full_tensor(), equal_nan=True)
    assert len(set(chosen.tolist())) == k
    expected = torch.zeros(23).double().index_fill(0, chosen, 1)
    assert torch.equal(d.grad.full_tensor(), torch.where(x.isnan(), 0, expected))


@pytest.mark.parametrize("where", [{0: ("a", "b")}, {0: ("b", "a")}])
def test_many_of_the_largest_over_two_axes(where):
    x = normal(31)
    with sw.strict():
        values, indices = sw.distribute_tensor(x, mesh_of((2, 3)), where).topk(20)
    assert torch.equal(values.full_tensor(), x.topk(20).values)
    assert torch.equal(indices.full_tensor(), x.topk(20).indices)


def test_candidates_that_would_be_everything_are_sorted_instead():
    """Of many ranks each holds less than k; still every rank wants the k of all."""
    x = normal(160)
    d, plain = place(x, S(0), mesh=(16,)).requires_grad_(), x.clone().requires_grad_()
    with CommDebugMode() as comm, sw.strict():
        values, indices = d.topk(40)
    assert values.placements == (R,)
    assert "all_to_all" in comm.get_comm_counts()
    assert max(c.bytes for c in comm.comms if c.kind == "all_gather") <= -(-40 // 16) * 8
    for result, expected in zip((values, indices), plain.topk(40), strict=True):
        assert torch.equal(result.full_tensor(), expected)
    values.exp().sum().backward()
    plain.topk(40).values.exp().sum().backward()
    assert torch.equal(d.grad.full_tensor(), plain.grad)


def test_unsorted_topk():
    x = normal(40, 3)
    values, indices = place(x, S(0)).topk(4, 0, sorted=False)
    torch.testing.assert_close(values.full_tensor().msort(), x.topk(4, 0).values.msort())
    assert torch.equal(x.gather(0, indices.full_tensor()), values.full_tensor())


def test_a_matrix_is_sorted_along_its_sharded_dim():
    x = place(normal(40, 30), S(0))
    with CommDebugMode() as comm, sw.strict():
        values, _ = x.sort(0)
    assert values.placements == (S(0),)
    assert set(comm.get_comm_counts()) <= {"all_to_all", "all_reduce"}
    torch.testing.assert_close(values.full_tensor(), normal(40, 30).sort(0)[0])


def test_no_rank_holds_more_than_two_parts():
    x = place(normal(800), S(0), mesh=(4,)).requires_grad_()
    with CommDebugMode() as comm, sw.strict():
        values, _ = x.sort()
        values.sum().backward()
    assert set(comm.get_comm_counts()) <= {"all_to_all", "all_reduce"}
    assert max(c.bytes for c in comm.comms) <= 200 * 8


def test_out():
    x = normal(9)
    values, indices = place(torch.zeros(9).double(), S(0)), place(torch.zeros(9).long(), S(0))
    torch.sort(place(x, S(0)), out=(values, indices))
    assert torch.equal(values.full_tensor(), x.sort().values) and torch.equal(indices.full_tensor(), x.argsort())
