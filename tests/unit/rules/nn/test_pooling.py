"""Pooling, wherever the input lies."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S = sw.Replicate(), sw.Shard
IMAGES = {1: (2, 4, 9), 2: (2, 3, 6, 5), 3: (2, 2, 4, 5, 3)}
WINDOWS = {
    "plain": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "ceil": {"kernel_size": 2, "stride": 2, "ceil_mode": True},
    "padded ceil": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
}


@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_average(dims, options):
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    sweep(lambda x: pool(x, **options), normal(*IMAGES[dims]))
    if options.get("padding"):
        sweep(lambda x: pool(x, **options, count_include_pad=False), normal(*IMAGES[dims]))


def test_average_over_another_count():
    sweep(lambda x: F.avg_pool2d(x, (3, 2), (1, 2), (1, 0), divisor_override=5), normal(*IMAGES[2]))


@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_maximum_and_where_it_is(dims, options):
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
    sweep(lambda x: pool(x, **options, return_indices=True), normal(*IMAGES[dims]))


def test_maximum_with_dilation():
    sweep(lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2, return_indices=True), normal(*IMAGES[2]))
    sweep(lambda x: F.max_pool2d(x, 3, 2, 1), normal(3, 6, 5))


def test_maximum_of_special_values():
    """Ties, NaN, and windows of nothing but minus infinity: index and gradient are torch's."""
    x = normal(*IMAGES[2]).round()
    x[0, 0, 2, 3], x[1, 2] = math.nan, -math.inf
    for options in ({"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 1, "dilation": 2, "stride": 1}):
        sweep(lambda x, options=options: F.max_pool2d(x, 3, **options, return_indices=True), x, partial=False)


@pytest.mark.parametrize("size", [2, 3, 4, 1])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_adaptive(dims, size):
    shape = {1: (2, 3, 8), 2: (2, 3, 8, 6), 3: (2, 2, 4, 6, 8)}[dims]
    average = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[dims]
    maximum = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[dims]
    sweep(lambda x: average(x, size), normal(*shape), partial=False)
    sweep(lambda x: maximum(x, size, return_indices=True), normal(*shape), partial=False)


def test_norm_pooling():
    sweep(lambda x: F.lp_pool1d(x.abs() + 0.1, 3.0, 2), normal(2, 4, 9), partial=False)
    sweep(lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, 2, 1), normal(2, 3, 4, 5), partial=False)


@pytest.mark.parametrize("pool", [F.fractional_max_pool2d, F.fractional_max_pool3d])
def test_fractional_pooling_with_given_samples(pool):
    dims = 2 if pool is F.fractional_max_pool2d else 3
    x, samples = normal(2, 3, *[6, 5, 4][:dims]), torch.rand(2, 3, dims, dtype=torch.float64)
    op = lambda x, s: pool(x, 2, 2, _random_samples=s.detach(), return_indices=True)  # noqa: E731
    sweep(op, x, samples, partial=False)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_way_back_from_a_maximum(dims):
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
    back = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[dims]
    sweep(lambda x: back(*pool(x, 2, return_indices=True), 2), normal(2, 3, *[6, 4, 2][:dims]), partial=False)


def test_every_rank_refuses_an_index_outside():
    values, bad = torch.zeros(2, 1, 1, 2), torch.tensor([[[[0, 1]]], [[[0, 99]]]])
    with pytest.raises(RuntimeError, match="invalid max index: 99"):
        F.max_unpool2d(values, bad, 2)
    with pytest.raises(RuntimeError, match="index 99 is out of bounds"):
        F.max_unpool2d(place(values, S(0)), place(bad, S(0)), 2)


POOLS = {
    "average": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "maximum": lambda x: F.max_pool2d(x, 3, 1, 1),
}


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("name", POOLS)
def test_pooling_stays_where_it_is(name, dim):
    x = place(normal(4, 4, 8, 8), S(dim))
    with CommDebugMode() as comm, sw.strict():
        out = POOLS[name](x)
    halo = dim > 1
    assert out.placements == (S(dim),) and comm.get_comm_counts() == ({"all_to_all": 1} if halo else {})


def test_several_dims_at_once():
    for pool in (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), lambda x: F.avg_pool2d(x, 3, 2, 1)):
        out = compare(pool, [normal(2, 3, 7, 6)], mesh_of((2, 2)), [[S(2), S(3)]])
        assert out[0].placements == (S(2), S(3))


def test_integers():
    x = torch.arange(2 * 8).reshape(1, 2, 8)
    for where in (R, S(1), S(2)):
        out, index = F.max_pool1d(place(x, where), 3, 2, return_indices=True)
        expected = F.max_pool1d(x, 3, 2, return_indices=True)
        assert torch.equal(out.full_tensor(), expected[0]) and torch.equal(index.full_tensor(), expected[1])


def test_gradient_of_the_gradient():
    def second(x):
        return torch.autograd.grad(F.avg_pool1d(x, 3, 2, 1).square().sum(), x, create_graph=True)

    for where in (S(0), S(1), S(2)):
        compare(second, [normal(2, 2, 7)], mesh_of((2,)), [[where]])
