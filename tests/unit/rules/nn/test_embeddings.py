"""Embeddings of tables split by rows, by columns, or both."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from compare import check_shards
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
INDEX = torch.tensor([[0, 1, 1], [3, 5, 1], [0, 2, 4]])

OPTIONS = [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True, "padding_idx": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_embedding(options):
    sweep(lambda index, table: F.embedding(index, table, **options), INDEX, normal(6, 3))


def test_fewer_rows_than_ranks():
    sweep(lambda index, table: F.embedding(index, table, padding_idx=0), INDEX % 2, normal(2, 3))
    sweep(lambda index, table: F.embedding(index, table), INDEX[0, 1], normal(3, 2))


def test_rows_of_others_do_not_show():
    """What stands in for a row of another rank is not that row, and not a NaN in disguise."""
    table = normal(6, 3)
    table[0] = table[3] = torch.nan
    out = F.embedding(place(INDEX[1:2, 1:], R), place(table, S(0)))
    torch.testing.assert_close(out.full_tensor(), table[INDEX[1:2, 1:]])


@pytest.mark.parametrize(
    ("placement", "result"), [(S(0), P()), (S(1), S(2)), (R, R)], ids=["rows", "columns", "replicated"]
)
def test_tables_stay_where_they_are(placement, result):
    index, table = place(INDEX, R), place(normal(6, 4), placement).requires_grad_()
    with CommDebugMode() as comm:
        out = F.embedding(index, table)
        assert out.placements == (result,) and comm.get_total_counts() == 0
        out.sum().backward()
    assert table.grad.placements == (placement,) and comm.get_total_counts() == 0


def test_rows_and_columns():
    index, table = place(INDEX, R, R, mesh=(2, 2)), place(normal(6, 4), S(0), S(1), mesh=(2, 2))
    with CommDebugMode() as comm:
        out = F.embedding(index, table)
    assert out.placements == (P(), S(2)) and comm.get_total_counts() == 0


# Training: rows that are too long are shortened in place, where they lie

TRAINED = {
    "embedding": lambda i, w: F.embedding(i, w, padding_idx=1),
    "sparse": lambda i, w: F.embedding(i, w, sparse=True),
    "norm 2": lambda i, w: F.embedding(i, w, max_norm=0.7),
    "norm 1": lambda i, w: F.embedding(i, w, max_norm=0.7, norm_type=1.0, padding_idx=1),
    "largest": lambda i, w: F.embedding(i, w, max_norm=0.7, norm_type=float("inf")),
    "bag": lambda i, w: F.embedding_bag(i, w, padding_idx=1),
    "largest of bag": lambda i, w: F.embedding_bag(i, w, mode="max"),
    "short rows of bag": lambda i, w: F.embedding_bag(i, w, max_norm=0.7, mode="sum", sparse=True),
}
LAYOUTS = [((2,), p) for p in itertools.product([R, S(0), S(1)])]
LAYOUTS += [((4,), (S(0),)), ((2, 2), (S(0), S(1))), ((2, 2), (S(0), S(0))), ((2, 2), (R, S(1)))]


@pytest.mark.parametrize("look_up", TRAINED.values(), ids=TRAINED)
def test_several_steps_of_training(look_up):
    for (mesh, where), rows in itertools.product(LAYOUTS, [R, S(0)]):
        plain = normal(6, 4).requires_grad_()
        table = place(normal(6, 4), *where, mesh=mesh).requires_grad_()
        index = place(INDEX[:, :2], *[rows] * len(mesh), mesh=mesh)
        for weight, looked_up in ((plain, INDEX[:, :2]), (table, index)):
            optimizer = torch.optim.SGD([weight], lr=0.3)
            for _ in range(3):
                optimizer.zero_grad()
                (look_up(looked_up, weight) ** 2).sum().backward()
                optimizer.step()
        check_shards(table)
        torch.testing.assert_close(table.detach().full_tensor(), plain.detach(), msg=f"{where} {rows}")


def test_only_rows_that_are_looked_up_are_shortened():
    """Their norms are those of whole rows, in one small reduction, and the table does not move."""
    table, index = place(normal(6, 4), S(1)), place(torch.tensor([1, 4, 4]), R)
    with CommDebugMode() as comm:
        F.embedding(index, table, max_norm=0.1)
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_reduce", 16)]
    expected = normal(6, 4)
    F.embedding(torch.tensor([1, 4, 4]), expected, max_norm=0.1)
    found = table.full_tensor()
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[[0, 2, 3, 5]], normal(6, 4)[[0, 2, 3, 5]])


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_gradients_are_dense(placement):
    table = place(normal(6, 4), placement).requires_grad_()
    F.embedding(place(INDEX, S(0)), table, sparse=True).sum().backward()
    assert not table.grad.is_sparse and table.grad.placements == (placement,)


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize("bad", [6, -1])
def test_index_out_of_range(placement, bad):
    table, index = place(normal(6, 4), placement), place(torch.tensor([0, bad]), R)
    with (
        CommDebugMode() as comm,
        pytest.raises(IndexError, match=r"index out of range in self|index -?\d is out of bounds"),
    ):
        F.embedding(index, table)
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize("options", [{}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_split_index_out_of_range(placement, options):
    """One rank of those that split the indices has it; they all tell each other, before anything else is sent."""
    table, index = place(normal(6, 4), R, placement, mesh=(2, 2)), place(torch.tensor([0, 6]), S(0), R, mesh=(2, 2))
    with (
        CommDebugMode() as comm,
        pytest.raises(IndexError, match=r"index out of range in self|index -?\d is out of bounds"),
    ):
        F.embedding(index, table, **options)
    assert [(c.kind, c.axes, c.bytes) for c in comm.comms] == [("all_reduce", ("a",), 8)]


def test_ranks_without_columns_look_at_indices():
    with pytest.raises(IndexError, match=r"index out of range in self|index -?\d is out of bounds"):
        F.embedding(place(torch.tensor([0, 6]), R, mesh=(4,)), place(normal(6, 3), S(1), mesh=(4,)))


@pytest.mark.parametrize("rows", [R, S(0)], ids=str)
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_too_long_rows_out_of_range(placement, rows):
    """Torch's other words for it. Nothing was changed where ranks hold parts."""
    table, index = place(normal(6, 4), placement), place(torch.tensor([0, 6]), rows)
    with pytest.raises(IndexError, match=r"index 6 (out of range|is out of bounds)"):
        F.embedding(index, table, max_norm=0.1)
    if (placement, rows) != (R, R):
        torch.testing.assert_close(table.full_tensor(), normal(6, 4))


def test_a_module():
    plain = torch.nn.Embedding(7, 5, padding_idx=2, max_norm=1.5)
    table = torch.nn.Embedding(7, 5, padding_idx=2, max_norm=1.5)
    shards = sw.distribute_tensor(plain.weight.detach(), mesh_of((4,)), [S(0)])
    table.weight = torch.nn.Parameter(shards)
    out, expected = table(place(INDEX, R, mesh=(4,))), plain(INDEX)
    torch.testing.assert_close(out.full_tensor(), expected)
    expected.sum().backward()
    out.sum().backward()
    torch.testing.assert_close(table.weight.grad.full_tensor(), plain.weight.grad)
