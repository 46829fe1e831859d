"""Rules that do not fit their op are refused, in words that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_ops import AFFINE, affine, custom
from sweep import normal, place

import shardwise as sw
from shardwise.experimental import RuleError, register_sharding
from shardwise.experimental.register import _ways_of
from shardwise.rules import Call, Value

R, S0 = sw.Replicate(), sw.Shard(0)


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("ik, kj -> ij", r"'ik, kj -> ij' has 2 terms for the 3 tensor arguments of registertest::affine"),
        ("ik, kj, j", r"has no '->', but registertest.affine.default returns 1 tensors"),
        ("ii, kj, j -> ij", r"'ii' in 'ii, kj, j -> ij' is no term"),
        ("i1, kj, j -> ij", r"'i1' in 'i1, kj, j -> ij' is no term"),
    ],
)
def test_a_notation_that_does_not_fit_the_op(notation: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        register_sharding(affine, rule=notation)


def test_a_notation_that_does_not_fit_a_tensor() -> None:
    register_sharding(affine, rule="ik, kj, ij -> ij")
    with pytest.raises(RuleError, match=r"argument 'b' of registertest.affine.default has 1 dims, \[3\], but its term"):
        affine(*(place(x, R) for x in AFFINE))


def test_unknown_names_and_things_that_are_no_ops() -> None:
    with pytest.raises(RuleError, match=r"'c' is no tensor argument of registertest.affine.default: these are x, w, b"):
        register_sharding(affine, rule="ik, kj, j -> ij", linear=["c"])
    with pytest.raises(TypeError, match="register_sharding takes an op"):
        register_sharding(torch.sin)
    with pytest.raises(RuleError, match=r"aten.layer_norm.default is made of other ops"):
        register_sharding(torch.ops.aten.layer_norm.default, rule="*, *, * -> *")


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ([[S0]], r"must give pairs"),
        ([([S0], [S0])], r"gives 1 placements for 3 input tensors"),
        ([([], [S0, R, R])], r"gives 0 placements for 1 output tensors"),
        ([([S0], [sw.Shard(2), R, R])], r"shards dim 2 of a tensor with 2 dims"),
        (None, r"must give a list of ways to run it, not None"),
        ("S0", r"must give a list of ways to run it, not 'S0'"),
        ([([0], [S0, R, R])], r"gives 0, which is no placement such as Shard\(0\)"),
        ([([S0], [S0, None, R])], r"gives None for 'w', which is a tensor: \[Shard\(dim=0\), None, Replicate\(\)\]"),
    ],
)
def test_a_function_that_gives_something_else(ways: list, message: str) -> None:
    register_sharding(affine)(lambda x, w, b: ways)
    with pytest.raises(RuleError, match=message):
        affine(*(place(x, S0) for x in AFFINE))


def test_a_placement_for_what_is_no_tensor() -> None:
    op = custom("shifted(Tensor x, int n, Tensor y) -> Tensor", lambda x, n, y: x + n * y)
    register_sharding(op)(lambda x, n, y: [([S0], [S0, S0, None])])
    with pytest.raises(RuleError, match=r"gives S\(0\) for 'n', which is no tensor"):
        op(place(normal(4, 4), S0), 2, place(normal(4, 4), S0))


def test_a_function_that_takes_other_arguments() -> None:
    register_sharding(affine)(lambda x, w: [])
    with pytest.raises(RuleError, match=r"must take the arguments of registertest::affine\(.*too many positional"):
        affine(*(place(x, R) for x in AFFINE))


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (affine, {"linear": ["x"]}, r"reduce, linear and addends belong to a notation"),
        (affine, {"rule": "ik, kj, j -> ij", "reduce": "total"}, r"the reduction must be one of sum, avg"),
        (affine, {"rule": "ik, kj, j -> ij", "reduce": {"l": "sum"}}, r"reduce names 'l', but there is no such letter"),
        ("registertest::nothing", {"rule": "i -> i"}, r"there is no op registertest::nothing: import the library"),
    ],
)
def test_options_that_do_not_fit(op: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((RuleError, sw.errors.PlacementError), match=message):
        register_sharding(op, **options)
    with pytest.raises(RuleError, match=r"a sharding rule is a function of the op's arguments, or a notation, not 5"):
        register_sharding(affine)(5)


def described(function: Callable) -> Callable[..., Any]:
    """What a rule's function makes of descriptions of the arguments of `affine`."""

    def ways(*values: Value) -> Any:
        call = Call(affine._opoverload, values, {}, values, (Value(3, (5, 3), torch.float64),))
        return _ways_of(function, call)

    return ways


def test_a_function_judged_by_samples_does_not_know_where_tensors_lie() -> None:
    seen = described(lambda x, w, b: [([x.placements[0]], [x.placements[0], R, R])])
    with pytest.raises(RuleError, match="mesh and placements are not known to it"):
        seen(*(Value(i, tuple(x.shape), x.dtype) for i, x in enumerate(AFFINE)))
    with pytest.raises(AttributeError, match="a tensor in a sharding rule has no nonsense, but device_mesh, dim_map, "):
        described(lambda x, w, b: x.nonsense)(*(Value(i, tuple(x.shape), x.dtype) for i, x in enumerate(AFFINE)))
