"""Layouts: what placements mean, identity, sizes and offsets, gradients, text, errors."""

import copy
import gc
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shardwise as sw
from shardwise import Layout, Partial, Replicate, Shard
from shardwise.errors import MeshError, PlacementError
from shardwise.layout import chunk_sizes, offsets, replicated


@pytest.fixture
def mesh() -> sw.Mesh:
    return sw.simulate((2, 3), ("dp", "tp"))


# Identity


def test_equal_layouts_are_one_object(mesh: sw.Mesh) -> None:
    by_placement = Layout.of(mesh, torch.Size([8, 4]), [Shard(0), Shard(-2)])
    assert by_placement is Layout.of(mesh, [8, 4], {0: ("dp", "tp")})
    assert by_placement is Layout.of(mesh, (8, 4), {-2: ["dp", "tp"]})
    assert by_placement is Layout(mesh, (8, 4), [(0, 1), ()])
    assert by_placement is not Layout.of(mesh, (8, 4), {0: ("tp", "dp")})
    assert replicated(mesh, (8, 4)) is Layout.of(mesh, (8, 4), [Replicate()] * 2) is Layout.of(mesh, (8, 4), {})
    assert Layout.of(mesh, (), [Partial("norm", 2), Replicate()]) is Layout.of(
        mesh, (), [Partial("norm", 2.0), Replicate()]
    )


def test_explicit_sizes_that_chunk_gives_are_not_explicit(mesh: sw.Mesh) -> None:
    default = Layout.of(mesh, (5, 4), [Replicate(), Shard(0)])
    assert Layout(mesh, (5, 4), [(1,), ()], sizes=[(2, 2, 1), None]) is default
    assert Layout(mesh, (5, 4), [(1,), ()], sizes=[[2, 2, 1], (4,)]) is default
    assert Layout(mesh, (5, 4), [(1,), ()], sizes=[(1, 2, 2), None]) is not default


@pytest.mark.parametrize("sizes", [None, (None, (1, 3))])
def test_pickle_and_copies_keep_identity(mesh: sw.Mesh, sizes) -> None:
    layout = Layout(mesh, (8, 4), [(1,), (0,)], sizes=sizes)
    for same in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
        assert same is layout
    pending = Layout.of(mesh, (8,), [Partial("avg"), Shard(0)])
    assert pickle.loads(pickle.dumps({"layout": pending}))["layout"] is pending


def test_unused_layouts_are_freed(mesh: sw.Mesh) -> None:
    gc.collect()
    before = len(Layout._interned)
    made = [Layout.of(mesh, (1000 + i, 7), [Shard(0), Shard(1)]) for i in range(50)]
    assert len(Layout._interned) == before + 50
    del made
    gc.collect()
    assert len(Layout._interned) <= before


def test_threads_agree_on_one_object(mesh: sw.Mesh) -> None:
    def make(_: int) -> list[Layout]:
        return [Layout.of(mesh, (2000 + i, 3), [Shard(0), Partial()]) for i in range(200)]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(make, range(8))
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))


# What placements mean


@pytest.mark.parametrize(
    ("placements", "splits", "pending"),
    [
        ([Replicate(), Replicate()], ((), ()), (None, None)),
        ([Shard(1), Replicate()], ((), (0,)), (None, None)),
        ([Shard(-1), Shard(0)], ((1,), (0,)), (None, None)),
        ([Shard(0), Shard(0)], ((0, 1), ()), (None, None)),
        ([Partial(), Shard(1)], ((), (1,)), (Partial(), None)),
        ({0: ("tp", "dp")}, ((1, 0), ()), (None, None)),
        ({1: "tp"}, ((), (1,)), (None, None)),
    ],
)
def test_of(mesh: sw.Mesh, placements, splits, pending) -> None:
    layout = Layout.of(mesh, (4, 6), placements)
    assert (layout.splits, layout.pending) == (splits, pending)


def test_placements_as_users_read_them(mesh: sw.Mesh) -> None:
    assert Layout.of(mesh, (4, 6), [Shard(-1), Partial("max")]).placements == (Shard(1), Partial("max"))
    assert Layout.of(mesh, (4, 6), {0: ("tp", "dp")}).placements == (Shard(0), Shard(0))
    assert Layout.of(mesh, (), [Replicate(), Replicate()]).placements == (Replicate(), Replicate())


def test_facts(mesh: sw.Mesh) -> None:
    layout = Layout.of(mesh, (4, 6), [Shard(1), Partial()])
    assert layout.axis_dims == (1, None)
    assert (layout.numel, layout.replicated, layout.has_pending) == (24, False, True)
    whole = replicated(mesh, (4, 0))
    assert (whole.numel, whole.replicated, whole.has_pending) == (0, True, False)
    assert Layout.of(mesh, (2,), [Partial(), Replicate()]).replicated is False


# Sizes and offsets


@pytest.mark.parametrize(("size", "count"), [(s, c) for s in range(0, 11) for c in range(1, 6)])
def test_one_axis_cuts_as_torch_chunk(size: int, count: int) -> None:
    pieces = [len(piece) for piece in torch.arange(size).chunk(count)]
    pieces = [p for p in pieces if p] + [0] * (count - len([p for p in pieces if p]))
    assert chunk_sizes(size, (count,)) == tuple(pieces)


@pytest.mark.parametrize(
    ("size", "counts", "expected"),
    [
        (7, (), (7,)),
        (8, (2, 2), (2, 2, 2, 2)),
        (5, (2, 2), (2, 1, 1, 1)),
        (5, (2, 3), (1, 1, 1, 1, 1, 0)),
        (3, (2, 2), (1, 1, 1, 0)),
        (1, (2, 3), (1, 0, 0, 0, 0, 0)),
        (0, (2, 2), (0, 0, 0, 0)),
        (10, (3, 2), (2, 2, 2, 2, 1, 1)),
        (9, (2, 2, 2), (2, 1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_several_axes_cut_one_after_the_other(size: int, counts: tuple, expected: tuple) -> None:
    assert chunk_sizes(size, counts) == expected


def test_offsets() -> None:
    assert offsets((2, 0, 3, 1)) == (0, 2, 2, 5)
    assert offsets((4,)) == (0,)
    assert offsets(()) == ()


@pytest.mark.parametrize(
    ("placements", "boxes"),
    [
        ([Shard(0), Shard(1)], {(0, 0): ((0, 0), (3, 2)), (1, 1): ((3, 2), (2, 2)), (1, 2): ((3, 4), (2, 0))}),
        ([Shard(0), Shard(0)], {(0, 2): ((2, 0), (1, 4)), (1, 0): ((3, 0), (1, 4)), (1, 2): ((5, 0), (0, 4))}),
        ({0: ("tp", "dp")}, {(0, 0): ((0, 0), (1, 4)), (1, 0): ((1, 0), (1, 4)), (0, 2): ((4, 0), (1, 4))}),
        ([Partial(), Replicate()], {(1, 2): ((0, 0), (5, 4))}),
    ],
)
def test_boxes_of_a_5_by_4_tensor(mesh: sw.Mesh, placements, boxes) -> None:
    layout = Layout.of(mesh, (5, 4), placements)
    assert {at: layout.box(at) for at in boxes} == boxes
    assert all(layout.local_shape(at) == box[1] for at, box in boxes.items())


def test_explicit_sizes(mesh: sw.Mesh) -> None:
    layout = Layout(mesh, (10, 4), [(1, 0), ()], sizes=[(1, 0, 4, 2, 0, 3), None])
    assert layout.pieces(0) == (1, 0, 4, 2, 0, 3)
    assert layout.pieces(1) == (4,)
    assert layout.piece_index(0, (1, 2)) == 5
    assert [layout.box(at)[0][0] for at in mesh.held] == [0, 1, 7, 1, 5, 7]
    assert layout.held_shapes == ((1, 4), (4, 4), (0, 4), (0, 4), (2, 4), (3, 4))


def test_boxes_tile_the_tensor() -> None:
    mesh = sw.simulate((2, 3, 2), ("a", "b", "c"))
    for order, shape in itertools.product(itertools.permutations("abc"), [(7, 3), (2, 5), (0, 1), (12, 4)]):
        layout = Layout.of(mesh, shape, {0: order[:2], 1: order[2]})
        seen = torch.zeros(shape)
        for at in mesh.held:
            (row, column), (height, width) = layout.box(at)
            seen[row : row + height, column : column + width] += 1
        assert (seen == 1).all(), layout


def test_sizes_that_do_not_fit_are_refused(mesh: sw.Mesh) -> None:
    with pytest.raises(AssertionError):
        Layout(mesh, (5, 4), [(1,), ()], sizes=[(1, 2, 3), None])
    with pytest.raises(AssertionError):
        Layout(mesh, (5, 4), [(1,), ()], sizes=[(2, 3), None])


# Derived layouts


def test_gradient_dual(mesh: sw.Mesh) -> None:
    sharded = Layout(mesh, (5, 4), [(1,), ()], sizes=[(1, 2, 2), None])
    assert sharded.gradient is sharded
    assert Layout.of(mesh, (5, 4), [Partial(), Shard(1)]).gradient is Layout.of(mesh, (5, 4), [Replicate(), Shard(1)])
    for op in (Partial("avg"), Partial("max"), Partial("min"), Partial("product"), Partial("norm", 2.0)):
        terms = Layout.of(mesh, (5, 4), [Replicate(), Partial()])
        assert Layout.of(mesh, (5, 4), [Replicate(), op]).gradient is terms


def test_with_replaces_some_parts(mesh: sw.Mesh) -> None:
    layout = Layout(mesh, (5, 4), [(1,), ()], [Partial(), None], sizes=[(1, 2, 2), None])
    settled = layout.with_(pending=[None, None])
    assert settled is Layout(mesh, (5, 4), [(1,), ()], sizes=[(1, 2, 2), None])
    assert settled.with_(splits=[(), (1,)]) is Layout.of(mesh, (5, 4), [Replicate(), Shard(1)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: Layout.of(m, (8, 4), [Replicate(), Replicate()]), "[8,4] R"),
        (lambda m: Layout.of(m, (), [Replicate(), Replicate()]), "[] R"),
        (lambda m: Layout.of(m, (8, 4), {0: ("tp", "dp")}), "[8,4] S(0)@tp,dp"),
        (lambda m: Layout.of(m, (8, 4), [Shard(1), Partial("max")]), "[8,4] S(1)@dp P(max)@tp"),
        (lambda m: Layout.of(m, (), [Partial(), Partial("avg")]), "[] P(sum)@dp P(avg)@tp"),
        (lambda m: Layout(m, (6, 4), [(1,), (0,)], sizes=[(1, 5, 0), None]), "[6,4] S(0=1+5+0)@tp S(1)@dp"),
    ],
)
def test_text(mesh: sw.Mesh, make, text: str) -> None:
    assert str(make(mesh)) == text
    assert repr(make(mesh)) == f"Layout({text})"


# Errors


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ([Shard(2), Replicate()], "S(2) names dim 2, but the tensor has 2 dims: [8, 4]"),
        ([Replicate(), Shard(-3)], "S(-3) names dim -3, but the tensor has 2 dims: [8, 4]"),
        ({2: "tp"}, "{2: ('tp',)} names dim 2, but the tensor has 2 dims: [8, 4]"),
        ([Shard(0)], "Mesh(dp=2, tp=3) has 2 axes, so it takes 2 placements; got [S(0)]"),
        ([], "Mesh(dp=2, tp=3) has 2 axes, so it takes 2 placements; got []"),
        ([Shard(0)] * 3, "Mesh(dp=2, tp=3) has 2 axes, so it takes 2 placements; got [S(0), S(0), S(0)]"),
        (Shard(0), "placements are a list, one per mesh axis: [S(0)], not S(0)"),
        ([Shard(0), "tp"], "expected Replicate(), Shard(dim) or Partial(op), got 'tp'"),
        ([Shard(0), None], "expected Replicate(), Shard(dim) or Partial(op), got None"),
        (
            {1: "tp", -1: "dp"},
            "{1: 'tp', -1: 'dp'} names dim 1 twice; give all axes that split it in one tuple",
        ),
        ({0: "tp", 1: "tp"}, "{0: 'tp', 1: 'tp'} uses a mesh axis twice, but an axis splits one dim, once"),
        ({0: ("tp", "tp")}, "{0: ('tp', 'tp')} uses a mesh axis twice, but an axis splits one dim, once"),
        (
            [Partial("sum"), Partial("max")],
            "[P(sum), P(max)] mixes reductions whose order matters, and placements do not say which comes first; "
            "redistribute one of them before the other begins",
        ),
        (
            [Partial("norm", 1.0), Partial("norm", 2.0)],
            "[P(norm 1), P(norm 2)] mixes reductions whose order matters, and placements do not say which comes "
            "first; redistribute one of them before the other begins",
        ),
    ],
)
def test_placement_errors(mesh: sw.Mesh, placements, text: str) -> None:
    with pytest.raises(PlacementError) as error:
        Layout.of(mesh, (8, 4), placements)
    assert str(error.value) == text


def test_a_scalar_cannot_be_sharded(mesh: sw.Mesh) -> None:
    with pytest.raises(PlacementError) as error:
        sw.distribute_tensor(torch.tensor(1.0), mesh, [Replicate(), Shard(0)])
    assert str(error.value) == "S(0) names dim 0, but the tensor has 0 dims: []"


def test_unknown_axis_name(mesh: sw.Mesh) -> None:
    with pytest.raises(MeshError) as error:
        sw.distribute_tensor(torch.ones(4), mesh, {0: ("dp", "pp")})
    assert str(error.value) == "unknown mesh axis 'pp': Mesh(dp=2, tp=3) has the axes 'dp', 'tp'"
