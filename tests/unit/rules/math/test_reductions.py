"""Reductions."""

import math

import pytest
import torch
from features import differentiates
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
norm = torch.linalg.vector_norm
inf = math.inf

OPS = {
    "sum": lambda a: a.sum(),
    "sum dim": lambda a: a.sum(0),
    "sum keepdim": lambda a: a.sum((0, -1), keepdim=True),
    "sum no dims": lambda a: a.sum(()),
    "nansum": lambda a: a.nansum(0),
    "mean": lambda a: a.mean(),
    "mean dim": lambda a: a.mean(1, keepdim=True),
    "prod": lambda a: a.prod(),
    "prod dim": lambda a: a.prod(0),
    "var": lambda a: a.var(0),
    "var biased": lambda a: a.var((0, 1), correction=0, keepdim=True),
    "std": lambda a: a.std(),
    "var_mean": lambda a: torch.var_mean(a, 1),
    "std_mean": lambda a: torch.std_mean(a, 0, correction=2),
    "norm": lambda a: a.norm(),
    "norm 0": lambda a: norm(a, 0, dim=0),
    "norm 1": lambda a: norm(a, 1, dim=0),
    "norm 3": lambda a: norm(a, 3.0, dim=1, keepdim=True),
    "norm inf": lambda a: norm(a, inf, dim=0),
    "norm -inf": lambda a: norm(a, -inf),
    "norm -1": lambda a: norm(a, -1),
    "frobenius": lambda a: torch.linalg.matrix_norm(a),
    "logsumexp": lambda a: a.logsumexp(0),
    "logsumexp all": lambda a: a.logsumexp((0, 1), keepdim=True),
    "max": lambda a: a.max(),
    "max dim": lambda a: a.max(0),
    "min dim": lambda a: a.min(1, keepdim=True),
    "amax": lambda a: a.amax(0),
    "amin": lambda a: a.amin((0, 1)),
    "argmax": lambda a: a.argmax(),
    "argmax dim": lambda a: a.argmax(1, keepdim=True),
    "argmin dim": lambda a: a.argmin(0),
    "argmin keepdim": lambda a: a.argmin(None, keepdim=True),
    "aminmax": lambda a: torch.aminmax(a),
    "aminmax dim": lambda a: torch.aminmax(a, dim=0, keepdim=True),
    "all": lambda a: (a > -1).all(),
    "all dims": lambda a: (a > -1).all((0, 1), keepdim=True),
    "all no dims": lambda a: a.all(()),
    "any dim": lambda a: (a > 1).any(0),
    "any dims": lambda a: a.any((1,)),
    "hash_tensor": lambda a: torch.hash_tensor(a.detach(), 1).to(torch.int64),
    "count_nonzero": lambda a: (a > 0).count_nonzero(0),
    "count_nonzero dims": lambda a: a.count_nonzero((0, 1)),
    "nanmean": lambda a: a.nanmean(0, keepdim=True),
    "sum_to_size": lambda a: a.sum_to_size(1, a.shape[1]),
}
PROGRAMS = ("var", "std", "norm", "logsumexp", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_reduction(op):
    sweep(op, normal(5, 3), backward=differentiates(op, normal(5, 3)))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_dims_shorter_than_the_mesh(op):
    """Some ranks hold nothing, and must still take part."""
    x = normal(3, 1, 2)[:, 0] if op is OPS["frobenius"] else normal(3, 2)
    sweep(op, x, backward=differentiates(op, x))


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "amax", "argmin", "max", "logsumexp", "all", "norm"])
def test_of_a_scalar(op, dim):
    """A tensor without dims may be reduced over "dim 0"."""
    sweep(lambda a: getattr(a, op)(dim=dim), normal())


EXACT = {
    "ties in amax": (lambda a: a.amax(0), [0.0, 0, 0, 5, 5]),
    "ties in max": (lambda a: a.max(), [5.0, 1, 5, 2, 5]),
    "ties in max dim": (lambda a: a.max(0), [1.0, 5, 5, 2, 5]),
    "ties in aminmax": (lambda a: torch.aminmax(a), [1.0, 5, 1, 5, 5, 1]),
    "nan in amax": (lambda a: a.amax(0), [1.0, math.nan, 3, math.nan]),
    "nan in aminmax": (lambda a: torch.aminmax(a, dim=0), [1.0, math.nan, 3, 2]),
    "nan in min": (lambda a: a.min(), [1.0, math.nan, 3, math.nan]),
    "nan in logsumexp": (lambda a: a.logsumexp(0), [1.0, math.nan, 3, 2]),
    "nan in var": (lambda a: torch.var_mean(a, 0), [1.0, math.nan, 3, 2]),
    "nan in norm": (lambda a: norm(a, inf), [1.0, math.nan, 3, 2]),
    "nan in any": (lambda a: (a.any(), a.all()), [0.0, math.nan, 0, 0]),
    "all minus infinity": (lambda a: a.max(0), [-inf] * 5),
    "nan in max": (lambda a: a.max(0), [1.0, math.nan, 3, math.nan]),
    "nan in argmax": (lambda a: a.argmax(), [1.0, 7, math.nan, 3, math.nan]),
    "nan in nansum": (lambda a: a.nansum(), [1.0, 7, math.nan, 3, math.nan]),
    "nan in nanmean": (lambda a: a.nanmean(), [1.0, 7, math.nan, 3, math.nan]),
    "zeros in prod": (lambda a: a.prod(), [2.0, 0, 3, 4, 5]),
    "two zeros in prod": (lambda a: a.prod(), [2.0, 0, 3, 0, 5]),
    "logsumexp of infinity": (lambda a: a.logsumexp(0), [1.0, 2, inf]),
    "logsumexp of nothing": (lambda a: a.logsumexp(0), [-inf] * 5),
    "std of equals": (lambda a: a.std(0), [2.0] * 5),
    "norm of zeros": (lambda a: norm(a), [0.0] * 5),
    "norm 1 with zeros": (lambda a: norm(a, 1), [0.0, 0, 0, 1, -2]),
    "norm inf with ties": (lambda a: norm(a, inf), [0.0, -2, 1, 2, 0]),
    "large": (lambda a: (a.logsumexp(0), a.var(0), a.softmax(0)), [1e3, 1e3 + 1, 1e3 - 2, 1e3, 1e3]),
}


@pytest.mark.parametrize(("op", "values"), EXACT.values(), ids=EXACT)
def test_special_values(op, values):
    x = torch.tensor(values, dtype=torch.float64)
    sweep(op, x, backward=differentiates(op, x))


def test_norm_of_order_below_one_with_a_shard_of_zeros():
    sweep(lambda a: norm(a, 0.5), torch.tensor([0.0, 0, 1, 2], dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("correction", [5, 9])
def test_no_degrees_of_freedom(correction):
    sweep(lambda a: a.var(0, correction=correction), normal(5, 3))


@pytest.mark.parametrize(
    "op",
    [
        lambda a: a.sum(0),
        lambda a: a.mean(0, dtype=torch.float64),
        lambda a: a.max(0),
        lambda a: a.argmin(),
        lambda a: a.prod(1),
        lambda a: a.logsumexp(0),
        lambda a: a.amin((0, 1)),
    ],
)
def test_integers(op):
    sweep(op, (normal(5, 3) * 9).long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op", [OPS["mean dim"], OPS["var"], OPS["std"], OPS["logsumexp"], OPS["max"], lambda a: torch.var_mean(a, 0)]
)
def test_half_precision_accumulates_as_torch_does(op, dtype):
    """Sums of shards in half precision would overflow, or lose digits that torch keeps."""
    x = (normal(800, 3) * 20 + 100).to(dtype)
    results, expected = op(place(x, S(0), mesh=(4,))), op(x)
    if isinstance(expected, torch.Tensor):
        results, expected = [results], [expected]
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result.full_tensor(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_half_precision_norm():
    x = torch.full((800, 3), 50.0, dtype=torch.float16)
    torch.testing.assert_close(norm(place(x, S(0)), 2, dim=0).full_tensor(), norm(x, 2, dim=0), rtol=1e-2, atol=0)


PENDING = {
    "sum": (lambda a: a.sum(0), P()),
    "mean": (lambda a: a.mean(), P()),
    "prod": (lambda a: a.prod(0), P("product")),
    "norm": (lambda a: a.norm(), P("norm", 2.0)),
    "all": (lambda a: (a > 0).all(), P("min")),
    "any": (lambda a: (a > 0).any(), P("max")),
    "count": (lambda a: (a > 0).count_nonzero(), P()),
    "kept": (lambda a: a.sum(1), S(0)),
    "max kept": (lambda a: a.amax(1), S(0)),
}


@pytest.mark.parametrize(("op", "out"), PENDING.values(), ids=PENDING)
def test_what_is_left_pending(op, out):
    x = place(normal(50, 30), S(0))
    with CommDebugMode() as comm:
        result = op(x)
    assert result.placements == (out,)
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize("name", [name for name in OPS if name.startswith(PROGRAMS)])
@pytest.mark.parametrize("size", [5, 400])
def test_nothing_is_gathered(name, size):
    x = place(normal(size, 3), S(0)).requires_grad_()
    with CommDebugMode() as comm:
        result = OPS[name](x)
        result = result[0] if isinstance(result, tuple) else result
        if result.requires_grad:
            result.sum().backward()
    assert set(comm.get_comm_counts()) <= {"all_reduce"}


def test_gradient_of_a_maximum_split_over_ranks():
    x = place(torch.tensor([0.0, 0, 0, 5]), S(0)).requires_grad_()
    x.amax().backward()
    assert x.grad.full_tensor().tolist() == [0, 0, 0, 1]


def test_reduction_of_reductions():
    """Every kind of pending value is reduced before what it does not pass through."""
    x = normal(5, 3)
    for op in ("sum", "avg", "max", "min"):
        d = place(x, P(op))
        for name in ("sum", "mean dim", "var", "norm", "argmax", "amax", "prod dim", "logsumexp"):
            torch.testing.assert_close(OPS[name](d).full_tensor(), OPS[name](x), msg=f"{name} of a pending {op}")
