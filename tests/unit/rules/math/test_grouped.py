"""Products of groups of rows, each with a matrix of its own."""

import pytest
import torch
import torch.nn.functional as F
from compare import full
from sweep import normal, place, sweep
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

SHAPES = {
    "rows": ((9, 16), (5, 16, 24)),
    "columns": ((5, 8, 16), (16, 16)),
    "gradients of the matrices": ((16, 16), (16, 24)),
}
ENDS = {
    "all": (2, 4, 5, 7, 9),
    "some empty": (0, 3, 3, 9, 9),
    "one has all": (0, 0, 9, 9, 9),
}


def offsets_of(ends: tuple[int, ...], rows: int) -> Tensor:
    """Where groups end; the last one takes what is left, since torch leaves anything in rows that have no group."""
    return torch.tensor([rows if end == 9 else end for end in ends], dtype=torch.int32)


def rows_of(shapes: tuple[tuple[int, ...], ...]) -> int:
    a, b = shapes
    return a[0] if len(b) == 3 else b[1] if len(a) == 3 else b[0]


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_value_and_gradient_in_every_layout(shapes, ends):
    a, b = (normal(*shape).float() for shape in shapes)
    sweep(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), a, b, offsets_of(ends, rows_of(shapes)), atol=1e-4)


def test_batches():
    sweep(F.grouped_mm, normal(3, 8, 16).float(), normal(3, 16, 24).float(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_half_precision(shapes, dtype):
    """Rows of shards that do not begin at multiples of 16 bytes: 16 and 24 numbers on four ranks do not."""
    a, b = (normal(*shape).mul(2).round().to(dtype) for shape in shapes)
    ends = offsets_of(ENDS["all"], rows_of(shapes))
    sweep(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), a, b, ends, atol=0.3, rtol=0.05)


WAYS = {
    "rows are sharded": ((9, 16), S(0), (5, 16, 24), R, S(0)),
    "experts are sharded": ((9, 16), R, (5, 16, 24), S(0), P()),
    "columns are sharded": ((9, 16), R, (5, 16, 24), S(2), S(1)),
    "the contracted dim is sharded": ((9, 16), S(1), (5, 16, 24), S(1), P()),
    "a sum is pending": ((9, 16), P(), (5, 16, 24), R, P()),
    "an average is pending": ((9, 16), R, (5, 16, 24), P("avg"), P("avg")),
    "experts on the left": ((5, 8, 16), S(0), (16, 16), R, P()),
    "columns in groups": ((5, 8, 16), R, (16, 16), S(1), S(1)),
    "rows of all experts": ((5, 8, 16), S(1), (16, 16), R, S(0)),
    "groups of the contracted dim": ((16, 16), S(1), (16, 24), S(0), P()),
}


@pytest.mark.parametrize(("a", "left", "b", "right", "out"), WAYS.values(), ids=WAYS)
def test_nothing_is_moved(a, left, b, right, out):
    offs = place(offsets_of(ENDS["all"], rows_of((a, b))), R)
    x, w = place(normal(*a).float(), left), place(normal(*b).float(), right)
    with sw.strict(), CommDebugMode() as seen:
        y = F.grouped_mm(x, w, offs=offs)
    assert y.placements == (out,)
    assert seen.get_total_counts() == 0


def test_rows_and_experts_on_two_axes():
    """Data parallel along one axis, and expert parallel along the other; neither tokens nor experts are moved."""
    offs = torch.tensor([0, 5, 6, 13, 13, 18, 20], dtype=torch.int32)
    x, w, v = normal(20, 16).float(), normal(7, 16, 24).float(), normal(7, 24, 16).float()

    def run(x: Tensor, w: Tensor, v: Tensor, offs: Tensor) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in (x, w, v)]
        hidden = F.grouped_mm(x, w, offs=offs).relu()
        out = F.grouped_mm(hidden, v, offs=offs)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    expected = run(x.clone(), w.clone(), v.clone(), offs)
    layouts = ((x, S(0), R), (w, R, S(0)), (v, R, S(0)), (offs, R, R))
    dist = [place(*where, mesh=(2, 3)) for where in layouts]
    with CommDebugMode() as seen:
        got = run(*dist)
    assert "all_gather" not in {str(name).split(".")[-1] for name in seen.get_comm_counts()}
    torch.testing.assert_close([full(t) for t in got], expected, atol=1e-3, rtol=1e-5)
    assert got[2].placements == (R, S(0))


def test_a_rank_without_experts_takes_part():
    offs = torch.tensor([4, 9], dtype=torch.int32)
    x, w = normal(9, 16).float(), normal(2, 16, 24).float()
    expected = F.grouped_mm(x, w, offs=offs)
    got = F.grouped_mm(place(x, R, mesh=(4,)), place(w, S(0), mesh=(4,)), offs=place(offs, R, mesh=(4,)))
    torch.testing.assert_close(got.full_tensor(), expected)


def test_weights_that_lie_the_other_way():
    """Rows of 20 numbers do not begin at multiples of 16 bytes, but columns of 16 do."""
    x, w, offs = normal(8, 16).bfloat16(), normal(3, 20, 16).bfloat16(), torch.tensor([2, 5, 8], dtype=torch.int32)
    expected = F.grouped_mm(x, w.transpose(1, 2), offs=offs)
    for placement in (R, S(0), S(1), S(2)):
        d = place(w, placement)
        with sw.strict():
            got = F.grouped_mm(place(x, R), d.transpose(1, 2), offs=place(offs, R))
        torch.testing.assert_close(got.full_tensor(), expected, atol=0.1, rtol=0.05)


def test_shards_of_one_index():
    """One token and a weight that lies the other way, as when a model generates; every rank holds one row or none."""
    x, w = normal(2, 16).float(), normal(3, 20, 16).float()
    offs = torch.tensor([0, 2, 2], dtype=torch.int32)
    expected = F.grouped_mm(x, w.transpose(1, 2), offs=offs)
    for rows, experts in ((S(0), R), (R, S(0)), (R, S(1))):
        d, v = place(x, rows, mesh=(3,)), place(w, experts, mesh=(3,))
        got = F.grouped_mm(d, v.transpose(1, 2), offs=place(offs, R, mesh=(3,)))
        torch.testing.assert_close(got.full_tensor(), expected)
        torch.testing.assert_close(got.t().reshape(-1).full_tensor(), expected.t().reshape(-1))


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_with_one_row_or_column(ranks):
    """Their strides say nothing, and must still be what torch wants."""
    offs = torch.tensor([3, 8], dtype=torch.int32)
    for form, (a, b) in {"rows": ((8, 8), (2, 8, 8)), "columns": ((2, 8, 8), (8, 8)), "both": ((8, 8), (8, 8))}.items():
        for left, right in ((R, S(len(b) - 1)), (S(len(a) - 1), S(len(b) - 2)), (R, S(0)), (S(0), R)):
            for turned in (False, True) if form == "rows" else (False,):
                x, w = normal(*a).float(), normal(*b).float()
                expected = F.grouped_mm(x, w.mT if turned else w, offs=offs)
                given = [place(t, p, mesh=(ranks,)) for t, p in ((x, left), (w, right), (offs, R))]
                got = F.grouped_mm(given[0], given[1].mT if turned else given[1], offs=given[2])
                torch.testing.assert_close(got.full_tensor(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_second_derivatives(shapes):
    offs = offsets_of(ENDS["some empty"], rows_of(shapes))

    def second(a: Tensor, b: Tensor, offs: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(F.grouped_mm(a, b, offs=offs).pow(3).sum(), [a, b], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), [a, b])

    a, b = (0.1 * normal(*shape).float() for shape in shapes)
    expected = second(a.clone().requires_grad_(), b.clone().requires_grad_(), offs)
    for left in (R, *map(S, range(a.ndim))):
        for right in (R, *map(S, range(b.ndim))):
            given = [place(t, p, mesh=(3,)).requires_grad_() for t, p in ((a, left), (b, right))]
            got = second(*given, place(offs, R, mesh=(3,)))
            torch.testing.assert_close([full(t) for t in got], list(expected), atol=1e-3, rtol=1e-3)


def test_bad_products_are_refused_in_torchs_words():
    offs = torch.tensor([2, 5, 8], dtype=torch.int32)
    x, w = normal(8, 16).float(), normal(3, 8, 32).float()
    with pytest.raises(RuntimeError) as here:
        F.grouped_mm(x, w, offs=offs)
    with pytest.raises(RuntimeError) as there:
        F.grouped_mm(place(x, S(0)), place(w, S(0)), offs=place(offs, R))
    assert str(there.value) == str(here.value)
