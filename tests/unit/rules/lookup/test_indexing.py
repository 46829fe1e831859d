"""Reading at indices."""

import pytest
import torch
from compare import compare
from indexing_cases import READS, ROWS, SEARCHES, SOME, TWO, WIDE, at
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


@pytest.mark.parametrize(("function", "x", "index"), READS.values(), ids=READS)
def test_read(function, x, index):
    sweep(function, x, index)


def test_a_single_number_as_index():
    with sw.strict():
        compare(lambda x, i: x[i], [normal(5, 3), at(3)[0]], mesh_of((2,)), [[S(0)], [R]])


@pytest.mark.parametrize(("function", "x", "i", "j"), TWO.values(), ids=TWO)
def test_read_at_two_indices(function, x, i, j):
    sweep(function, x, i, j)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.complex128], ids=str)
def test_dtypes(dtype):
    x = (normal(5, 3) * 3).abs().to(dtype) if dtype != torch.bool else normal(5, 3) > 0
    for placement in (R, S(0), S(1)):
        for name in ("gather", "index_select", "index", "take"):
            function, _, index = READS[name]
            compare(lambda x, i, f=function: f(x, i % 5), [x, index], mesh_of((4,)), [[placement], [R]], backward=False)


def test_second_derivatives():
    def twice(x, i):
        y = (x.gather(0, i) ** 3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g

    for placement in (R, S(0), S(1)):
        compare(twice, [normal(5, 3), WIDE], mesh_of((4,)), [[placement], [R]])


def test_the_indexed_dim_on_two_axes():
    for mesh in ((2, 2), (2, 1, 2)):
        where = [S(0)] * len(mesh)
        compare(lambda x, i: x[i], [normal(7, 3), ROWS], mesh_of(mesh), [where, [R] * len(mesh)])
        compare(lambda x, i: x.take(i), [normal(7, 3), ROWS], mesh_of(mesh), [where, [R] * len(mesh)])


def test_pieces_of_any_size():
    """A slice of a sharded dim has pieces that no chunking gives, some empty."""
    x = normal(9, 3)
    for function, index in ((lambda x, i: x[3:8][i], ROWS), (lambda x, i: x[3:8].gather(0, i), WIDE)):
        compare(function, [x, index], mesh_of((4,)), [[S(0)], [R]])


def test_sharded_rows_stay_where_they_are():
    """Only the indices and the looked-up rows may travel, backward too."""
    x, index = place(normal(1000, 300), S(0)).requires_grad_(), place(ROWS, R)
    for read in (lambda: x[index], lambda: x.index_select(0, index), lambda: x[index, index]):
        with CommDebugMode() as comm:
            out = read()
        assert out.placements == (P(),) and comm.get_total_counts() == 0
        with CommDebugMode() as comm:
            out.sum().backward()
        assert comm.get_total_counts() == 0 and x.grad.placements == (S(0),)


def test_batches_stay_where_they_are():
    x, index = place(normal(400, 300), S(0)), place(torch.zeros(400, 5, dtype=torch.int64), S(0))
    with CommDebugMode() as comm:
        out = x.gather(1, index)
    assert out.placements == (S(0),)
    assert set(comm.get_comm_counts()) <= {"all_reduce"}  # whether an index is out of range, one number


def test_boolean_masks_look_up_by_mask():
    """Plans of integers are not taken for masks of the same shape, nor the other way round."""
    x, mask = normal(5, 3), SOME
    d, index = place(x, R), place(ROWS, R)
    assert torch.equal(d[index].full_tensor(), x[ROWS])
    assert torch.equal(d[place(mask, R)].full_tensor(), x[mask])
    assert torch.equal(d[index].full_tensor(), x[ROWS])


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_mask_does_not_make_integers_gather():
    d = place(normal(6, 4), S(0))
    d[place(torch.tensor([True] * 6), R)]
    with sw.strict():
        d[place(torch.arange(6), R)]


DATA_DEPENDENT = {
    "mask": lambda x: x[x > 0],
    "row mask": lambda x: x[x[:, 0] > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "nonzero tuple": lambda x: (x > 0).nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "where": lambda x: torch.where(x > 0),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long()),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("function", DATA_DEPENDENT.values(), ids=DATA_DEPENDENT)
def test_results_whose_size_depends_on_data(function):
    sweep(function, normal(5, 3))


def test_one_hot():
    sweep(lambda i: torch.nn.functional.one_hot(i, 5), WIDE)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_search(search):
    function, *inputs = search
    sweep(lambda *inputs: function(*(x.detach() for x in inputs)), *inputs)


def test_sharded_boundaries_stay_where_they_are():
    values, boundaries = place(normal(5), R), place(torch.arange(1000.0, dtype=torch.float64), S(0))
    with CommDebugMode() as comm:
        found = torch.bucketize(values, boundaries)
    assert found.placements == (P(),) and comm.get_total_counts() == 0
