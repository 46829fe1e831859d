"""`register_sharding`: rules for custom ops, in torch's form and in the notation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweep import normal, place, sweep, sweep_in_place
from torch import Tensor

import shardwise as sw
from shardwise.experimental import RuleError, register_sharding
from shardwise.experimental.register import _ways_of
from shardwise.rules import Call, Value, registry

R, S0, S1, SUM = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()


def custom(schema: str, function: Callable, *, tags: Any = ()) -> Any:
    """A custom op that runs `function`, on meta tensors too; differentiable as its pieces are."""
    library = torch.library.Library("registertest", "FRAGMENT")
    name = library.define(schema, tags=tags)
    library.impl(name, function, "CompositeExplicitAutograd")
    _libraries.append(library)
    return getattr(torch.ops.registertest, name).default


_libraries: list[torch.library.Library] = []  # an op lives as long as its library


@pytest.fixture(autouse=True)
def forget_rules() -> Iterator[None]:
    """Rules registered by a test go with it."""
    rules, homes = dict(registry._rules), dict(registry._homes)
    yield
    for known, before in ((registry._rules, rules), (registry._homes, homes)):
        known.clear()
        known.update(before)
    registry._found.clear()
    sw.clear_cache()


@torch.library.custom_op("registertest::affine", mutates_args=())
def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


affine.register_fake(lambda x, w, b: x.new_empty(x.shape[0], w.shape[1]))
affine.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad, grad.sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)
AFFINE = (normal(5, 4), normal(4, 3), normal(3))


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
    assert any("S(0) -> P(avg)" in found["strategy"] and "is wrong" in found["problem"] for found in report.unsound)
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


# What does not fit is refused


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
    ],
)
def test_a_function_that_gives_something_else(ways: list, message: str) -> None:
    register_sharding(affine)(lambda x, w, b: ways)
    with pytest.raises(RuleError, match=message):
        affine(*(place(x, S0) for x in AFFINE))


def test_a_function_judged_by_samples_does_not_know_where_tensors_lie() -> None:
    seen = described(lambda x, w, b: [([x.placements[0]], [x.placements[0], R, R])])
    with pytest.raises(RuleError, match="mesh and placements are not known to it"):
        seen(*(Value(i, tuple(x.shape), x.dtype) for i, x in enumerate(AFFINE)))
    with pytest.raises(AttributeError, match="a tensor in a sharding rule has no nonsense, but device_mesh, dim_map, "):
        described(lambda x, w, b: x.nonsense)(*(Value(i, tuple(x.shape), x.dtype) for i, x in enumerate(AFFINE)))
