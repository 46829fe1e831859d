"""Random redistributions: the value and every gradient are those of one device, whatever the layouts."""

import torch
from compare import check_shards
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Layout, Partial
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode
from shardwise.redistribute import path_cost, plan_moves
from shardwise.tensor import as_layout

NAMES = ("a", "b", "c")
MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda shape: sw.simulate(shape, NAMES[: len(shape)]))
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw, mesh: sw.Mesh, shape: tuple[int, ...], *, pending: bool = True, sizes: bool = False) -> Layout:
    """Any layout: axes in any order on any dims, some pending sums, perhaps sizes of its own."""
    splits: list[tuple[int, ...]] = [()] * len(shape)
    sums: list[Partial | None] = [None] * mesh.ndim
    for axis in draw(st.permutations(range(mesh.ndim))):
        place = draw(st.integers(-2 if pending else -1, len(shape) - 1))
        if place == -2:
            sums[axis] = Partial()
        elif place >= 0:
            splits[place] += (axis,)
    cuts = []
    for size, axes in zip(shape, splits, strict=True):
        count = Layout(mesh, (size,), [axes]).pieces(0)
        if axes and sizes and draw(st.booleans()):
            marks = sorted(draw(st.lists(st.integers(0, size), min_size=len(count) - 1, max_size=len(count) - 1)))
            cuts.append(tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True)))
        else:
            cuts.append(None)
    return Layout(mesh, shape, splits, sums, cuts)


@st.composite
def journeys(draw, stops: int = 2, **options) -> list[Layout]:
    mesh, shape = draw(MESHES), draw(SHAPES)
    return [draw(layouts(mesh, shape, **options)) for _ in range(stops)]


def place(plain: Tensor, layout: Layout) -> tuple[DTensor, list[Tensor]]:
    """A DTensor of a layout whose pending terms are random, and the leaves its shards come from."""
    mesh = layout.mesh
    terms = {}
    axes = [axis for axis, pending in enumerate(layout.pending) if pending]
    for at in mesh.held:
        terms.setdefault(tuple(at[axis] for axis in axes), torch.randn_like(plain))
    last = tuple(mesh.shape[axis] - 1 for axis in axes)
    terms[last] = plain - sum(term for key, term in terms.items() if key != last)
    leaves = []
    for at in mesh.held:
        starts, sizes = layout.box(at)
        where = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        leaves.append(terms[tuple(at[axis] for axis in axes)][where].clone().requires_grad_())
    shards = [leaf.view_as(leaf) for leaf in leaves]
    return sw.tensor.wrap(shards[0] if len(shards) == 1 else ranked(shards), layout), leaves


def gradients_of(leaves: list[Tensor], layout: Layout) -> DTensor:
    grads = [leaf.grad.clone() for leaf in leaves]
    return sw.tensor.wrap(grads[0] if len(grads) == 1 else ranked(grads), layout.gradient)


def whole(x: DTensor) -> Tensor:
    return x.detach().full_tensor()


@given(journeys(sizes=True))
def test_value_and_gradient(path: list[Layout]) -> None:
    source, target = path
    note(" → ".join(map(str, plan_moves(source, target))))
    plain, weight = torch.randn(2, *source.shape, dtype=torch.float64)
    x, leaves = place(plain, source)
    y = as_layout(x, target, "x")
    assert y._layout is target
    check_shards(y)
    torch.testing.assert_close(whole(y), plain)
    (y.full_tensor() ** 2 * weight).sum().backward()
    gradient = gradients_of(leaves, source)
    check_shards(gradient)
    torch.testing.assert_close(whole(gradient), 2 * plain * weight)


@given(journeys(stops=4))
def test_several_stops_are_as_good_as_one(path: list[Layout]) -> None:
    plain = torch.randn(path[0].shape, dtype=torch.float64)
    x, leaves = place(plain, path[0])
    y = x
    for layout in (*path[1:], path[0]):
        y = as_layout(y, layout, "x")
        check_shards(y)
    assert y._layout is x._layout
    torch.testing.assert_close(whole(y), plain)
    (as_layout(y, Layout(y._layout.mesh, y._layout.shape), "x") ** 3).sum().backward()
    torch.testing.assert_close(whole(gradients_of(leaves, path[0])), 3 * plain**2)


@given(journeys(pending=False, sizes=True))
def test_a_round_trip_without_sums_is_bitwise(path: list[Layout]) -> None:
    there, back = path
    plain = torch.randn(there.shape)
    x, _ = place(plain, there)
    y = as_layout(as_layout(x, back, "x"), there, "x")
    for before, after in zip(sw.comm.shards_of(x.to_local()), sw.comm.shards_of(y.to_local()), strict=True):
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(before, after)


@given(journeys())
def test_the_path_is_as_short_as_it_can_be(path: list[Layout]) -> None:
    source, target = path
    moves = plan_moves(source, target)
    mesh = source.mesh
    assert (not moves) == (source is target)
    # Never more than settling all sums, gathering everything and cutting anew; within that, one collective at most
    # per axis, and one more for the order of the axes.
    assert sum(move.communicates for move in moves) <= mesh.ndim + 1
    kinds = [(move.source.at(axis), move.target.at(axis)) for move in moves for axis in move.axes]
    if target.replicated:
        assert len(moves) <= 2  # an all-reduce and an all-gather
    if source.replicated:
        assert not any(move.communicates for move in moves)
    if not source.has_pending and not target.has_pending:
        assert not {("S", "P"), ("R", "P"), ("P", "R"), ("P", "S")}.intersection(kinds)
    direct = plan_moves(source, Layout(mesh, source.shape)) + plan_moves(Layout(mesh, source.shape), target)
    if all(n == 1 for n in mesh.shape):
        return
    small = source.numel <= 16384
    assert not small or path_cost(moves) <= path_cost(direct) + 1e-6


@given(journeys())
def test_what_is_planned_is_what_is_communicated(path: list[Layout]) -> None:
    source, target = path
    x, _ = place(torch.randn(source.shape, dtype=torch.float64), source)
    with CommDebugMode() as comm, torch.no_grad():
        as_layout(x.detach(), target, "x")
    mesh, moves = source.mesh, [m for m in plan_moves(source, target) if m.communicates]
    planned = [(m.kind, tuple(mesh.names[a] for a in m.axes if mesh.shape[a] > 1)) for m in moves]
    assert [(c.kind, c.axes) for c in comm.comms] == planned


@given(st.data(), journeys(stops=1, pending=False), st.sampled_from(["sum", "avg", "max", "min", "product"]))
def test_reductions_over_random_axes(data, path: list[Layout], op: str) -> None:
    """Shards of random terms, reduced over the axes that cut nothing, against the same on one device."""
    (layout,) = path
    mesh = layout.mesh
    free = [axis for axis in range(mesh.ndim) if layout.axis_dims[axis] is None]
    source = layout.with_(pending=[Partial(op) if axis in free else None for axis in range(mesh.ndim)])
    target = data.draw(layouts(mesh, layout.shape, pending=False))
    groups = sorted({tuple(at[axis] for axis in free) for at in mesh.held})
    stack = torch.randint(-2, 3, (len(groups), *layout.shape)).double().requires_grad_()
    combine = {"sum": "sum", "avg": "mean", "max": "amax", "min": "amin", "product": "prod"}[op]
    expected = getattr(stack, combine)(0)
    (expected**2).sum().backward()

    leaves = []
    for at in mesh.held:
        starts, sizes = source.box(at)
        where = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        term = stack.detach()[groups.index(tuple(at[axis] for axis in free))]
        leaves.append(term[where].clone().requires_grad_())
    shards = [leaf.view_as(leaf) for leaf in leaves]
    x = sw.tensor.wrap(shards[0] if len(shards) == 1 else ranked(shards), source)
    y = as_layout(x, target, "x")
    torch.testing.assert_close(whole(y), expected.detach())
    (y.full_tensor() ** 2).sum().backward()
    for at, leaf in zip(mesh.held, leaves, strict=True):
        starts, sizes = source.box(at)
        where = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        torch.testing.assert_close(leaf.grad, stack.grad[groups.index(tuple(at[axis] for axis in free))][where])
