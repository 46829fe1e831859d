"""Bags of embeddings: sums, means and maxima of rows, which may lie on several ranks."""

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
BAGS = torch.tensor([[0, 1, 1], [3, 5, 1], [0, 2, 4]])
ITEMS = torch.tensor([1, 1, 0, 3, 5, 1, 0, 2, 4, 4])
OFFSETS = torch.tensor([0, 2, 2, 7])  # the first is all padding where 1 is; the second is empty
MODES = ["sum", "mean", "max"]
may_gather = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
"""Offsets are always gathered, and the indices of what must be counted: they are small. The table is not."""
over_padding = pytest.mark.parametrize("padding", [None, 1, -5])


@pytest.mark.parametrize("mode", MODES)
@over_padding
def test_rows_of_indices(mode, padding):
    bag = lambda index, table: F.embedding_bag(index, table, mode=mode, padding_idx=padding)  # noqa: E731
    sweep(bag, BAGS, normal(6, 3))
    sweep(bag, torch.tensor([[1, 1], [1, 4], [5, 0]]), normal(6, 3), partial=False)


@may_gather
@pytest.mark.parametrize("mode", MODES)
@over_padding
def test_offsets(mode, padding):
    options = {"mode": mode, "padding_idx": padding}
    sweep(lambda i, w, o: F.embedding_bag(i, w, o, **options), ITEMS, normal(6, 3), OFFSETS, partial=False)
    ends = torch.cat([OFFSETS, torch.tensor([10])]).int()
    last = lambda i, w, o: F.embedding_bag(i, w, o, include_last_offset=True, **options)  # noqa: E731
    sweep(last, ITEMS.int(), normal(6, 3), ends, partial=False)


@may_gather
@pytest.mark.parametrize("padding", [None, 1])
def test_weights_of_samples(padding):
    """They have a gradient of their own."""
    options = {"mode": "sum", "padding_idx": padding}
    sweep(lambda i, w, p: F.embedding_bag(i, w, per_sample_weights=p, **options), *(BAGS, normal(6, 3), normal(3, 3)))
    sweep(
        lambda i, w, o, p: F.embedding_bag(i, w, o, per_sample_weights=p, **options),
        *(ITEMS, normal(6, 3), OFFSETS, normal(10)),
        partial=False,
    )


@may_gather
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_by_frequency(mode):
    sweep(lambda i, w: F.embedding_bag(i, w, mode=mode, scale_grad_by_freq=True), BAGS, normal(6, 3))


@pytest.mark.parametrize("mode", MODES)
def test_fewer_rows_than_ranks(mode):
    sweep(lambda i, w: F.embedding_bag(i, w, mode=mode, padding_idx=1), BAGS % 2, normal(2, 3))


def test_ties_go_to_the_first_of_the_bag():
    """Rows 5 and 0 are alike, and lie on different ranks."""
    table = normal(6, 3)
    table[5] = table[0] = table.amax(0) + 1
    bags = torch.tensor([[5, 0], [0, 5], [1, 5]])
    for placement in (R, S(0), S(1)):
        compare(lambda i, w: F.embedding_bag(i, w, mode="max"), [bags, table], mesh_of((2,)), [[R], [placement]])


@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_not_numbers(mode):
    table = normal(6, 3)
    table[3, 0] = table[0, 1] = torch.nan
    table[2] = -torch.inf
    bags = torch.tensor([[3, 1, 0], [1, 3, 0], [2, 2, 2], [4, 5, 4]])
    out = F.embedding_bag(place(bags, R), place(table, S(0)), mode=mode)
    torch.testing.assert_close(out.full_tensor(), F.embedding_bag(bags, table, mode=mode), equal_nan=True)


# What is communicated

ASKED = [("all_reduce", 8)]


def sent(comm):
    return [(c.kind, c.bytes) for c in comm.comms]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("items", "table", "result"), [(R, S(0), P()), (R, S(1), S(1)), (S(0), R, S(0))], ids=["rows", "columns", "bags"]
)
def test_nothing_moves(mode, items, table, result):
    """Where items are split it is asked, in one number, whether all are in range."""
    index, weight = place(BAGS, items), place(normal(6, 4), table).requires_grad_()
    with CommDebugMode() as comm:
        out = F.embedding_bag(index, weight, mode=mode)
    assert out.placements == (result,) and sent(comm) == (ASKED if items == S(0) else [])


def test_maxima_of_split_rows_are_gathered():
    index, weight = place(BAGS, R), place(normal(6, 4), S(0)).requires_grad_()
    with CommDebugMode() as comm:
        F.embedding_bag(index, weight, mode="max").sum().backward()
    assert comm.get_comm_counts() == {"all_gather": 1} and weight.grad.placements == (S(0),)


def test_items_of_long_bags_add_up():
    index, offsets, weight = place(ITEMS, S(0)), place(OFFSETS, R), place(normal(6, 4), R)
    with CommDebugMode() as comm:
        out = F.embedding_bag(index, weight, offsets)
    assert out.placements == (P(),) and sent(comm) == ASKED


# Errors


@pytest.mark.parametrize(
    ("items", "offsets", "message"),
    [
        ([0, 6], [0], "found idx to be 6|index 6 is out of bounds"),
        (
            [0, 1],
            [1],
            r"offsets must begin at 0, not decrease, and not exceed the number of items, 2; but they are \[1",
        ),
        ([0, 1], [0, 3], r"but they are \[0, 3\]"),
        ([0, 1], [0, -1], r"but they are \[0, -1\]"),
    ],
)
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_bad_arguments(placement, items, offsets, message):
    items, offsets, table = (
        place(torch.tensor(items), R),
        place(torch.tensor(offsets), R),
        place(normal(6, 4), placement),
    )
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match=message):
        F.embedding_bag(items, table, offsets)
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", [R, S(0), S(1)], ids=str)
def test_split_items_out_of_range(table, mode):
    bags = BAGS.clone()
    bags[2, 1] = 6
    index, table = place(bags, S(0), R, mesh=(2, 2)), place(normal(6, 4), R, table, mesh=(2, 2))
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match="index 6 is out of bounds"):
        F.embedding_bag(index, table, mode=mode)
    assert sent(comm)[-1:] == ASKED


@may_gather  # what is not implemented is gathered before it says so
def test_arguments_that_do_not_fit():
    table = place(normal(6, 4), S(0))
    with pytest.raises(ValueError, match="offsets has to be a 1D Tensor but got None"):
        F.embedding_bag(place(ITEMS, R), table)
    with pytest.raises(NotImplementedError, match="per_sample_weights is only supported for mode='sum'"):
        F.embedding_bag(place(BAGS, R), table, per_sample_weights=place(normal(3, 3), R))
    with pytest.raises(RuntimeError, match="padding_idx must be within the number of embeddings"):
        F.embedding_bag(place(BAGS, R), table, padding_idx=9)


@pytest.mark.parametrize("where", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_bags_that_end_before_they_begin(mode, where):
    """Torch reads what is not there, or refuses: it depends on the mode, and the ranks would not agree."""
    items, offsets = place(ITEMS, R), place(torch.tensor([0, 5, 3]), R)
    with pytest.raises(RuntimeError, match=r"offsets must .* not decrease, .* but they are \[0, 5, 3\]"):
        F.embedding_bag(items, place(normal(6, 4), where), offsets, mode=mode)
