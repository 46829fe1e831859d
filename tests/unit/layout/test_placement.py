"""Placements: small values with torch's questions and readable text."""

import copy
import pickle

import pytest

from shardwise import Partial, Placement, Replicate, Shard
from shardwise.errors import PlacementError

ALL = [Replicate(), Shard(0), Shard(-1), Partial(), Partial("avg"), Partial("max"), Partial("norm", 2.0)]


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_values(placement: Placement) -> None:
    for same in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert same == placement
        assert hash(same) == hash(placement)
    assert [other for other in ALL if other == placement] == [placement]
    assert eval(repr(placement)) == placement
    with pytest.raises((AttributeError, TypeError)):
        placement.dim = 3


@pytest.mark.parametrize(
    ("placement", "text", "representation"),
    [
        (Replicate(), "R", "Replicate()"),
        (Shard(1), "S(1)", "Shard(dim=1)"),
        (Partial(), "P(sum)", "Partial('sum')"),
        (Partial("max"), "P(max)", "Partial('max')"),
        (Partial("norm", 3.0), "P(norm 3)", "Partial('norm', 3.0)"),
        (Partial("norm", float("inf")), "P(norm inf)", "Partial('norm', inf)"),
    ],
)
def test_text(placement: Placement, text: str, representation: str) -> None:
    assert (str(placement), repr(placement)) == (text, representation)


def test_questions() -> None:
    assert Replicate().is_replicate() and not Replicate().is_shard() and not Replicate().is_partial()
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert Partial("max").is_partial() and Partial("max").is_partial("max") and not Partial("max").is_partial("sum")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard("0"), "Shard takes one tensor dimension as an int, got '0'"),
        (lambda: Shard(True), "Shard takes one tensor dimension as an int, got True"),
        (
            lambda: Partial("median"),
            "Partial('median'): the reduction must be one of sum, avg, max, min, product, norm",
        ),
        (lambda: Partial("norm"), "Partial('norm', p) needs its order p; the other reductions take none"),
        (lambda: Partial("sum", 2.0), "Partial('norm', p) needs its order p; the other reductions take none"),
    ],
)
def test_errors(make, text: str) -> None:
    with pytest.raises(PlacementError) as error:
        make()
    assert str(error.value) == text
