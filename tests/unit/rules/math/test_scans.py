"""Scans: over a sharded dim only the totals of the parts are exchanged."""

import math

import pytest
import torch
from compare import compare
from sweep import mesh_of, normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
inf, nan = math.inf, math.nan

OPS = {
    "cumsum": lambda a: a.cumsum(0),
    "cumsum last": lambda a: a.cumsum(-1),
    "cumprod": lambda a: a.cumprod(0),
    "cumprod last": lambda a: a.cumprod(-1),
    "logcumsumexp": lambda a: a.logcumsumexp(0),
    "cummax": lambda a: a.cummax(0),
    "cummin last": lambda a: a.cummin(-1),
    "cumulative_trapezoid": lambda a: torch.cumulative_trapezoid(a, dim=0),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("shape", [(7, 3), (3, 2), (9,)])
def test_scan(op, shape):
    """(3, 2): some ranks hold nothing, and must still take part."""
    sweep(op, normal(*shape))


@pytest.mark.parametrize("op", [OPS[name] for name in ("cumsum", "cumprod", "logcumsumexp", "cummax")])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_without_elements_or_dims(op, shape):
    sweep(op, normal(*shape))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("widths", [(1, 4, 0, 2), (0, 0, 7, 0), (0, 3, 1, 3)])
def test_uneven_shards(op, widths):
    x, mesh = normal(7, 3), mesh_of((4,))
    local = sw.comm.ranked([part.clone() for part in x.split(list(widths))])
    d = sw.DTensor.from_local(local, mesh, [S(0)], shape=x.shape, stride=x.stride()).requires_grad_()
    plain = x.clone().requires_grad_()
    expected, actual = op(plain), op(d)
    if isinstance(expected, tuple):
        assert torch.equal(actual[1].full_tensor(), expected[1])
        expected, actual = expected[0], actual[0]
    torch.testing.assert_close(actual.full_tensor(), expected)
    w = torch.randn_like(expected)
    (expected * w).sum().backward()
    (actual * sw.distribute_tensor(w, mesh)).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)


EXACT = {
    "zeros in cumprod": (lambda a: a.cumprod(0), [2.0, 3, 0, 5, 6, 7]),
    "zeros on two ranks": (lambda a: a.cumprod(0), [2.0, 0, 3, 5, 0, 7, 0]),
    "cumsum with infinities": (lambda a: a.cumsum(0), [1.0, inf, 3, -inf, 2]),
    "cumsum with a NaN": (lambda a: a.cumsum(0), [1.0, nan, 3, 4, 2]),
    "ties in cummax": (lambda a: a.cummax(0), [1.0, 5, 5, 2, 5, 5, 1]),
    "ties in cummin": (lambda a: a.cummin(0), [3.0, 3, 1, 1, 2, 1]),
    "NaNs in cummax": (lambda a: a.cummax(0), [1.0, 5, nan, 7, 2, nan, 9]),
    "NaNs in cummin": (lambda a: a.cummin(0), [nan, 5, 1, nan, 2, 0]),
    "infinite cummax": (lambda a: a.cummax(0), [-inf, -inf, -inf, -inf, 2]),
    "logcumsumexp after nothing": (lambda a: a.logcumsumexp(0), [-inf, -inf, -inf, 0, 1, 2]),
    "logcumsumexp of large values": (lambda a: a.logcumsumexp(0), [1e3, 1e3 + 1, -1e3, 1e3, 5.0]),
}


@pytest.mark.parametrize(("op", "values"), EXACT.values(), ids=EXACT)
def test_special_values(op, values):
    sweep(op, torch.tensor(values, dtype=torch.float64), partial=False)


@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp"])
def test_values_without_a_gradient(name):
    """Next to these, torch's own gradients are partly NaN, and which ones is an accident of its formula."""
    for values in ([2.0, 0, 3, nan, 0, 7], [1.0, 2, inf, 3, 4]):
        sweep(lambda a: getattr(a, name)(0), torch.tensor(values).double(), partial=False, backward=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.complex128])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax"])
def test_dtypes(name, dtype):
    x = (normal(7, 2) * 3).to(dtype) if dtype != torch.complex128 else torch.complex(normal(7, 2), normal(2, 7).T)
    if (name == "cummax" and x.is_complex()) or (name == "logcumsumexp" and not x.is_complex()):
        pytest.skip("torch has none")
    sweep(lambda a: getattr(a, name)(0), x)


def test_complex_gradients():
    def scans(a):
        z = torch.complex(a, a.flip(1))
        return [part for y in (z.cumsum(0), z.cumprod(0), z.logcumsumexp(0)) for part in (y.real, y.imag)]

    for where in (S(0), S(1), R):
        compare(scans, [normal(5, 2)], mesh_of((4,)), [[where]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_conversion_comes_before_the_scan(dtype):
    backward = dtype.is_floating_point
    sweep(lambda a: a.cumsum(0, dtype=dtype), normal(7, 2) * 3, atol=1e-5, backward=backward)
    sweep(lambda a: a.cumprod(0, dtype=dtype), normal(7, 2) * 3, atol=1e-4, backward=backward)


def test_pending_terms_are_added_before_their_digits_are_cut_off():
    half = torch.full((3,), 0.6)
    d = sw.DTensor.from_local(sw.comm.ranked([half, half.clone()]), mesh_of((2,)), [P()])
    assert d.cumsum(0, dtype=torch.int64).full_tensor().tolist() == [1, 2, 3]
    assert d.sum(dtype=torch.int64).full_tensor() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_as_torch_does(dtype):
    x = torch.full((600,), 1.01, dtype=dtype)
    result = place(x, S(0), mesh=(4,)).cumsum(0)
    assert result.dtype == dtype
    torch.testing.assert_close(result.full_tensor(), x.cumsum(0), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_in_place():
    """The program's result is written to the shards."""
    assert ((S(0),),) in sweep_in_place(lambda a: a.cumsum_(0), normal(7, 3))
    x = normal(7, 3)
    d = place(x, S(0), mesh=(4,)).requires_grad_()
    plain = x.clone().requires_grad_()
    written, expected = d.clone(), plain.clone()
    assert written.cumprod_(0) is written
    torch.testing.assert_close(written.full_tensor(), expected.cumprod_(0))
    written.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)


def test_out():
    x = normal(7, 3)
    out = place(torch.zeros(7, 3).double(), S(0))
    assert torch.cumsum(place(x, S(0)), 0, out=out) is out
    torch.testing.assert_close(out.full_tensor(), x.cumsum(0))


def test_second_derivatives():
    x = torch.tensor([2.0, 0, 3, 5, 0, 7, 1]).double()

    def second(a):
        (g,) = torch.autograd.grad(a.cumprod(0).sin().sum() + a.logcumsumexp(0).sin().sum(), a, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), a)[0]

    d = place(x, S(0), mesh=(4,)).requires_grad_()
    torch.testing.assert_close(second(d).full_tensor(), second(x.clone().requires_grad_()))


@pytest.mark.parametrize("op", [OPS[name] for name in ("cumsum", "cumprod", "logcumsumexp")])
def test_only_totals_are_exchanged(op):
    x = place(normal(400, 3), S(0), mesh=(4,)).requires_grad_()
    with CommDebugMode() as comm, sw.strict():
        result = op(x)
        value = result[0] if isinstance(result, tuple) else result
        assert value.placements == (S(0),)
        value.sum().backward()
    assert set(comm.get_comm_counts()) <= {"all_gather", "reduce_scatter", "all_reduce"}
    assert max(c.bytes for c in comm.comms) <= 4 * 3 * 8


def test_a_pending_sum_passes_through_cumsum():
    x = place(normal(6, 3), P())
    with CommDebugMode() as comm:
        assert x.cumsum(1).placements == (P(),)
    assert comm.get_total_counts() == 0
