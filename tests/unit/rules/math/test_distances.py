"""Norms and distances; histograms and membership."""

import math

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
inf, nan = math.inf, math.nan

NORMS = {
    "norm": lambda a: torch.norm(a, 3),
    "norm dim": lambda a: torch.norm(a, 1, dim=0, keepdim=True),
    "pairwise": lambda a: F.pairwise_distance(a, a.flip(0) + 1),
    "pairwise 3": lambda a: F.pairwise_distance(a, a.flip(0) + 1, p=3, keepdim=True),
    "normalize": lambda a: F.normalize(a, dim=0),
    "renorm": lambda a: a.renorm(2, 0, 1.0),
    "renorm last": lambda a: a.renorm(1, -1, 2.0),
    "matrix 1": lambda a: torch.linalg.matrix_norm(a, 1),
    "matrix inf": lambda a: torch.linalg.norm(a, -inf),
    "pdist": lambda a: F.pdist(a),
    "pdist 1": lambda a: F.pdist(a, p=1),
    "pdist inf": lambda a: F.pdist(a, p=inf),
}


@pytest.mark.parametrize("op", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("shape", [(5, 3), (3, 2)])
def test_norm(op, shape):
    sweep(op, normal(*shape))


RENORMS = {"2": (2, 0, 1.0), "1": (1, -1, 2), "3": (3.0, 1, 0.7), "a half": (0.5, 0, 1.0), "of zeros": (2, 0, 0)}


@pytest.mark.parametrize("how", RENORMS.values(), ids=RENORMS)
def test_renorm(how):
    x = normal(4, 3, 2)
    x[1] = 0
    x[0, 1:] = 0
    sweep(lambda a: (a.renorm(*how), torch.renorm(a.clone(), *how) * a), x, partial=how[0] != 0.5)
    sweep(lambda a: a.clone().renorm_(*how), x, partial=False)


def test_renorm_in_place():
    x = normal(5, 3)
    d = place(x, S(0), mesh=(4,))
    with CommDebugMode() as comm, sw.strict():
        assert d.renorm_(2, 0, 1.0) is d
        assert not comm.get_comm_counts()
    torch.testing.assert_close(d.full_tensor(), x.renorm(2, 0, 1.0))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_renorm_of_parts_of_slices_is_gathered():
    x = normal(5, 3)
    d = place(x, S(1), mesh=(4,))
    assert d.renorm_(2, 0, 1.0) is d and d.placements == (S(1),)
    torch.testing.assert_close(d.full_tensor(), x.renorm(2, 0, 1.0))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_renorm_of_halves_and_complex_numbers():
    for dtype in (torch.bfloat16, torch.complex128):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
        torch.testing.assert_close(place(x, S(1)).renorm(2, 0, 1.0).full_tensor(), x.renorm(2, 0, 1.0))


DISTANCES = {
    "dist": lambda a, b: torch.dist(a, b),
    "dist 1": lambda a, b: torch.dist(a, b, 1),
    "dist inf": lambda a, b: torch.dist(a, b, inf),
    "dist -inf": lambda a, b: torch.dist(a, b, -inf),
    "cdist": lambda a, b: torch.cdist(a, b),
    "cdist 1": lambda a, b: torch.cdist(a, b, p=1),
    "cdist 3": lambda a, b: torch.cdist(a, b, p=3),
    "cdist 0": lambda a, b: torch.cdist(a, b, p=0),
    "cdist inf": lambda a, b: torch.cdist(a, b, p=inf),
    "cdist by matmul": lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"),
}


@pytest.mark.parametrize("op", DISTANCES.values(), ids=DISTANCES)
def test_distance(op):
    sweep(op, normal(5, 3), normal(5, 3) + normal(3, 5).T)


def test_distance_between_many_rows():
    sweep(torch.cdist, normal(30, 3), normal(4, 3))


def test_distance_with_a_batch():
    sweep(torch.cdist, normal(2, 5, 3), normal(2, 4, 3))
    sweep(lambda a, b: torch.cdist(a, b, p=1), normal(2, 5, 3), normal(4, 3))
    sweep(torch.dist, normal(2, 3), normal(3))


def test_distance_without_a_gradient():
    sweep(lambda a, b: torch.dist(a, b, 0), normal(5, 3), normal(5, 3), backward=False)


def test_distance_of_equal_rows():
    """Torch's gradient of a distance that is zero is zero, also where only one rank's part of it is."""
    x = normal(4, 3)
    y = x.clone()
    y[1, 2] += 1
    for p in (1.0, 2.0, 3.0):
        sweep(lambda a, b, p=p: torch.cdist(a, b, p=p), x, y, partial=False)


@pytest.mark.parametrize(
    ("places", "out"),
    [((S(0), R), S(0)), ((R, S(0)), S(1)), ((S(1), S(1)), P("norm", 1.0))],
    ids=["rows", "columns", "features"],
)
def test_distances_are_computed_where_the_rows_lie(places, out):
    x, y = (place(normal(n, 40), where) for n, where in zip((50, 60), places, strict=True))
    with CommDebugMode() as comm, sw.strict():
        assert torch.cdist(x, y, p=1).placements == (out,)
    assert comm.get_total_counts() == 0


# Histograms

HISTOGRAMS = {
    "range": lambda a: a.histc(5, -1, 1),
    "of the data": lambda a: a.histc(7),
    "of the data, said so": lambda a: a.histc(3, 2, 2),
}


@pytest.mark.parametrize("op", HISTOGRAMS.values(), ids=HISTOGRAMS)
@pytest.mark.parametrize(
    "x", [normal(9, 3), normal(3), torch.full((5,), 3.0), normal()], ids=["many", "few", "equal", "0-d"]
)
def test_histc(op, x):
    sweep(op, x, backward=False)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_the_range_of_a_histogram_is_not_part_of_a_stale_plan():
    x = normal(9)
    d = place(x, S(0))
    for low, high in [(-1.0, 1.0), (0.0, 0.0), (-2.0, 1.0), (1.0, 1.0)]:
        assert torch.equal(d.histc(4, low, high).full_tensor(), x.histc(4, low, high))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_histc_of_a_nan():
    x = torch.tensor([1.0, nan, 2, 3])
    for data in (x, place(x, S(0))):
        with pytest.raises(RuntimeError, match=r"torch.histc: range of \[-?nan, -?nan\] is not finite"):
            data.histc(3)


# Membership


@pytest.mark.parametrize("invert", [False, True])
def test_isin(invert):
    x, tests = torch.arange(12).reshape(4, 3), torch.tensor([7, 1, 3, 99, 11])
    sweep(lambda a, b: torch.isin(a, b, invert=invert), x, tests)
    sweep(lambda a: (torch.isin(a, 7, invert=invert), torch.isin(7, a, invert=invert)), x)


def test_isin_does_not_gather_the_set():
    x, tests = place(torch.arange(40), R), place(torch.arange(30) * 2, S(0))
    with CommDebugMode() as comm, sw.strict():
        assert torch.isin(x, tests).placements == (P("max"),)
    assert comm.get_total_counts() == 0


# Covariance: traced as sums and a product


@pytest.mark.parametrize("op", [torch.cov, torch.corrcoef, lambda a: a.cov(correction=0), lambda a: a.corrcoef()])
def test_covariance(op):
    sweep(op, normal(4, 7))
    sweep(op, normal(7))
    sweep(op, (normal(4, 7) * 9).long(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_covariance_in_special_cases():
    sweep(torch.cov, normal(3, 1))
    sweep(torch.cov, normal())
    x = torch.complex(normal(3, 4), normal(4, 3).T)
    sweep(lambda a: (torch.cov(a), torch.corrcoef(a)), x)
    with pytest.raises(RuntimeError, match="two or fewer dimensions but got an input with 3"):
        torch.cov(place(normal(2, 2, 2), S(0)))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_weighted_covariance_is_gathered():
    x, weights = normal(3, 4), torch.tensor([1, 2, 0, 3])
    result = torch.cov(place(x, S(1)), fweights=place(weights, S(0)))
    torch.testing.assert_close(result.full_tensor(), torch.cov(x, fweights=weights))


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim arg is deprecated")
def test_the_dim_of_a_cross_product_is_that_of_the_whole():
    x = normal(5, 3)
    result = torch.cross(place(x, S(0)), place(x.flip(0), S(0)))
    torch.testing.assert_close(result.full_tensor(), torch.cross(x, x.flip(0)))
