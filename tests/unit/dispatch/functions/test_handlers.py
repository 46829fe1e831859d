"""Calls that are not computations: values that leave for Python, writes to parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from compare import check_shards
from torch import Tensor

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))
WRITABLE = list(itertools.product([R, S0, S1], repeat=2))


def data(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_values_leave_for_python(placements: tuple) -> None:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    d = sw.distribute_tensor(x, MESH, placements)
    assert d.tolist() == x.tolist()
    assert d.sum().item() == float(d.sum()) == int(d.sum()) == 105
    assert bool((d == d).all()) and not bool(d[0, 0])
    assert [row.tolist() for row in d] == x.tolist()
    assert 7.0 in d and 99.0 not in d
    assert d.numpy().tolist() == x.tolist()
    assert list(range(20))[d[1, 0].long()] == 3


@pytest.mark.parametrize(("a", "b"), list(itertools.product(WRITABLE, [(S0, S0), (R, P), (S1, R)])), ids=str)
def test_equal_and_allclose_across_layouts(a: tuple, b: tuple) -> None:
    x = data(5, 4)
    d, e = sw.distribute_tensor(x, MESH, a), sw.distribute_tensor(x, MESH, b)
    other = x.clone()
    other[4, 3] += 1e-3
    f = sw.distribute_tensor(other, MESH, b)
    assert d.equal(e) and torch.equal(d, e) and not torch.equal(d, f)
    assert torch.allclose(d, e) and not d.allclose(f) and d.allclose(f, atol=1e-2)
    assert not torch.equal(d, e[:4])
    torch.testing.assert_close(d, e)


def test_truth_of_many_values_is_refused() -> None:
    d = sw.distribute_tensor(data(4, 4), MESH, [S0, R])
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(d)
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        iter(d.sum())
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(d.sum())


INDICES = [0, -1, slice(1, 4), slice(None, None, 2), (slice(1, None), 2), (..., 1), (slice(None), slice(1, 3)), (2, 3)]
INDICES += [(None, 1), slice(5, 2), (slice(-3, -1), slice(None)), ...]


@pytest.mark.parametrize("placements", WRITABLE, ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (3, 7)])
def test_set_item(shape: tuple[int, int], placements: tuple) -> None:
    x = data(*shape)
    for index in INDICES:
        part = x[index]
        values = [(7.0, None), (data(), (R, R)), (data(*part.shape[-1:]), (R, R))]
        if part.dim():
            values.append((data(*part.shape), (S0, R)))
        for value, where in values:
            expected, d = x.clone(), sw.distribute_tensor(x, MESH, placements)
            expected[index] = value
            d[index] = value if where is None else sw.distribute_tensor(value, MESH, where)
            check_shards(d)
            assert torch.equal(d.full_tensor(), expected), f"{index} {placements}"


@pytest.mark.parametrize("placements", WRITABLE, ids=str)
def test_set_item_by_mask(placements: tuple) -> None:
    x = data(5, 4)
    d = sw.distribute_tensor(x, MESH, placements)
    expected = x.clone()
    for number in (0.0, torch.tensor(2.0, dtype=torch.float64)):
        d[d > 0.5] = number
        expected[expected > 0.5] = number
        rows = sw.distribute_tensor(torch.tensor([True, False, False, True, True]), MESH)
        d[rows] = 3.0
        expected[[0, 3, 4]] = 3.0
        check_shards(d)
        assert torch.equal(d.full_tensor(), expected)


def test_set_item_refuses_what_it_cannot_do_and_changes_nothing() -> None:
    x = data(4, 4)
    d = sw.distribute_tensor(x, MESH, [S0, R])
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
        d[4] = 1.0
    with pytest.raises(sw.errors.MixedTensorError):
        d[0] = data(4)
    plain = data(4, 4)
    with pytest.raises(sw.errors.MixedTensorError, match=r"a part of a plain tensor cannot be set to a DTensor"):
        plain[0] = d[0]
    assert torch.equal(d.full_tensor(), x)


def test_set_item_has_a_gradient() -> None:
    x, v = data(5, 4), data(4)
    a, b = x.clone().requires_grad_(), v.clone().requires_grad_()
    d = sw.distribute_tensor(x, MESH, [S0, R]).requires_grad_()
    e = sw.distribute_tensor(v, MESH, [R, R]).requires_grad_()
    for t, u in ((a, b), (d, e)):
        y = t * 2
        y[1] = u
        (y * y).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), a.grad)
    torch.testing.assert_close(e.grad.full_tensor(), b.grad)


@pytest.mark.parametrize("placements", [(S0, R), (R, S1), (P, R)], ids=str)
def test_conversions_keep_the_layout(placements: tuple) -> None:
    x = data(4, 4)
    d = sw.distribute_tensor(x, MESH, placements)
    for convert in (
        lambda t: t.to(torch.float32),
        lambda t: t.float(),
        lambda t: t.to("cpu", torch.float32),
        lambda t: t.type_as(torch.ones(1)),
        lambda t: t.cpu().float(),
    ):
        y = convert(d)
        check_shards(y)
        assert y.dtype == torch.float32 and y.placements == placements
        torch.testing.assert_close(y.full_tensor(), x.float())
    assert d.to(torch.float64).placements == placements


def test_converting_pending_values_to_ints_adds_them_up_first() -> None:
    local = torch.tensor([0.5, 1.25])
    d = sw.DTensor.from_local(local, MESH, [P, R])
    assert d.to(torch.int64).tolist() == [1, 2]
    assert d.long().tolist() == [1, 2]
    assert d.bool().tolist() == [True, True]


@pytest.mark.parametrize("placements", [(S0, R), (S0, S1), (R, S0)], ids=str)
def test_resizing_to_the_same_size_does_nothing(placements: tuple) -> None:
    x = data(5, 4)
    d = sw.distribute_tensor(x, MESH, placements)
    with CommDebugMode() as comm, sw.strict():
        assert d.resize_(5, 4) is d and d.resize_((5, 4)) is d and d.resize_(d.shape) is d and d.resize_as_(d * 2) is d
    assert comm.get_total_counts() == 0 and torch.equal(d.full_tensor(), x)
    with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
        d.clone().requires_grad_().resize_(5, 4)


def test_names_are_listed_without_a_word_to_others() -> None:
    """Tracebacks ask for them, on the one rank that raises."""
    d = sw.distribute_tensor(data(5, 4), MESH, (S0, R))
    with CommDebugMode() as comm, sw.strict():
        assert {"full_tensor", "placements", "sum"} <= set(dir(d))
    assert comm.get_total_counts() == 0
