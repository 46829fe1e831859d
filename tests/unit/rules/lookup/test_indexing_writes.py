"""Writing at indices."""

import pytest
import torch
from compare import compare
from indexing_cases import INDEX_WRITES, MASKS, PARTS, PUTS, ROWS, SCATTERS, SHAPES, SOME, WIDE
from sweep import assignments, mesh_of, normal, place, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")


def try_out(function, *inputs, **options):
    """A few of the ways that inputs may lie; `test_indexing_ways` takes care of the ways a call may run."""
    for mesh, placements in assignments(inputs, most=9, sample=4):
        compare(function, inputs, mesh, placements, **options)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
def test_scatter(scatter):
    try_out(scatter, normal(5, 3), WIDE, normal(4, 3) * 2)


@pytest.mark.parametrize(("function", "x", "index", "source"), SHAPES.values(), ids=SHAPES)
def test_shapes_of_scatter(function, x, index, source):
    try_out(function, x, index, source, backward=index.shape == source.shape)  # torch has no gradient otherwise


def test_scatter_of_a_number():
    try_out(lambda x, i: x.scatter(0, i, 2.0), normal(5, 3), WIDE)
    try_out(lambda x, i: x.scatter(1, i, 2.0), normal(6, 5), WIDE)
    try_out(lambda x, i: x.index_fill(0, i, 2.0), normal(5, 3), ROWS - 5)
    try_out(lambda x, i, v: x.index_fill(1, i, v), normal(3, 5), ROWS, normal(2)[0])


@pytest.mark.parametrize("write", INDEX_WRITES.values(), ids=INDEX_WRITES)
def test_rows(write):
    try_out(write, normal(5, 3), ROWS, normal(6, 3))


def test_shapes_of_rows():
    try_out(lambda x, i, s: x.index_add(-1, i, s), normal(3, 5), ROWS, normal(3, 6))
    try_out(lambda x, i, s: x.index_copy(0, i, s), normal(5), ROWS[0], normal(2)[0])
    try_out(lambda x, i, s: x.index_reduce(1, i, s, "mean"), normal(3, 5), ROWS, normal(3, 6))
    try_out(lambda x, i, s: x.index_add(0, i, s), normal(5, 3), ROWS[:0], normal(6, 3)[:0])


@pytest.mark.parametrize("accumulate", [False, True], ids=["last", "sum"])
@pytest.mark.parametrize(("function", "x", "index", "values"), PUTS.values(), ids=PUTS)
def test_put(function, x, index, values, accumulate):
    try_out(lambda x, i, v: function(x, i, v, accumulate=accumulate), x, index, values)


def test_put_at_indices_that_broadcast():
    function = lambda x, i, j, v: x.index_put((i, j), v, accumulate=True)  # noqa: E731
    try_out(function, normal(5, 4), ROWS[:, None], torch.tensor([3, 0, -1]), normal(6, 3))


@pytest.mark.parametrize(("function", "x", "mask", "values"), MASKS.values(), ids=MASKS)
def test_masks(function, x, mask, values):
    try_out(function, x, mask, values)


@pytest.mark.parametrize(("function", "x", "source"), PARTS.values(), ids=PARTS)
def test_parts(function, x, source):
    try_out(function, x, source)


def on(x, value):
    """A plain tensor as a replicated one on the mesh of `x`."""
    if not isinstance(x, sw.DTensor):
        return value
    return sw.distribute_tensor(value, x.device_mesh, [R] * x.device_mesh.ndim)


IN_PLACE = {
    "scatter_": lambda x, s: x.scatter_(0, on(x, WIDE), s),
    "scatter_ number": lambda x, s: x.scatter_(0, on(x, WIDE), 2.0),
    "scatter_add_": lambda x, s: x.scatter_add_(0, on(x, WIDE), s),
    "scatter_reduce_": lambda x, s: x.scatter_reduce_(0, on(x, WIDE), s, "mean"),
    "index_add_": lambda x, s: x.index_add_(0, on(x, ROWS[:4]), s),
    "index_copy_": lambda x, s: x.index_copy_(0, on(x, ROWS[:4]), s),
    "index_fill_": lambda x, s: x.index_fill_(0, on(x, ROWS), 2.0),
    "index_reduce_": lambda x, s: x.index_reduce_(0, on(x, ROWS[:4]), s, "amax"),
    "index_put_": lambda x, s: x.index_put_((on(x, ROWS[:4] - 5),), s, accumulate=True),
    "_index_put_impl_": lambda x, s: torch._index_put_impl_(x, (on(x, ROWS[:4]),), s),
    "put_": lambda x, s: x.put_(on(x, WIDE), s),
    "masked_scatter_": lambda x, s: x.masked_scatter_(on(x, SOME[:, None]), s),
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(function):
    accepted = sweep_in_place(function, normal(5, 3), normal(4, 3))
    targets = {placements[0] for placements in accepted}
    assert {(R,), (S(0),), (S(1),)} <= targets


def test_out_of_a_call():
    x, i, s = normal(5, 3), WIDE, normal(4, 3)
    for placement in (R, S(0), S(1)):
        d, out = place(x, placement), place(x * 0, placement)
        torch.scatter_add(d, 0, place(i, R), place(s, R), out=out)
        assert torch.equal(out.full_tensor(), x.scatter_add(0, i, s)) and out.placements == (placement,)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    x, s = ((normal(*shape) * 3).abs().to(dtype) for shape in ((5, 3), (4, 3)))
    functions = [
        lambda x, s: x.scatter(0, on(x, WIDE), s),
        lambda x, s: x.index_copy(0, on(x, ROWS[1:5]), s),
        lambda x, s: x.index_put((on(x, ROWS[:4]),), s),
        lambda x, s: x.index_fill(0, on(x, ROWS), 1),
        lambda x, s: x.masked_scatter(on(x, SOME[:, None]), s),
    ]
    if dtype != torch.bool:
        functions += [
            lambda x, s: x.scatter_add(0, on(x, WIDE), s),
            lambda x, s: x.scatter_reduce(0, on(x, WIDE), s, "amax", include_self=False),
            lambda x, s: x.index_put((on(x, ROWS[:4]),), s, accumulate=True),
        ]
    for function in functions:
        for where in ((R, R), (S(0), R), (S(1), S(1)), (R, S(0))):
            compare(function, [x, s], mesh_of((4,)), [[p] for p in where], backward=False)


def test_nan_among_the_sources_stays_in_its_rows():
    s = normal(4, 3)
    s[0, 0] = float("nan")
    for reduce in ("amax", "prod", "mean"):
        write = lambda x, s, reduce=reduce: x.scatter_reduce(0, on(x, WIDE), s, reduce)  # noqa: E731
        compare(write, [normal(5, 3), s], mesh_of((4,)), [[S(0)], [R]])


def test_sharded_targets_stay_where_they_are():
    x, index, source = place(normal(1000, 300), S(0)), place(ROWS, R), place(normal(6, 300), R).requires_grad_()
    writes = [
        lambda: x.index_add(0, index, source),
        lambda: x.index_put((index,), source),
        lambda: x.index_copy_(0, index, source.detach()),
        lambda: x.scatter(0, index[:, None], source),
        lambda: x.select_scatter(source[0], 0, 700),
        lambda: x.slice_scatter(source, 0, 500, 506),
    ]
    for write in writes:
        with CommDebugMode() as comm:
            out = write()
        assert out.placements == (S(0),) and comm.get_total_counts() == 0


def test_sharded_sources_add_up_where_they_are():
    x, index, source = place(normal(5, 3), R), place(torch.arange(4000) % 5, S(0)), place(normal(4000, 3), S(0))
    with CommDebugMode() as comm:
        out = x.index_add(0, index, source)
    assert out.placements == (P(),)
    assert comm.get_comm_counts() == {"all_reduce": 1}  # whether an index is out of range, one number
    torch.testing.assert_close(out.full_tensor(), normal(5, 3).index_add(0, torch.arange(4000) % 5, normal(4000, 3)))


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_assignment(placement):
    x, d = normal(5, 3), place(normal(5, 3), placement)
    x[ROWS], x[SOME] = 1.5, 2.5
    d[on(d, ROWS)], d[on(d, SOME)] = 1.5, 2.5
    x[[0, 2]], x[[3, 4], [0, 2]] = 0.5, normal(2)
    d[[0, 2]], d[[3, 4], [0, 2]] = 0.5, on(d, normal(2))
    assert torch.equal(d.full_tensor(), x)


def test_assignment_of_rows_to_a_mask_of_sharded_rows():
    """Which of the rows a shard takes depends on the masks of the others."""
    x, d = normal(5, 3), place(normal(5, 3), S(0))
    x[SOME], d[on(d, SOME)] = normal(3, 3), on(d, normal(3, 3))
    assert torch.equal(d.full_tensor(), x)


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_assignment_behind_a_slice(placement):
    x, d = normal(5, 3), place(normal(5, 3), placement)
    x[1:, ROWS % 3], x[..., ROWS % 3] = normal(4, 1), 2.5
    d[1:, on(d, ROWS % 3)], d[..., on(d, ROWS % 3)] = on(d, normal(4, 1)), 2.5
    assert torch.equal(d.full_tensor(), x)
