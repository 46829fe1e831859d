"""The k-th smallest element: medians, `kthvalue`, quantiles, the mode."""

import contextlib
import math

import pytest
import torch
from compare import check_shards, compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
inf, nan = math.inf, math.nan

OPS = {
    "median": lambda a: a.median(),
    "median dim": lambda a: a.median(0),
    "median keepdim": lambda a: a.median(-1, keepdim=True),
    "nanmedian": lambda a: a.nanmedian(),
    "nanmedian dim": lambda a: a.nanmedian(0),
    "kthvalue": lambda a: a.kthvalue(2, 0),
    "kthvalue last": lambda a: a.kthvalue(1, -1, keepdim=True),
    "mode": lambda a: a.mode(0),
    "mode last": lambda a: a.mode(-1, keepdim=True),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("shape", [(9,), (7, 3), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_selection(op, shape, dtype):
    """Of float32, elements are counted even where they are few."""
    sweep(op, normal(*shape).to(dtype))


@pytest.mark.parametrize("op", [OPS[name] for name in ("median dim", "nanmedian", "mode", "kthvalue last")])
def test_of_a_scalar(op):
    sweep(op, normal())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_of_nothing(shape):
    for op in (lambda a: a.median(), lambda a: a.median(shape.index(3))):
        sweep(op, normal(*shape))


SPECIAL = {
    "a NaN": ("median", [1.0, 7, nan, 3, nan, 3, 2]),
    "a NaN and its index": ("median dim", [1.0, 7, nan, 3, nan, 3, 2]),
    "uncounted NaNs": ("nanmedian", [1.0, 7, nan, 3, nan, 3, 2]),
    "uncounted NaNs and an index": ("nanmedian dim", [1.0, 7, nan, 3, nan, 3.5, 2]),
    "only NaNs": ("nanmedian", [nan] * 6),
    "only NaNs and the first's index": ("median dim", [nan] * 6),
    "infinities": ("median", [-inf, inf, -inf, 1, inf, 2, -inf]),
    "zero": ("median dim", [-1.0, 0, -2, 3, 1]),
}


@pytest.mark.parametrize(("name", "values"), SPECIAL.values(), ids=SPECIAL)
def test_special_values(name, values):
    sweep(OPS[name], torch.tensor(values), partial=False)


def test_zeros_of_either_sign_are_equal():
    compare(lambda a: a.median(), [torch.tensor([-0.0, 1, 0, -1, -0.0])], mesh_of((2,)), [[S(0)]])


KTH = {
    "kthvalue": lambda a: a.kthvalue(a.shape[0] // 3, 0),
    "median": lambda a: a.median(0),
    "nanmedian": lambda a: a.nanmedian(0),
}


@pytest.mark.parametrize("op", KTH.values(), ids=KTH)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32]
)
def test_ties(op, dtype):
    """Which of equal elements is taken is not defined, but it is one of them, and the gradient is that element's."""
    x = (normal(101, 1) * 3 + 5).to(dtype)
    d = place(x, S(0), mesh=(4,)).requires_grad_(dtype.is_floating_point)
    with CommDebugMode() as comm:
        value, index = op(d)
    if dtype != torch.int64:
        assert "all_to_all" not in comm.get_comm_counts() and "all_gather" not in comm.get_comm_counts()
    check_shards(value)
    assert torch.equal(value.full_tensor(), op(x).values)
    index = index.full_tensor()
    assert torch.equal(x.gather(0, index[None])[0], value.full_tensor())
    if d.requires_grad:
        value.sum().backward()
        assert torch.equal(d.grad.full_tensor(), torch.zeros_like(x).scatter(0, index[None], 1))


def test_equal_elements_share_the_gradient_of_a_whole_median():
    x = torch.randint(-2, 3, (7, 5)).float()
    for mesh, where in [((4,), [S(0)]), ((2, 2), [S(0), S(1)]), ((2, 2), [S(1), R])]:
        compare(lambda a: a.median(), [x], mesh_of(mesh), [where], rtol=1e-6)


@pytest.mark.parametrize("op", KTH.values(), ids=KTH)
def test_large_tensors_are_not_gathered(op):
    """Of float64 too, as soon as that is worth it."""
    x = normal(60_000)
    d = place(x, S(0), mesh=(4,)).requires_grad_()
    with CommDebugMode() as comm, sw.strict():
        value, index = op(d)
        value.backward()
    assert set(comm.get_comm_counts()) == {"all_reduce"}
    assert max(c.bytes for c in comm.comms) <= 256 * 8
    assert value.full_tensor() == op(x).values and index.full_tensor() == op(x).indices
    assert d.grad.full_tensor().nonzero().flatten().tolist() == [index.full_tensor()]


@pytest.mark.parametrize("widths", [(1, 20, 0, 2), (0, 0, 23, 0)])
def test_uneven_shards(widths):
    x = normal(23).float()
    parts = sw.comm.ranked([part.clone() for part in x.split(list(widths))])
    d = sw.DTensor.from_local(parts, mesh_of((4,)), [S(0)], shape=x.shape, stride=x.stride())
    for op in (*KTH.values(), lambda a: (a.median(), a.nanmedian())):
        for result, expected in zip(op(d), op(x), strict=True):
            assert torch.equal(result.full_tensor(), expected)


def test_matrices_are_selected_from_where_they_are():
    """By counting; the most frequent element is looked for in the whole. No placement is invented."""
    x = place(normal(40, 30), S(0))
    for name in ("median dim", "kthvalue", "mode"):
        with CommDebugMode() as comm, sw.strict():
            values, _ = OPS[name](x)
        assert values.placements == (R,)
        assert set(comm.get_comm_counts()) == {"all_gather" if name == "mode" else "all_reduce"}
        torch.testing.assert_close(values.full_tensor(), OPS[name](x.full_tensor())[0])


# Quantiles are sorts and look-ups

QUANTILES = {
    "all": lambda a: a.quantile(0.3),
    "dim": lambda a: a.quantile(0.3, 0, keepdim=True),
    "last": lambda a: a.quantile(0.8, -1),
    "several": lambda a: a.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=a.dtype), 0),
    "nan": lambda a: a.nanquantile(0.4, 0),
    "nearest": lambda a: a.quantile(0.3, 0, interpolation="nearest"),
    "midpoint": lambda a: a.nanquantile(0.7, interpolation="midpoint"),
}


@pytest.mark.parametrize("name", QUANTILES)
@pytest.mark.parametrize("places", [[S(0)], [S(1)], [P()], [S(1), S(0)]], ids=str)
def test_quantile(name, places):
    mesh = mesh_of((2,) * len(places))
    with sw.experimental.implicit_replication() if name == "several" else contextlib.nullcontext():
        compare(QUANTILES[name], [normal(7, 3)], mesh, [places])
        if P() not in places:
            x = torch.tensor([[1.0, nan, 3], [2, 5, -inf], [1, 4, 2]]).double()
            compare(QUANTILES[name], [x], mesh, [places])


@pytest.mark.parametrize("shape", [(6, 8), (64, 64), (200,)], ids=str)
@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantiles_are_not_refused_for_single_numbers_that_cannot_be_split(name, shape):
    """Where gathering a little is cheapest it is a choice, not for want of a way."""
    x = normal(*shape)
    with sw.strict():
        found = getattr(place(x, S(0)), name)(0.3, 0)
    torch.testing.assert_close(found.full_tensor(), getattr(x, name)(0.3, 0))
