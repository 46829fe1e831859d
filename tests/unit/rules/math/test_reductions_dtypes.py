"""Reductions of every dtype, of nothing, and of pending values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
norm = torch.linalg.vector_norm


def complex_of(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x.flip(0) * 2)


COMPLEX = {
    "sum": lambda a: a.sum(0),
    "mean": lambda a: a.mean(),
    "prod": lambda a: a.prod(0),
    "var": lambda a: a.var(0),
    "std": lambda a: a.std(),
    "std_mean": lambda a: torch.std_mean(a, 0),
    "norm": lambda a: a.norm(),
    "norm 1": lambda a: norm(a, 1, dim=0),
    "norm inf": lambda a: norm(a, float("inf"), dim=0),
    "logsumexp": lambda a: a.logsumexp(0),
    "all": lambda a: (a.all(), a.any(0), a.count_nonzero()),
}


@pytest.mark.parametrize("op", COMPLEX.values(), ids=COMPLEX)
def test_complex(op):
    """Values and gradients, which enter and leave as real numbers."""

    def run(a):
        out = op(complex_of(a))
        outs = out if isinstance(out, tuple) else [out]
        return [part for y in outs for part in ((y.real, y.imag) if y.is_complex() else (y,))]

    for mesh, where in [((4,), [S(0)]), ((2,), [S(1)]), ((2, 2), [S(1), S(0)]), ((2,), [P()])]:
        compare(run, [normal(5, 3)], mesh_of(mesh), [where])


INTEGERS = {
    "sum": lambda a: (a.sum(), a.sum(0, dtype=torch.float64), a.nansum(1)),
    "prod": lambda a: a.prod(0),
    "extrema": lambda a: (a.max(), a.min(0), a.amax(1), a.amin(0), *torch.aminmax(a), *torch.aminmax(a, dim=1)),
    "arg": lambda a: (a.argmax(), a.argmin(0)),
    "truth": lambda a: (a.all(), a.any(0), a.count_nonzero(0), a.all((0, 1)), a.any(())),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("op", INTEGERS.values(), ids=INTEGERS)
def test_integers(op, dtype):
    if dtype == torch.bool and op is INTEGERS["arg"]:
        pytest.skip("torch has none")
    sweep(op, (normal(5, 3) * 3).to(dtype))


NOTHING = {
    "sum": lambda a: (a.sum(), a.sum(0), a.sum(1)),
    "mean": lambda a: (a.mean(), a.mean(0), a.mean(1)),
    "prod": lambda a: (a.prod(), a.prod(0)),
    "truth": lambda a: (a.all(), a.any(0), a.count_nonzero()),
    "norm": lambda a: (a.norm(), norm(a, 1, dim=0)),
    "logsumexp": lambda a: (a.logsumexp(0), a.logsumexp(1)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("op", [*NOTHING.values(), lambda a: a.var(0)], ids=[*NOTHING, "var"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_elements(op, shape):
    sweep(op, normal(*shape))


@pytest.mark.parametrize(
    "op", [lambda a: a.amax(), lambda a: a.max(0), lambda a: a.min(), torch.aminmax, lambda a: a.argmax(0)]
)
def test_torchs_refusal_of_nothing(op):
    x = normal(0, 3)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        op(x)
    for where in (S(0), S(1)):
        with pytest.raises(type(theirs.value)):
            op(place(x, where))


CONVERTED = {
    "sum": lambda a: a.sum(0, dtype=torch.float32),
    "mean": lambda a: a.mean(0, dtype=torch.float32),
    "prod": lambda a: a.prod(0, dtype=torch.float32),
    "norm": lambda a: norm(a.float(), 2, dim=0, dtype=torch.float64),
}


@pytest.mark.parametrize("op", CONVERTED.values(), ids=CONVERTED)
def test_dtype_argument(op):
    sweep(op, normal(5, 3), atol=1e-5)


def test_dtype_argument_of_integers():
    sweep(lambda a: (a.sum(dtype=torch.int32), a.prod(0, dtype=torch.int32)), normal(5, 3) * 4, backward=False)
    sweep(lambda a: a.mean(0, dtype=torch.float64), (normal(5, 3) * 9).long())


TERMS = {
    "float": (torch.tensor([[0.6, -1.4], [2.7, 0.1]]), P()),
    "avg": (torch.tensor([[0.6, -1.4], [2.7, 0.1]]), P("avg")),
    "int": (torch.tensor([[5, -1], [2, 4]]), P()),
}
LINEAR = {
    "sum": lambda a: a.sum(0),
    "sum to int": lambda a: a.sum(0, dtype=torch.int64),
    "sum to float": lambda a: a.sum(dtype=torch.float32),
    "mean": lambda a: a.mean(dtype=torch.float32),
    "nansum": lambda a: a.nansum(),
    "count": lambda a: a.count_nonzero(),
    "all": lambda a: a.all(0),
}


@pytest.mark.parametrize(("x", "pending"), TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("op", LINEAR.values(), ids=LINEAR)
def test_terms_that_differ_between_ranks(op, x, pending):
    d = sw.DTensor.from_local(sw.comm.ranked([x.clone(), x.flip(0) * 3]), mesh_of((2,)), [pending])
    torch.testing.assert_close(op(d).full_tensor(), op(d.full_tensor()))


def test_the_dtype_is_not_part_of_a_stale_plan():
    """Integers pass through what floats do not, in either order."""
    numbers = torch.tensor([0.6, 2.7])
    for op in (lambda a: a.sum(dtype=torch.int64), lambda a: a.cumsum(0, dtype=torch.int64)):
        for x in (torch.tensor([3, 4]), numbers, torch.tensor([1, 2]), numbers.double()):
            d = sw.DTensor.from_local(sw.comm.ranked([x.clone(), x.clone()]), mesh_of((2,)), [P()])
            assert torch.equal(op(d).full_tensor(), op(d.full_tensor()))


def test_where_linear_nothing_is_reduced_first():
    x = place(normal(5, 3), P())
    for op in (lambda a: a.sum(0), lambda a: a.mean(dtype=torch.float32), lambda a: a.sum(dtype=torch.complex128)):
        assert op(x).placements == (P(),)
    assert x.sum(dtype=torch.int64).placements == (R,)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "function", [torch.var, torch.std, torch.var_mean, torch.softmax, torch.log_softmax, torch.logcumsumexp]
)
def test_integers_are_refused_as_torch_does(function: Callable, dim: int) -> None:
    """Also over a sharded dim, where no kernel of torch's looks at the dtype; before anything moves."""
    whole = torch.arange(12).reshape(4, 3)
    dist = place(whole, S(dim), mesh=(2,))
    with pytest.raises((RuntimeError, NotImplementedError)) as torchs:
        function(whole, dim)
    with sw.debug.CommDebugMode() as comm, pytest.raises(torchs.type, match=r"only support|not implemented for 'Long'"):
        function(dist, dim)
    assert not comm.get_total_counts()
