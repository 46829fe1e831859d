"""Paths from layout to layout: which moves, how many collectives, how much memory."""

from itertools import permutations, product

import pytest
import torch

import shardwise as sw
from shardwise import Layout, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.errors import MeshError, PlacementError
from shardwise.redistribute import parameter_moves, path_cost, plan_moves, planner
from shardwise.redistribute.planner import SMALL

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPES = [(8, 12), (5, 7), (4096, 4096)]


def moves_of(source, target, *, mesh=((2, 2), ("dp", "tp")), shape=(8, 12)) -> list[str]:
    mesh = sw.simulate(*mesh)
    path = plan_moves(Layout.of(mesh, shape, source), Layout.of(mesh, shape, target))
    return [f"{move.kind}@{','.join(mesh.names[axis] for axis in move.axes)}" for move in path]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        ([S0, R], [S0, R], []),
        ([P, P], [R, R], ["all_reduce@dp,tp"]),
        ([S0, S0], [R, R], ["all_gather@dp,tp"]),
        ({0: ("tp", "dp")}, [R, R], ["all_gather@tp,dp"]),
        ([P, R], [S0, R], ["reduce_scatter@dp"]),
        ([P, P], [S0, S0], ["reduce_scatter@dp,tp"]),
        ([P, P], {0: ("tp", "dp")}, ["reduce_scatter@tp,dp"]),
        ([R, R], [S0, S0], ["slice@dp,tp"]),
        ([S0, S0], {0: ("tp", "dp")}, ["all_to_all@dp,tp"]),
        ([S0, S1], [S1, S0], ["all_to_all@dp,tp"]),
        ([S0, S1], [R, R], ["all_gather@dp,tp"]),
        ([P, P], [S1, S0], ["reduce_scatter@tp,dp"]),
        ([R, R], [S1, S0], ["slice@tp,dp"]),
        ([S0, R], [S1, R], ["all_to_all@dp"]),
        ([S0, S0], [S0, R], ["all_gather@tp"]),
        ([S0, S0], [S0, S1], ["all_to_all@tp"]),
        ([R, R], [P, R], ["mask@dp"]),
        ([R, S0], [R, P], ["pad@tp"]),
        ([P, S0], [R, S0], ["all_reduce@dp"]),
        ([P, S1], [S0, S1], ["reduce_scatter@dp"]),
        ([Partial("avg"), Partial("avg")], [R, R], ["all_reduce@dp,tp"]),
        ([Partial("max"), R], [S0, R], ["reduce_scatter@dp"]),
    ],
)
def test_known_paths(source, target, path, shape) -> None:
    assert moves_of(source, target, shape=shape) == path


@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        ([S0, R], [S1, R], ["all_gather", "slice"]),
        ([R, S0], [S0, S0], ["all_gather", "slice"]),
        ([S0, S0], {0: ("tp", "dp")}, ["all_gather", "slice"]),
        ([S0, S0], [R, S0], ["all_to_all", "all_gather"]),  # to be gathered along the outer axis alone
        ([S0, S0], [S0, R], ["all_gather"]),
        ([P, S0], [S0, S0], ["all_reduce", "all_gather", "slice"]),
        ([S0, R], [R, R], ["all_gather"]),
        ([S0, R], [S0, S0], ["slice"]),
    ],
)
def test_paths_of_parameters(source, target, path) -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    ends = Layout.of(mesh, (4096, 4096), source), Layout.of(mesh, (4096, 4096), target)
    moves = parameter_moves(*ends)
    assert [move.kind for move in moves] == path
    assert (moves[0].source.layout, moves[-1].target.layout) == ends
    assert parameter_moves(*ends) is moves


def test_three_axes_in_one_collective() -> None:
    mesh = ((2, 2, 2), ("a", "b", "c"))
    assert moves_of([S0] * 3, [R] * 3, mesh=mesh) == ["all_gather@a,b,c"]
    assert moves_of([P] * 3, [R] * 3, mesh=mesh) == ["all_reduce@a,b,c"]
    assert moves_of([S0] * 3, {0: ("c", "a", "b")}, mesh=mesh) == ["all_to_all@a,b,c"]
    assert moves_of([S0] * 3, [R, R, R], mesh=mesh, shape=(5, 3)) == ["all_gather@a,b,c"]


@pytest.mark.parametrize("target", [[S0, R], [S1, R], [S0, S1], [S0, S0], {0: ("tp", "dp")}], ids=str)
@pytest.mark.parametrize("source", [[P, R], [P, P], [P, S0], [P, S1]], ids=str)
def test_a_pending_sum_is_scattered_not_reduced_and_cut(source, target) -> None:
    scattered = [axis for axis in ("dp", "tp") if source[("dp", "tp").index(axis)] == P]
    if not isinstance(target, dict):
        scattered = [axis for axis in scattered if target[("dp", "tp").index(axis)] != R]
    path = moves_of(source, target, shape=(1024, 1024))
    reduced = {axis for move in path if move.startswith("all_reduce") for axis in move.split("@")[1].split(",")}
    assert not reduced.intersection(scattered), path


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({0: ("dp", "tp")}, {0: "tp"}),  # the major axis leaves
        ({0: "dp"}, {0: "tp"}),  # one axis takes the other's place
        ({0: ("dp", "tp")}, {1: "tp"}),
        ({0: "tp"}, {0: ("dp", "tp")}),  # an axis comes in as the major one
        ([S0, S0], [S1, S1]),
        ([P, S0], [S0, S0]),
    ],
)
def test_a_large_tensor_is_never_whole_on_the_way(source, target) -> None:
    mesh = sw.simulate((4, 4), ("dp", "tp"))
    shape = (1024, 1024)
    before, after = Layout.of(mesh, shape, source), Layout.of(mesh, shape, target)

    def elements(layout: Layout) -> int:
        return max(height * width for height, width in layout.held_shapes)

    bound = 2 * max(elements(before), elements(after), SMALL // 2)
    path = plan_moves(before, after)
    assert path[-1].target.layout is after
    assert all(elements(move.target.layout) <= bound for move in path), [str(move) for move in path]


def test_a_small_tensor_may_be_whole_to_save_a_collective() -> None:
    mesh = ((4, 4), ("dp", "tp"))
    assert moves_of({0: ("dp", "tp")}, {0: "tp"}, mesh=mesh, shape=(16, 16)) == ["all_gather@dp,tp", "slice@tp"]
    assert moves_of({0: ("dp", "tp")}, {0: "tp"}, mesh=mesh, shape=(4096, 4096)) == [
        "all_to_all@dp,tp",
        "all_gather@dp",
    ]


def test_order_changes_of_large_tensors_gather_nothing() -> None:
    mesh = ((2, 3, 2), ("a", "b", "c"))
    for source, target in [
        ({0: ("a", "b", "c")}, {0: ("c", "b", "a")}),
        ({0: ("a", "b"), 1: "c"}, {0: ("b", "a"), 1: "c"}),
        ({0: ("a", "b"), 1: "c"}, {0: "c", 1: ("b", "a")}),
    ]:
        path = moves_of(source, target, mesh=mesh, shape=(2048, 2048))
        assert all(move.startswith("all_to_all") for move in path), path


# Explicit sizes


def explicit(sizes: tuple[int, ...], axes: tuple[int, ...] = (1,)) -> Layout:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    return Layout(mesh, (sum(sizes), 6), [axes, ()], sizes=[sizes, None])


def test_explicit_to_default_is_one_all_to_all() -> None:
    source = explicit((1, 7))
    default = source.with_(splits=source.splits)
    assert [move.kind for move in plan_moves(source, default)] == ["all_to_all"]
    assert [move.kind for move in plan_moves(default, source)] == ["all_to_all"]
    assert [move.kind for move in plan_moves(source, source.with_(splits=[(), ()]))] == ["all_gather"]


@pytest.mark.parametrize("sizes", [(1, 7), (0, 8), (8, 0)], ids=str)
def test_replicated_to_explicit_is_a_slice(sizes) -> None:
    assert [m.kind for m in plan_moves(Layout(explicit(sizes).mesh, (8, 6)), explicit(sizes))] == ["slice"]


def test_nested_explicit_sizes() -> None:
    nested = explicit((1, 0, 4, 3), axes=(1, 0))
    whole = Layout(nested.mesh, (8, 6))
    pending = Layout.of(nested.mesh, (8, 6), [P, P])
    assert [m.kind for m in plan_moves(whole, nested)] == ["slice"]
    assert [m.kind for m in plan_moves(nested, whole)] == ["all_gather"]
    assert [m.kind for m in plan_moves(pending, nested)] == ["reduce_scatter"]


@pytest.mark.parametrize("axes", [(1,), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("placements", [[R, R], [S0, S0], [S0, S1], [R, S0], [P, R], [S1, S1]], ids=str)
def test_explicit_sizes_both_ways(axes, placements) -> None:
    sizes = (5, 3) if len(axes) == 1 else (1, 0, 4, 3)
    layout = explicit(sizes, axes)
    plain = torch.randn(8, 6, dtype=torch.float64)
    other = sw.distribute_tensor(plain, layout.mesh, placements).requires_grad_()
    there = sw.tensor.as_layout(other, layout, "x")
    assert torch.equal(there.full_tensor(), plain)
    back = there.redistribute(placements=placements)
    assert back._layout is other._layout
    (back.redistribute(placements=[R, R]) ** 2).sum().backward()
    torch.testing.assert_close(other.grad.full_tensor(), 2 * plain)


# Varying results


def test_a_gather_used_as_varying_reduce_scatters_back() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    source, whole = Layout.of(mesh, (8, 12), [S0, S0]), Layout(mesh, (8, 12))
    (both,) = plan_moves(source, whole, frozenset({0, 1}))
    assert (both.kind, both.dual.kind) == ("all_gather", "reduce_scatter")
    one = plan_moves(source, whole, frozenset({1}))
    assert [m.kind for m in one] == ["all_gather", "nothing"]
    assert [m.dual.kind for m in reversed(one)] == ["mask", "reduce_scatter"]
    (alias,) = plan_moves(whole, whole, frozenset({0, 1}))
    assert (alias.kind, alias.dual.kind, alias.axes) == ("nothing", "all_reduce", (0, 1))


# Prices and errors


def test_the_path_is_no_dearer_than_a_detour() -> None:
    mesh = sw.simulate((2, 3), ("dp", "tp"))
    options = [R, S0, S1, P]
    layouts = [Layout.of(mesh, (64, 96), [a, b]) for a in options for b in options]
    for source in layouts:
        for target in layouts:
            direct = path_cost(plan_moves(source, target))
            for middle in layouts:
                ways = zip(middle.placements, source.placements, target.placements, strict=True)
                if not all(at in (before, after) for at, before, after in ways):
                    continue
                detour = path_cost(plan_moves(source, middle)) + path_cost(plan_moves(middle, target))
                assert direct <= detour + 1e-6, f"{source} → {middle} → {target}"


def test_paths_do_not_depend_on_what_was_planned_before() -> None:
    mesh = sw.simulate((2, 3), ("dp", "tp"))
    source, target = Layout.of(mesh, (6, 6), [P, S0]), Layout.of(mesh, (6, 6), [S0, S1])
    assert plan_moves(source, target) is plan_moves(source, target)
    assert planner._planned.__wrapped__(source, target, frozenset()) == plan_moves(source, target)


def test_errors() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [S0, R])
    with pytest.raises(PlacementError) as error:
        x.redistribute(placements=[Partial("product"), R])
    expected = "cannot make a Partial('product') out of [4,4] S(0)@dp: only sum, avg, max and min can be made"
    assert str(error.value) == expected
    with pytest.raises(PlacementError) as error:
        plan_moves(Layout(mesh, (4,)), Layout(mesh, (5,)))
    assert str(error.value) == "cannot redistribute [4] R as [5] R: mesh and global shape must be the same"
    with pytest.raises(PlacementError, match="redistribute needs the placements to go to"):
        x.redistribute()
    with pytest.raises(MeshError) as error:
        x.redistribute(mesh["tp"], [R])
    expected = "redistribute stays on the tensor's mesh Mesh(dp=2, tp=2); it cannot move to Mesh(tp=2)"
    assert str(error.value) == expected


def test_a_refused_redistribution_communicates_nothing() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [S0, P])
    with CommDebugMode() as comm, pytest.raises(PlacementError):
        x.redistribute(placements=[R, Partial("norm", 2.0)])
    assert comm.get_total_counts() == 0


# How far it looks


def looked_at(source, target, monkeypatch, *, mesh=((2, 2, 2), ("a", "b", "c")), shape=(8, 8, 8)) -> int:
    """From how many layouts the planner looks for moves."""
    seen = []
    edges = planner._edges
    monkeypatch.setattr(planner, "_edges", lambda layout, goal: seen.append(layout) or edges(layout, goal))
    mesh = sw.simulate(*mesh)
    planner._planned.__wrapped__(Layout.of(mesh, shape, source), Layout.of(mesh, shape, target), frozenset())
    return len(seen)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([S0] * 3, [R] * 3),
        ([P] * 3, [R] * 3),
        ([P, P, R], [S0, S1, R]),
        ([S0, S1, R], [S1, S0, R]),
        ([R, R, R], [S0, S1, S0]),
        ([S0, S1, S1], [R, R, R]),
    ],
    ids=str,
)
def test_one_move_is_found_at_once(source, target, monkeypatch) -> None:
    assert len(moves_of(source, target, mesh=((2, 2, 2), ("a", "b", "c")), shape=(8, 8, 8))) == 1
    assert looked_at(source, target, monkeypatch) <= 1


@pytest.mark.parametrize("shape", [(8, 6), (1000, 600), (0, 5)], ids=str)
def test_one_move_that_is_plain_to_see_is_what_the_search_finds(shape) -> None:
    mesh = sw.simulate((2, 3, 1), ("a", "b", "c"))
    choices = [R, S0, S1, P, Partial("avg")]
    layouts = [Layout.of(mesh, shape, way) for way in product(choices, choices, [R, S0, P])]
    layouts += [Layout(mesh, shape, [(1, 0), ()]), Layout(mesh, shape, [(), (1, 0)])]
    if shape == (8, 6):
        layouts.append(Layout(mesh, shape, [(0,), (1,)], sizes=[(3, 5), (1, 2, 3)]))
        layouts.append(Layout(mesh, shape, [(1,), ()], sizes=[(1, 0, 7), None]))
    plain = 0
    for source, target in permutations(layouts, 2):
        path = planner._in_one_move(source, target)
        if path is not None:
            plain += 1
            assert path == planner._shortest(source, target), (str(source), str(target))
    assert plain > len(layouts)


def test_nothing_is_looked_at_that_must_be_dearer(monkeypatch) -> None:
    assert looked_at([S0, S1, P], [S1, R, S0], monkeypatch) <= 12


@pytest.mark.parametrize("pending", [Partial("max"), Partial("min"), Partial("product")], ids=str)
def test_a_sum_waits_for_reductions_that_it_does_not_commute_with(pending) -> None:
    """Terms of the sum would take part in the other reduction: zeros that are no value's."""
    assert moves_of([pending, R], [R, P]) == ["all_reduce@dp", "mask@tp"]
    assert moves_of([pending, S0], [R, P])[0] == "all_reduce@dp"
    assert moves_of([Partial("avg"), R], [R, P])[-1] in ("all_reduce@dp", "mask@tp")
