"""The k-th smallest element: medians, `kthvalue`, quantiles, the mode."""

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
def test_selection(op, shape):
    sweep(op, normal(*shape))


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
    value, index = op(d)
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


@pytest.mark.parametrize("widths", [(1, 20, 0, 2), (0, 0, 23, 0)])
def test_uneven_shards(widths):
    x = normal(23).float()
    parts = sw.comm.ranked([part.clone() for part in x.split(list(widths))])
    d = sw.DTensor.from_local(parts, mesh_of((4,)), [S(0)], shape=x.shape, stride=x.stride())
    for op in (*KTH.values(), lambda a: (a.median(), a.nanmedian())):
        for result, expected in zip(op(d), op(x), strict=True):
            assert torch.equal(result.full_tensor(), expected)


def test_the_dim_looked_along_is_gathered_and_others_stay():
    """No placement is invented."""
    for name in ("median dim", "kthvalue", "mode"):
        for placement, kinds, kept in ((S(0), {"all_gather"}, R), (S(1), set(), S(0))):
            x = place(normal(40, 30), placement)
            with CommDebugMode() as comm, sw.strict():
                values, _ = OPS[name](x)
            assert values.placements == (kept,) and set(comm.get_comm_counts()) == kinds
