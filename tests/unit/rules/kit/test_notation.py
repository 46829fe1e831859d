"""Rules as data: from factors to strategies."""

from shardwise.layout import Partial
from shardwise.rules.kit.notation import Factors, dims_of, einsum
from shardwise.rules.kit.types import SUM, Strategy

AVG = Partial("avg")


def ways(factors):
    return [(way.ins, way.outs) for way in factors.strategies()]


def test_contraction():
    """A factor that the output lacks leaves a pending sum."""
    assert [(way.ins, way.outs) for way in einsum("ik,kj->ij").strategies(None)] == [
        ((None, None), (None,)),
        ((0, None), (0,)),
        ((1, 0), (SUM,)),
        ((None, 1), (1,)),
    ]


def test_linear_operands_may_be_pending_one_at_a_time():
    found = [(way.ins, way.outs) for way in einsum("ik,kj->ij", linear=[{0}, {1}]).strategies(None)]
    assert found[4:] == [((p, None), (p,)) for p in (SUM, AVG)] + [((None, p), (p,)) for p in (SUM, AVG)]


def test_jointly_linear_operands_are_pending_together():
    factors = Factors([("i",), ("i",)], [("i",)], linear=[frozenset({0, 1})])
    assert ways(factors) == [
        ((None, None), (None,)),
        ((0, 0), (0,)),
        ((SUM, SUM), (SUM,)),
        ((AVG, AVG), (AVG,)),
    ]


def test_a_capital_or_none_must_be_whole():
    assert [way.ins for way in einsum("iK->iK").strategies(None)] == [(None,), (0,)]
    assert ways(Factors([(None, "a")], [("a", None)])) == [((None,), (None,)), ((1,), (0,))]


def test_a_named_reduction_or_none():
    largest = Partial("max")
    assert ways(Factors([("i", "k")], [("i",)], reduce={"k": largest}))[-1] == ((1,), (largest,))
    assert ways(Factors([("i", "k")], [("i",)], reduce={"k": None})) == [((None,), (None,)), ((0,), (0,))]


def test_an_addend_is_split_where_the_contraction_is():
    """`bias + x @ w`: with k sharded, the bias must be one term of the sum, not one per rank."""
    factors = Factors([("j",), ("i", "k"), ("k", "j")], [("i", "j")], addends=frozenset({0}))
    assert dict(ways(factors))[(SUM, 1, 0)] == (SUM,)
    assert dict(ways(factors))[(0, None, 1)] == (1,)
    assert dict(ways(factors))[(None, 0, None)] == (0,)


def test_several_outputs():
    assert ways(Factors([("i", "j")], [("i", "j"), ("i",)])) == [
        ((None,), (None, None)),
        ((0,), (0, 0)),
        ((1,), (1, SUM)),
    ]


def test_strategies_are_values():
    """Equal strategies are one: axes that share one are cut together, whatever the function that resizes."""
    assert Strategy((0,), (0,), resize=len) == Strategy((0,), (0,))
    assert len({Strategy((0,), (0,)), Strategy((0,), (0,)), Strategy((1,), (0,))}) == 2


def test_dims_of():
    assert dims_of(3) == ("0", "1", "2") and dims_of(2, "index") == ("index0", "index1")
