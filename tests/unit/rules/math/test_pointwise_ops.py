"""Every element-wise op has a rule: swept over layouts, in place and into `out=` too."""

import operator

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep, sweep_in_place
from torch import Tensor, special

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def positive(x: Tensor) -> Tensor:
    return x * x + 0.1


def inside(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


ANYWHERE = (
    *("sin", "cos", "tan", "sinh", "cosh", "asinh", "atan", "erf", "erfc", "exp2", "expm1", "sinc", "i0", "reciprocal"),
    *("ceil", "floor", "trunc", "frac", "round", "sign", "sgn", "signbit", "square", "deg2rad", "rad2deg", "positive"),
    *("isfinite", "isinf", "isposinf", "isneginf", "isreal", "isnan", "angle", "logical_not"),
    *("conj_physical", "resolve_conj", "resolve_neg"),
)
POSITIVE = (torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, torch.lgamma, torch.digamma)
INSIDE = (torch.acos, torch.asin, torch.atanh, torch.erfinv, torch.logit)
UNARY = {
    **{name: getattr(torch, name) for name in ANYWHERE},
    **{f.__name__: lambda a, f=f: f(positive(a)) for f in POSITIVE},
    **{f.__name__: lambda a, f=f: f(inside(a)) for f in INSIDE},
    **{name: getattr(special, name) for name in ("entr", "erfcx", "log_ndtr", "ndtr", "i0e", "i1", "i1e")},
    "acosh": lambda a: torch.acosh(positive(a) + 1),
    "polygamma": lambda a: torch.polygamma(2, positive(a)),
    "mvlgamma": lambda a: torch.mvlgamma(positive(a) + 2, 3),
    "ndtri": lambda a: special.ndtri(inside(a)),
    "float_power": lambda a: torch.float_power(positive(a), 1.5),
    "pow of a number": lambda a: torch.pow(2.5, a),
    "bessel": lambda a: special.bessel_j0(a.detach()),
    "round to": lambda a: torch.round(a, decimals=1),
    "frexp": lambda a: torch.frexp(a),
    "clamp_max": lambda a: a.clamp_max(0.3),
    "clip": lambda a: torch.clip(a, -0.2, 0.3),
    "nan_to_num": lambda a: torch.nan_to_num(a.log(), nan=2.0),
    "celu": F.celu,
    "elu": lambda a: F.elu(a, 0.7),
    "selu": F.selu,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu6": F.relu6,
    "rrelu": lambda a: F.rrelu(a, training=False),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda a: F.threshold(a, 0.1, 20.0),
    "glu rows": lambda a: F.glu(a, 0),
    "glu columns": lambda a: F.glu(a, 1),
}


@pytest.mark.parametrize("op", UNARY.values(), ids=UNARY)
def test_unary(op):
    sweep(op, normal(4, 6)[:, :2].contiguous())


BINARY = {
    "fmod": lambda a, b: torch.fmod(a, positive(b)),
    "remainder": lambda a, b: torch.remainder(a, positive(b)),
    "floor_divide": lambda a, b: torch.floor_divide(a.detach(), positive(b).detach()),
    "pow": lambda a, b: torch.pow(positive(a), b),
    "xlogy": lambda a, b: torch.xlogy(a, positive(b)),
    "xlog1py": lambda a, b: special.xlog1py(a, positive(b)),
    "zeta": lambda a, b: special.zeta(positive(a).detach() + 1, positive(b).detach()),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "minimum": torch.minimum,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "nextafter": lambda a, b: torch.nextafter(a.detach(), b.detach()),
    "heaviside": lambda a, b: torch.heaviside(a.detach(), b.detach()),
    "ldexp": lambda a, b: torch.ldexp(a, b.detach().int()),
    "logaddexp2": torch.logaddexp2,
    "isclose": torch.isclose,
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
    "true_divide": torch.true_divide,
    "igamma": lambda a, b: torch.igamma(positive(a).detach(), positive(b).detach()),
    "polar": lambda a, b: torch.polar(positive(a), b).abs(),
    "complex": lambda a, b: torch.complex(a, b).abs(),
    "prelu": lambda a, b: F.prelu(a, b.flatten()[:1]),
    "clamp both": lambda a, b: torch.clamp(a, -positive(b), positive(b)),
}


@pytest.mark.parametrize("op", BINARY.values(), ids=BINARY)
def test_binary(op):
    sweep(op, normal(5, 2), normal(2))


def test_ternary():
    sweep(lambda a, b, c: torch.addcdiv(a, b, positive(c), value=2), normal(5, 2), normal(2), normal(5, 1))
    sweep(lambda a, b: F.prelu(a, b), normal(2, 5, 3), normal(5))


INTEGER = {
    **{f.__name__: f for f in (torch.gcd, torch.lcm, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)},
    **{f.__name__: f for f in (torch.bitwise_left_shift, torch.bitwise_right_shift, operator.lshift, operator.rshift)},
    **{f.__name__: f for f in (torch.floor_divide, torch.remainder, torch.div, torch.pow, torch.maximum)},
    "invert": lambda a, b: ~a,
    "number": lambda a, b: a.bitwise_and(6) + (a >> 1) * b,
}


@pytest.mark.parametrize("op", INTEGER.values(), ids=INTEGER)
def test_integers(op):
    sweep(op, torch.arange(1, 11).view(5, 2), torch.tensor([3, 2]))


METHODS = (Tensor.abs_, Tensor.sigmoid_, Tensor.neg_, Tensor.round_, Tensor.erf_, Tensor.exp_, Tensor.sin_)
IN_PLACE = {
    **{method.__name__: method for method in METHODS},
    "gelu_": lambda a: torch.ops.aten.gelu_(a),
    "threshold_": lambda a: F.threshold_(a, 0.1, 20.0),
    "relu_": F.relu_,
    "elu_": lambda a: F.elu(a, inplace=True),
    "hardtanh_": F.hardtanh_,
    "gt_": lambda a: a.gt_(0.1),
    "eq_": lambda a: a.eq_(a),
    "clamp_min_": lambda a: a.clamp_min_(0.2),
    "pow_": lambda a: a.pow_(2),
    "nan_to_num_": lambda a: a.nan_to_num_(),
    "copysign_": lambda a: a.copysign_(-1.0),
    "xlogy_": lambda a: a.xlogy_(2.0),
    "addcdiv_": lambda a: a.addcdiv_(a.detach() * 2, positive(a.detach())),
    "operator": lambda a: operator.itruediv(a, 2),
}


@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(op):
    accepted = sweep_in_place(op, normal(5, 2))
    assert ((S(0),),) in accepted and ((S(1),),) in accepted and ((R,),) in accepted


def test_heaviside_in_place():
    """torch has no gradient for it."""
    x = place(normal(5, 2), S(0))
    assert torch.equal(x.heaviside_(x.new_ones(())).full_tensor(), (normal(5, 2) > 0).double())


def test_integers_in_place():
    for op in (operator.irshift, operator.ilshift, operator.iand, Tensor.gcd_, Tensor.lcm_):
        for where in (R, S(0), S(1)):
            x, y = torch.arange(1, 11).view(5, 2), torch.tensor([3, 2])
            d = place(x, where)
            assert op(d, place(y, R)) is d
            assert d.placements == (where,) and torch.equal(d.full_tensor(), op(x, y))


@pytest.mark.parametrize("where", [R, S(0), S(1)], ids=str)
def test_out(where):
    x, y = normal(5, 2), normal(2)
    for op in (torch.add, torch.mul, torch.atan2, torch.maximum, torch.lt, torch.copysign):
        expected = op(x, y)
        out = place(torch.empty_like(expected), where)
        with torch.no_grad():
            assert op(place(x, S(0)), place(y, R), out=out) is out
        assert out.placements == (where,) and torch.equal(out.full_tensor(), expected)


def test_nothing_moves():
    """One call for each of the ops that torch does not tag."""
    x = place(normal(8, 6), S(0))
    ints = place(torch.arange(1, 49).view(8, 6), S(0))
    with sw.strict(), CommDebugMode() as comm:
        for op in (F.glu, F.logsigmoid, F.rrelu, F.hardswish):
            assert op(x).placements == (S(0),)
        assert x.clone().abs_().placements == x.clone().gt_(0).placements == (S(0),)
        assert torch.complex(x, x).placements == ints.clone().gcd_(ints).placements == (S(0),)
    assert not comm.get_comm_counts()


def test_promotion_with_numbers_and_0_dim_tensors():
    ints, halves = torch.arange(10).view(5, 2), normal(5, 2).bfloat16()
    for number in (2, 2.5, True, 1j, torch.tensor(2.5, dtype=torch.float64), torch.tensor(3), torch.tensor(True)):
        for x in (ints, halves, ints > 3):
            for op in (torch.add, torch.mul, torch.eq, torch.true_divide):
                expected = op(x, number)
                for where in (R, S(0), S(1)):
                    found = op(place(x, where), number)
                    assert found.dtype == expected.dtype and torch.equal(found.full_tensor(), expected)
