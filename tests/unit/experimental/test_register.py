"""`register_sharding`: rules for custom ops, in torch's form and in the notation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_ops import AFFINE, affine, custom
from sweep import normal, place, sweep, sweep_in_place
from torch import Tensor

import shardwise as sw
from shardwise.experimental import RuleError, register_sharding
from shardwise.experimental.register import _ways_of
from shardwise.rules import Call, Value, rule_for
from shardwise.rules.kit import registry

R, S0, S1, SUM = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()


def by_notation() -> None:
    register_sharding(affine, rule="ik, kj, j -> ij", addends=["b"])


def by_function() -> None:
    @register_sharding(torch.ops.registertest.affine.default)
    def _(x: Any, w: Any, b: Any) -> list:
        assert (x.ndim, x.shape, w.tensor_meta.stride, b.dtype) == (2, (5, 4), (3, 1), torch.float64)
        return [
            ([S0], [S0, R, R]),
            ([sw.Shard(-1)], [R, sw.Shard(1), S0]),
            ([SUM], [S1, S0, SUM]),
        ]


@pytest.mark.parametrize("registered", [by_notation, by_function])
def test_a_custom_op_runs_sharded_with_its_gradient(registered: Callable) -> None:
    registered()
    sweep(affine, *AFFINE)
    report = sw.verify(affine, [AFFINE])
    assert (report.status, report.true, report.claimed) == ("verified", 2, 2), report


@pytest.mark.parametrize("registered", [by_notation, by_function])
@pytest.mark.parametrize(
    ("placed", "result"),
    [((S0, R, R), S0), ((R, S1, S0), S1), ((S1, S0, R), SUM)],
)
def test_a_custom_op_gathers_nothing(registered: Callable, placed: tuple, result: sw.Placement) -> None:
    registered()
    inputs = [place(x, where) for x, where in zip(AFFINE, placed, strict=True)]
    with sw.strict(), sw.debug.CommDebugMode() as mode:
        out = affine(*inputs)
    assert (out.placements, mode.get_total_counts()) == ((result,), 0)


def test_registering_forgets_plans() -> None:
    x, w, b = place(AFFINE[0], S0), place(AFFINE[1], R), place(AFFINE[2], R)
    with pytest.warns(sw.errors.FallbackWarning):
        assert affine(x, w, b).placements == (R,)
    by_notation()
    assert affine(x, w, b).placements == (S0,)
    register_sharding(affine, rule="Ik, kj, j -> Ij", addends=["b"])
    assert affine(x, w, b).placements != (S0,)


def test_keyword_only_tensors_in_any_order() -> None:
    op = custom(
        "scaled(Tensor x, *, Tensor scale, Tensor? shift=None, float factor=1.0) -> Tensor",
        lambda x, *, scale, shift=None, factor=1.0: x * scale * factor + (0 if shift is None else shift),
    )
    register_sharding(op, rule="ji, i, ji -> ji")
    x, scale, shift = normal(4, 5), normal(5), normal(4, 5).flip(0)
    sweep(lambda x, y, z: op(x, shift=z, scale=y, factor=2.0), x, scale, shift, backward=False)
    report = sw.verify(op, [((x,), {"shift": shift, "scale": scale}), ((x,), {"scale": scale})])
    assert report.status == "verified", report
    assert op(place(x, S1), scale=place(scale, S0)).placements == (S1,)


def test_an_op_that_writes_and_returns_nothing() -> None:
    def accumulate(total: Tensor, x: Tensor) -> None:
        total += x.sum(1)

    op = custom("accumulate(Tensor(a!) total, Tensor x) -> ()", accumulate)
    register_sharding(op, rule="i, ij ->")

    def call(total: Tensor, x: Tensor) -> Tensor:
        op(total, x)
        return total

    accepted = sweep_in_place(call, normal(5), normal(5, 4))
    assert ((S0,), (S0,)) in accepted
    report = sw.verify(op, [(normal(5), normal(5, 4))])
    assert report.sound, report
    total, x = place(normal(5), S0), place(normal(5, 4), S0)
    with sw.strict(), sw.debug.CommDebugMode() as mode:
        assert op(total, x) is None
    assert mode.get_total_counts() == 0


def test_a_custom_op_with_mutates_args() -> None:
    @torch.library.custom_op("registertest::halve", mutates_args={"x"})
    def halve(x: Tensor, by: Tensor) -> None:
        x /= by

    register_sharding(halve, rule="...i, i")
    x, by = place(normal(3, 4), S1), place(normal(4).abs() + 1, S0)
    with sw.strict():
        halve(x, by)
    torch.testing.assert_close(x.full_tensor(), normal(3, 4) / (normal(4).abs() + 1))


def test_several_outputs_and_lists() -> None:
    op = custom(
        "stats(Tensor[] xs, int dim) -> (Tensor, Tensor, Tensor[])",
        lambda xs, dim: (sum(xs), torch.stack(xs).amax((0, 1)), [x * 2 for x in xs]),
    )
    with pytest.raises(RuleError, match=r"2 terms for the 3 results"):
        register_sharding(op, rule="[ij] -> ij, j")
    op = custom(
        "pair(Tensor[] xs) -> (Tensor, Tensor)", lambda xs: (sum(xs[1:], xs[0]), torch.stack(xs).sum(0).amax(0))
    )
    register_sharding(op, rule="[ij] -> ij, j", reduce=None)
    sweep(lambda x, y: op([x, y]), normal(5, 4), normal(5, 4).flip(0), backward=False)
    out, best = op([place(normal(5, 4), S1), place(normal(5, 4), S1)])
    assert (out.placements, best.placements) == ((S1,), (S0,))
    many = custom("doubled(Tensor[] xs) -> Tensor[]", lambda xs: [x * 2 for x in xs])
    register_sharding(many, rule="[...] -> [...]")
    assert [x.placements for x in many([place(normal(5, 4), S1), place(normal(5, 4), S1)])] == [(S1,), (S1,)]


@pytest.mark.parametrize(("reduce", "function"), [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)])
def test_reductions(reduce: str, function: Callable) -> None:
    op = custom(f"total_{reduce}(Tensor x) -> Tensor", lambda x: function(x, 0))
    register_sharding(op, rule="ij -> j", reduce=reduce)
    sweep(op, normal(8, 4), partial=False, backward=False)
    assert op(place(normal(5, 4), S0)).placements == (sw.Partial(reduce),)


def test_a_wrong_rule_is_found_out() -> None:
    op = custom("averaged(Tensor x) -> Tensor", lambda x: x.mean(0))
    register_sharding(op, rule="ij -> j", reduce="avg")
    report = sw.verify(op, [(normal(5, 4),)])
    assert not report.sound
    assert any("S(0) -> P(avg)" in found["strategy"] and "off by" in found["problem"] for found in report.unsound)
    register_sharding(op, rule="Ij -> j")
    assert sw.verify(op, [(normal(5, 4),)]).status == "verified"


def test_other_overloads_keep_their_rule() -> None:
    ways = torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar

    @register_sharding(ways[0])
    def _(x: Any, y: Any) -> list:
        return []

    x = place(normal(4, 4), S0)
    assert ways[1](x, 2.0).placements == (S0,)
    with pytest.warns(sw.errors.FallbackWarning):
        assert ways[0](x, x).placements == (R,)


def test_a_rule_for_the_form_with_out_leaves_the_others_theirs() -> None:
    register_sharding(torch.ops.aten.mul.out, rule="...C, ...C, ...C -> ...C")
    x = place(normal(4, 4), S0)
    assert (x * x).placements == (S0,)


def test_the_last_rule_given_counts() -> None:
    x = place(normal(4, 4), S0)
    for rule, placement in (("ij, ij -> ij", S0), ("Ij, Ij -> Ij", R), ("ij, ij -> ij", S0)):
        register_sharding(torch.ops.aten.mul.Tensor, rule=rule)
        with warnings.catch_warnings(action="ignore"):
            assert (x * x).placements == (placement,)
            assert torch.mul(x, x, out=place(normal(4, 4), placement)).placements == (placement,)
            assert (x.clone() if placement == S0 else x.redistribute(placements=[R])).mul_(x).placements == (placement,)
    assert registry.rule_for(torch.ops.aten.mul.Scalar) is rule_for(ADD)


def test_a_rule_that_fits_only_some_overloads_is_given_to_none() -> None:
    custom("two_ways(Tensor x) -> Tensor", lambda x: x * 2)
    custom("two_ways.more(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y)
    with pytest.raises(RuleError, match=r"has 1 terms for the 2 tensor arguments of registertest::two_ways.more"):
        register_sharding("registertest::two_ways", rule="ij -> ij")
    assert rule_for(torch.ops.registertest.two_ways.default) is None
    register_sharding("registertest::two_ways.more", rule="ij, ij -> ij")
    x = place(normal(4, 4), S0)
    assert torch.ops.registertest.two_ways.more(x, x).placements == (S0,)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_function_may_look_at_numbers_and_dtypes() -> None:
    """What it said of some does not hold for others."""

    @register_sharding(ADD)
    def _(x: Any, y: Any, *, alpha: float = 1) -> list:
        return [([S0], [S0, S0])] if alpha == 0.5 and x.dtype == torch.float64 else []

    x = place(normal(4, 4), S0)
    assert [ADD(x, x, alpha=alpha).placements for alpha in (0.5, 0.25, 0.5)] == [(S0,), (R,), (S0,)]
    assert ADD(x.float(), x.float(), alpha=0.5).placements == (R,)


@pytest.mark.parametrize(
    ("notation", "given", "made", "ways"),
    [
        ("ij -> ij", (4, 5), (4, 1), [(None, None), (0, 0)]),  # shards of j would give a column each
        ("ij -> ij", (1, 4), (5, 4), [(None, None), (1, 1)]),  # a whole input gives whole results
        ("ij -> ijk", (2, 4), (2, 4, 3), [(None, None), (0, 0), (1, 1)]),
        ("ij -> ij", (4, 5), (3, 5), [(None, None), (1, 1)]),
        ("ij -> ij", (1, 4), (1, 4), [(None, None), (0, 0), (1, 1)]),
    ],
)
def test_a_letter_stands_for_one_size(notation: str, given: tuple, made: tuple, ways: list) -> None:
    op = torch.ops.aten.relu.default
    register_sharding(op, rule=notation)
    x = Value(0, given, torch.float64)
    call = Call(op, (x,), {}, (x,), (Value(1, made, torch.float64),))
    assert [(*way.ins, *way.outs) for way in rule_for(op).strategies(call)] == ways


ADD = torch.ops.aten.add.Tensor


def test_a_norm_of_torchs_is_one_of_ours() -> None:
    class Norm:
        """Torch's says that it is a sum, of powers."""

        reduce_op, norm_type = "sum", 2

        def is_replicate(self) -> bool:
            return False

        def is_partial(self) -> bool:
            return True

    op = custom("length(Tensor x) -> Tensor", lambda x: torch.linalg.vector_norm(x))
    register_sharding(op)(lambda x: [([Norm()], [S0])])
    assert op(place(normal(5, 4), S0)).placements == (sw.Partial("norm", 2.0),)
    torch.testing.assert_close(op(place(normal(5, 4), S0)).full_tensor(), normal(5, 4).norm())


def test_tensors_that_are_optional_or_in_lists_in_torchs_form() -> None:
    op = custom(
        "mixed(Tensor x, Tensor[] more, Tensor? y=None, int n=1) -> Tensor",
        lambda x, more, y=None, n=1: sum(more, x * n if y is None else x * n + y),
    )

    @register_sharding(op)
    def _(x: Any, more: Any, y: Any = None, n: int = 1) -> list:
        return [([S0], [S0, [S0 for _ in more], None if y is None else S0, None])]

    plain, x = normal(5, 4), place(normal(5, 4), S0)
    for call in (
        lambda x: op(x, []),
        lambda x: op(x, [x, x], x),
        lambda x: op(x, [x], n=3),
        lambda x: op(x, n=2, y=x, more=[x, x]),
    ):
        with sw.strict():
            out = call(x)
        assert out.placements == (S0,)
        torch.testing.assert_close(out.full_tensor(), call(plain))


def test_placements_of_other_libraries_are_understood() -> None:
    class Other:
        """Torch's placements answer the same questions."""

        def __init__(self, kind: str, dim: int = 0) -> None:
            self.kind, self.dim, self.reduce_op = kind, dim, "sum"

        def is_replicate(self) -> bool:
            return self.kind == "R"

        def is_partial(self) -> bool:
            return self.kind == "P"

    @register_sharding(affine)
    def _(x: Any, w: Any, b: Any) -> list:
        return [([Other("P")], [Other("S", 1), Other("S", 0), Other("P")])]

    assert affine(place(AFFINE[0], S1), place(AFFINE[1], S0), place(AFFINE[2], R)).placements == (SUM,)


def described(function: Callable) -> Callable[..., Any]:
    """What a rule's function makes of descriptions of the arguments of `affine`."""

    def ways(*values: Value) -> Any:
        call = Call(affine._opoverload, values, {}, values, (Value(3, (5, 3), torch.float64),))
        return _ways_of(function, call)

    return ways


def test_a_function_sees_where_the_arguments_lie() -> None:
    """As much as torch's functions of this form look at."""
    mesh = place(AFFINE[0], R, R, mesh=(2, 2)).device_mesh
    lying = [(S0, S1), (R, S0), (SUM, R)]
    dist = [place(x, *where, mesh=(2, 2)) for x, where in zip(AFFINE, lying, strict=True)]
    values = [Value(i, tuple(d.shape), d.dtype, d._layout) for i, d in enumerate(dist)]

    def function(x: Any, w: Any, b: Any) -> list:
        assert [spec.placements for spec in (x, w, b)] == lying
        assert x.mesh is mesh and x.device_mesh is mesh and x.mesh.ndim == 2
        assert (x.ndim, x.shape, x.tensor_meta.shape) == (2, torch.Size([5, 4]), torch.Size([5, 4]))
        assert (x.stride, x.tensor_meta.stride, x.tensor_meta.dtype) == ((4, 1), (4, 1), torch.float64)
        assert (x.dim_map, x.num_shards_map, x.num_shards, x.sums) == ([0, 1], [2, 2], 4, [])
        assert (w.dim_map, w.num_shards_map, w.num_shards, b.sums) == ([1, -1], [2, 1], 2, [0])
        assert [spec.is_sharded() for spec in (x, w, b)] == [True, True, False]
        assert [spec.is_replicated() for spec in (x, w, b)] == [False, False, False]
        return [([x.placements[0]], [x.placements[0], R, R])]

    assert [way.ins for way in described(function)(*values)] == [(None, None, None), (0, None, None)]


def test_a_function_that_follows_its_arguments() -> None:
    @register_sharding(affine)
    def _(x: Any, w: Any, b: Any) -> list:
        return [([R], [R, R, R]), *(([p], [p, R, R]) for p in x.placements if p.is_shard(0))]

    out = affine(place(AFFINE[0], S0), place(AFFINE[1], R), place(AFFINE[2], R))
    assert out.placements == (S0,)
    torch.testing.assert_close(out.full_tensor(), affine(*AFFINE))
