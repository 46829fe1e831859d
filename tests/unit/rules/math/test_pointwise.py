"""Element-wise ops, copies, fills and `*_like`."""

import math

import pytest
import torch
from compare import check_shards
from sweep import mesh_of, normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

UNARY = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "abs": torch.abs,
    "sqrt of abs": lambda a: a.abs().sqrt(),
    "neg": torch.neg,
    "power": lambda a: a**2,
    "plus scalar": lambda a: a + 10,
    "scalar minus": lambda a: 1 - a,
    "times scalar": lambda a: -5 * a,
    "over scalar": lambda a: a / 3,
    "scalar over": lambda a: 2 / (a * a + 1),
    "truncated": lambda a: torch.div(a, 0.3, rounding_mode="trunc"),
    "remainder": lambda a: a % 0.3,
    "clamp": lambda a: a.clamp(-0.5, 0.5),
    "masked_fill": lambda a: a.masked_fill(a > 0, -1.0),
    "where scalar": lambda a: torch.where(a > 0, a, 0.5),
    "0-dim tensor": lambda a: a + torch.tensor(3.0, dtype=a.dtype),
    "twice the same": lambda a: a * a + a / (a * a + 1),
    "clone": torch.clone,
    "contiguous": lambda a: a.t().contiguous(),
    "to and back": lambda a: a.to(torch.float32).double(),
    "to int": lambda a: (a * 3).int(),
    "to bool": lambda a: a.clamp(min=0).bool(),
    "nan_to_num": torch.nan_to_num,
    "isnan": torch.isnan,
}

BINARY = {
    "add": lambda a, b: torch.add(a, b, alpha=3),
    "sub": torch.sub,
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "logaddexp": torch.logaddexp,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "less": torch.lt,
    "equal": lambda a, b: a == b * 1,
    "logical": lambda a, b: (a > 0) & (b > 0) | ~(a < b),
}


@pytest.mark.parametrize("op", UNARY.values(), ids=UNARY)
def test_unary(op):
    sweep(op, normal(5, 3))


@pytest.mark.parametrize("op", BINARY.values(), ids=BINARY)
@pytest.mark.parametrize("shape", [(5, 3), (3,), (5, 1)], ids=str)
def test_binary_with_broadcasting(op, shape):
    sweep(op, normal(5, 3), normal(*shape))


def test_three_operands():
    sweep(lambda a, b, c: torch.addcmul(a, b, c, value=2), normal(5, 3), normal(3), normal(5, 1))
    sweep(torch.lerp, normal(5, 3), normal(5, 3), normal(3))


@pytest.mark.parametrize("op", [UNARY["relu"], UNARY["times scalar"], UNARY["plus scalar"]])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 2, 1)], ids=str)
def test_few_elements(op, shape):
    """Dims smaller than the mesh: some ranks hold nothing."""
    sweep(op, normal(*shape))


IN_PLACE = {
    "add_": (lambda a, b: a.add_(b, alpha=2), [(R, R), (S(0), S(0)), (S(0), R), (S(0), P()), (P(), P()), (P(), R)]),
    "mul_": (lambda a, b: a.mul_(b), [(R, R), (S(1), S(1)), (S(0), P()), (P(), R), (P(), S(0))]),
    "copy_": (lambda a, b: a.copy_(b), [(R, R), (S(0), S(1)), (P(), P()), (R, S(0)), (P(), R)]),
    "clamp_": (lambda a, b: a.clamp_(b), [(R, R), (S(0), S(1)), (S(0), P()), (R, P())]),
    "lerp_": (lambda a, b: a.lerp_(b, 0.5), [(R, R), (S(0), R), (R, P())]),
}


@pytest.mark.parametrize(("op", "must"), IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(op, must):
    """What is written to keeps its layout; where that is impossible, nothing is written."""
    accepted = [tuple(p for (p,) in way) for way in sweep_in_place(op, normal(5, 3), normal(5, 3))]
    assert set(must) <= set(accepted)
    sweep_in_place(op, normal(5, 3), normal(3))


def test_in_place_on_a_pending_value():
    x = place(normal(5, 3), P())
    assert x.clamp_(max=9).placements == (P(),)
    torch.testing.assert_close(x.full_tensor(), normal(5, 3))
    assert x.add_(1.5).placements == x.sub_(2, alpha=0.5).placements == (P(),)
    torch.testing.assert_close(x.full_tensor(), normal(5, 3) + 0.5)
    assert x.fill_(3).placements == (P(),)
    assert (x.full_tensor() == 3).all()
    x = place(normal(5, 3), P())
    assert x.mul_(-2).placements == (P(),)
    torch.testing.assert_close(x.full_tensor(), normal(5, 3) * -2)
    assert not x.zero_().full_tensor().any()


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_reductions_pass_only_through_ops_that_allow_them(op):
    x = normal(5, 3)
    d = place(x, P(op))
    for function in (torch.neg, torch.clone, torch.relu, torch.abs, lambda a: a * -2, lambda a: a + 1, lambda a: a + a):
        torch.testing.assert_close(function(d).full_tensor(), function(x))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_reductions_stay_pending(op):
    d = place(normal(5, 3), P(op))
    assert d.clone().placements == d.detach().placements == (P(op),)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_linear_reductions_stay_pending(op):
    d = place(normal(5, 3), P(op))
    assert torch.neg(d).placements == (d * -2).placements == (d + 1).placements == (P(op),)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_numbers_and_pending_values(op):
    """Order and sign decide what passes through; a number seen before decides nothing."""
    terms = torch.tensor([[1.0, -3.0, math.inf], [2.0, 1.0, -2.0]], dtype=torch.float64)
    d = sw.DTensor.from_local(ranked(list(terms.clone())), mesh_of((2,)), [P(op)])
    x = {"sum": terms.sum(0), "avg": terms.mean(0), "max": terms.amax(0), "min": terms.amin(0)}[op]
    for n in (2, -5, 2.0, -5.0, 0.5, -0.1, 0, 0.0):
        for function in (
            torch.mul,
            torch.add,
            torch.sub,
            torch.rsub,
            torch.div,
            lambda a, n: torch.rsub(a, n, alpha=-1),
        ):
            torch.testing.assert_close(function(d, n).full_tensor(), function(x, n), equal_nan=True)


@pytest.mark.parametrize("op", ["max", "min"])
def test_gradients_of_pending_extrema(op):
    terms = torch.tensor([[1.0, -3.0], [2.0, -7.0]], dtype=torch.float64)
    for function in (lambda a: a * -2.0, lambda a: 3 - a, lambda a: a / 4, lambda a: a + 1.5):
        local = ranked(list(terms.clone())).requires_grad_()
        function(sw.DTensor.from_local(local, mesh_of((2,)), [P(op)])).full_tensor().sum().backward()
        x = terms.clone().requires_grad_()
        function(x.amax(0) if op == "max" else x.amin(0)).sum().backward()
        assert local.grad.tolist().values == tuple(x.grad.tolist())


def test_unsigned_numbers_have_no_order_to_reverse():
    d = place(torch.tensor([3, 200], dtype=torch.uint8), P("max"))
    assert torch.neg(d).tolist() == torch.neg(torch.tensor([3, 200], dtype=torch.uint8)).tolist()


@pytest.mark.parametrize(
    "op",
    [
        torch.mul,
        torch.div,
        torch.add,
        lambda x, number: torch.add(x, x, alpha=number),
        lambda x, number: torch.addcmul(x, x, x, value=number),
        lambda x, number: torch.addmm(x, x, x, alpha=number),
    ],
)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_pending_sum_and_a_number_that_is_not_finite(op, number):
    """Terms of both signs become infinities, of which no sum is taken; the plan for finite numbers is another."""
    whole = torch.tensor([[3.0, 2.0], [0.5, 4.0]])
    terms = [whole * 3, whole * 0, -2 * whole]
    x = sw.DTensor.from_local(ranked(terms), mesh_of((3,)), [P()])
    for factor in (2.0, number):
        torch.testing.assert_close(op(x, factor).full_tensor(), op(whole, factor), equal_nan=True)


def test_dividing_a_pending_sum_by_zero():
    """Infinity, as on one device: no term that is zero makes it NaN."""
    terms = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    d = sw.DTensor.from_local(ranked(list(terms.clone())), mesh_of((2,)), [P()])
    zero = place(torch.zeros(2, dtype=torch.float64), R)
    torch.testing.assert_close((d / zero).full_tensor(), terms.sum(0) / 0, equal_nan=True)
    torch.testing.assert_close(torch.addcdiv(zero, d, zero).full_tensor(), terms.sum(0) / 0, equal_nan=True)


PENDING = {
    "mul": (torch.mul, P(), R, P()),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), P(), P(), P()),
    "average": (torch.add, P("avg"), R, P("avg")),
    "addcmul": (lambda a, b: torch.addcmul(a, a, b, value=3), P(), R, P()),
}
STAYS = {
    "add": (torch.add, P(), P(), P()),
    "sub": (torch.sub, P("avg"), P("avg"), P("avg")),
    "sharded": (torch.mul, S(0), S(0), S(0)),
    "sliced": (torch.add, S(1), R, S(1)),
}


@pytest.mark.parametrize(
    ("op", "left", "right", "out"),
    [*(pytest.param(*case, id=name) for name, case in STAYS.items())]
    + [pytest.param(*case, id=name) for name, case in PENDING.items()],
)
def test_nothing_moves(op, left, right, out):
    a, b = place(normal(5, 3), left), place(normal(5, 3), right)
    with CommDebugMode() as comm:
        result = op(a, b)
    assert result.placements == (out,)
    assert comm.get_total_counts() == 0


def test_scalars_and_pending_sums():
    """A scalar added to a pending sum counts once, and is not remembered by the plan."""
    x = place(torch.arange(10.0).view(10, 1), S(0)).sum()
    assert x.placements == (P(),)
    assert (x + 10).item() == 55 and (10 - x).item() == -35
    assert (-5 * x).item() == -225 and (2 * x).item() == 90 and (0.5 * x).item() == 22.5


SCALED = {
    "times": lambda a, s: a * s,
    "clamp": lambda a, s: a.clamp(-s, s),
    "leaky_relu": torch.nn.functional.leaky_relu,
    "hardtanh": lambda a, s: torch.nn.functional.hardtanh(a, -abs(s), abs(s)),
    "where": lambda a, s: torch.where(a > 0, a, s),
    "masked_fill": lambda a, s: a.masked_fill(a > 0, s),
    "full_like": torch.full_like,
    "new_full": lambda a, s: a.new_full((5, 3), s),
}


@pytest.mark.parametrize("op", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("where", [R, S(0), P()], ids=str)
def test_a_scalar_is_no_part_of_the_plan(op, where):
    x = place(normal(5, 3), where)
    for scalar in (0.1, 0.5, -0.9, 2):
        torch.testing.assert_close(op(x, scalar).full_tensor(), op(normal(5, 3), scalar))


def test_type_promotion():
    ints, floats = torch.arange(15).view(5, 3), normal(5, 3).float()
    for function in (torch.add, torch.mul, torch.div, lambda a, b: a > b, lambda a, b: a + 1.5):
        expected = function(ints, floats)
        for where in (R, S(0), S(1)):
            for other in (R, S(0), P()):
                result = function(place(ints, where), place(floats, other))
                assert result.dtype == expected.dtype
                torch.testing.assert_close(result.full_tensor(), expected)


def test_conversions_of_pending_sums():
    x = place(normal(5, 3) * 4, P())
    assert x.to(torch.float32).placements == (P(),)
    torch.testing.assert_close(x.int().full_tensor(), (normal(5, 3) * 4).int())
    counts = place(torch.arange(60).view(20, 3), S(0)).sum(0)
    assert counts.placements == (P(),)
    torch.testing.assert_close(counts.double().full_tensor(), torch.arange(60).view(20, 3).sum(0).double())
    torch.testing.assert_close(counts.bool().full_tensor(), torch.arange(60).view(20, 3).sum(0).bool())


@pytest.mark.parametrize("where", [R, S(0), S(1), P(), P("max")], ids=str)
def test_new_tensors_lie_like_the_old_one(where):
    x = place(normal(5, 3), where)
    keeps = R if isinstance(where, P) else where
    with CommDebugMode() as comm:
        made = [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(5, 3), x.new_ones(5, 3)]
        other = x.new_full((7, 2), 3.0)
        whole = torch.empty_like(x), x.new_empty(4)
    assert comm.get_total_counts() == 0
    for new, value in zip(made, (0, 1, 2, 0, 1), strict=True):
        assert new.placements == (keeps,)
        torch.testing.assert_close(new.full_tensor(), torch.full((5, 3), value, dtype=torch.float64))
    assert other.placements == (R,)
    torch.testing.assert_close(other.full_tensor(), torch.full((7, 2), 3.0, dtype=torch.float64))
    assert [x.shape for x in whole] == [(5, 3), (4,)]


@pytest.mark.parametrize("where", [R, S(0), S(1), P()], ids=str)
def test_new_tensors_with_strides(where):
    x = place(normal(5, 3), where, mesh=(4,))
    for stride in ((3, 1), (1, 5), (6, 2)):
        new = x.new_empty_strided((5, 3), stride)
        assert new.shape == (5, 3) and new.placements == (R,) and new.stride() == stride
        check_shards(new.fill_(2.0))
    assert x.new_empty_strided((2, 2), (2, 1)).placements == (R,)
    like = torch.full_like(place(normal(2, 3, 5, 4), S(1)), 3.0, memory_format=torch.channels_last)
    assert like.placements == (S(1),) and like.is_contiguous(memory_format=torch.channels_last)


def test_copies_that_change_the_dtype():
    """A pending sum of fractions does not survive their rounding, whatever was copied before."""
    assert place(normal(5, 3), P()).copy_(place(normal(5, 3), P())).placements == (P(),)
    target, source = place(torch.zeros(5, 3, dtype=torch.int64), P()), normal(5, 3) * 4
    assert torch.equal(target.copy_(place(source, P())).full_tensor(), source.long()) and target.placements == (P(),)
    whole = place(torch.zeros(5, 3, dtype=torch.int64), S(0))
    assert torch.equal(whole.copy_(place(source, P())).full_tensor(), source.long())
    assert place(source, P()).float().copy_(place(source, P())).placements == (P(),)
