"""Rolls, flips, rotations, repeats and windows: elements that move along a dim."""

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

OPS = {
    "roll": (lambda a: a.roll(1, 0), (5, 3)),
    "roll back": (lambda a: a.roll(-7, 1), (3, 5)),
    "roll dims": (lambda a: a.roll((2, -1), (0, 1)), (5, 3)),
    "roll a dim twice": (lambda a: a.roll((2, 1), (0, 0)), (5, 3)),
    "roll not at all": (lambda a: a.roll(0, 0), (5, 2)),
    "roll flat": (lambda a: a.roll(4), (5, 3)),
    "roll a vector": (lambda a: a.roll(4), (5,)),
    "roll flat inner": (lambda a: a.roll(-1), (1, 5, 2)),
    "roll nothing": (lambda a: a.roll(1, 0), (0, 2)),
    "roll a scalar": (lambda a: a.roll(1), ()),
    "flip": (lambda a: a.flip(0), (5, 3)),
    "flip dims": (lambda a: a.flip(0, -1), (5, 3)),
    "flip no dim": (lambda a: a.flip([]), (5, 3)),
    "flip nothing": (lambda a: a.flip(0), (0, 2)),
    "fliplr": (torch.fliplr, (5, 3)),
    "flipud": (torch.flipud, (5, 3)),
    "rot90": (lambda a: torch.rot90(a), (5, 3)),
    "rot90 back": (lambda a: torch.rot90(a, -1), (5, 3)),
    "rot90 not": (lambda a: torch.rot90(a, 0), (5, 3)),
    "rot90 half": (lambda a: torch.rot90(a, 2), (5, 3)),
    "rot90 dims": (lambda a: torch.rot90(a, 1, (2, 0)), (3, 2, 5)),
    "repeat": (lambda a: a.repeat(2, 3), (5, 3)),
    "repeat lead": (lambda a: a.repeat(2, 1, 2), (5, 3)),
    "repeat often": (lambda a: a.repeat(9, 1), (5, 3)),
    "repeat never": (lambda a: a.repeat(0, 1), (5, 3)),
    "repeat one": (lambda a: a.repeat(5), (1,)),
    "tile": (lambda a: a.tile(3), (5, 3)),
    "unfold": (lambda a: a.unfold(0, 3, 1), (7, 2)),
    "unfold apart": (lambda a: a.unfold(0, 2, 3), (7, 2)),
    "unfold one window": (lambda a: a.unfold(0, 7, 1), (7, 2)),
    "unfold side by side": (lambda a: a.unfold(1, 2, 2), (3, 8)),
    "unfold twice": (lambda a: a.unfold(0, 2, 1).unfold(1, 2, 1), (4, 5)),
    "unfold a scalar": (lambda a: a.unfold(0, 1, 1), ()),
    "unfold_copy": (lambda a: torch.unfold_copy(a, 0, 2, 1), (5, 2)),
}


@pytest.mark.parametrize(("op", "shape"), OPS.values(), ids=OPS)
def test_moved_elements(op, shape):
    sweep(op, normal(*shape))


MOVING = ["roll", "roll flat", "flip", "rot90", "repeat", "unfold", "unfold apart"]


@pytest.mark.parametrize("name", MOVING)
def test_explicit_pieces(name):
    """Pieces of other sizes than `torch.chunk`'s, some of them empty, on both dims."""
    op = OPS[name][0]
    sweep(lambda a: op(a[3:, 1:]), normal(10, 4))


@pytest.mark.parametrize("name", MOVING)
def test_second_derivative(name):
    op = OPS[name][0]

    def gradient(a):
        return torch.autograd.grad((op(a) ** 3).sum(), a, create_graph=True)[0]

    sweep(gradient, normal(7, 3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", MOVING)
def test_other_dtypes(name, dtype):
    op, shape = OPS[name]
    sweep(op, (normal(*shape) > 0).to(dtype))


WAYS = {
    "flip": (lambda a: a.flip(0), S(0), {"all_to_all": 1}, "[8,6] S(0)@a"),
    "flip other": (lambda a: a.flip(1), S(0), {}, "[8,6] S(0)@a"),
    "roll": (lambda a: a.roll(3, 0), S(0), {"all_to_all": 2}, "[8,6] S(0)@a"),
    "roll other": (lambda a: a.roll(3, 1), S(0), {}, "[8,6] S(0)@a"),
    "roll not at all": (lambda a: a.roll(8, 0), S(0), {}, "[8,6] S(0)@a"),
    "rot90 other": (lambda a: a.rot90(), S(0), {}, "[6,8] S(1)@a"),
    "repeat other": (lambda a: a.repeat(1, 2), S(0), {}, "[8,12] S(0)@a"),
    "unfold": (lambda a: a.unfold(0, 3, 1), S(0), {"all_to_all": 1}, "[6,6,3] S(0)@a"),
    "unfold within": (lambda a: a.unfold(0, 2, 2), S(0), {}, "[4,6,2] S(0)@a"),
    "unfold other": (lambda a: a.unfold(1, 2, 1), S(0), {}, "[8,5,2] S(0)@a"),
}


@pytest.mark.parametrize(("op", "where", "comms", "layout"), WAYS.values(), ids=WAYS)
def test_nothing_is_gathered(op, where, comms, layout):
    x = place(normal(8, 6), where, mesh=(4,))
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_comm_counts() == comms
    assert str(result._layout) == layout


@pytest.mark.parametrize("pending", ["sum", "avg", "max", "min"])
def test_any_reduction_passes_through(pending):
    x = place(normal(8, 6), P(pending))
    with CommDebugMode() as comm:
        results = x.roll(1, 0), x.roll(2), x.flip(0), x.rot90(), x.repeat(2, 1), x.unfold(0, 3, 1)
    assert comm.get_total_counts() == 0
    assert all(result.placements == (P(pending),) for result in results)


@pytest.mark.parametrize("op", [lambda a: a.roll(0, 0), lambda a: a.roll(0), lambda a: a.repeat(1, 1)])
@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_the_result_has_its_own_memory(op):
    x = place(normal(8, 6), S(0))
    op(x).zero_()
    torch.testing.assert_close(x.full_tensor(), normal(8, 6))


def test_a_flip_moves_only_what_changes_its_rank():
    """Rows of the middle rank stay with it."""
    x = sw.distribute_tensor(normal(9, 2), mesh_of((3,)), [S(0)])
    y = x.flip(0)
    torch.testing.assert_close(y.to_local()._peers[0], normal(9, 2)[3:6].flip(0))


def test_axes_in_any_order():
    """A dim that is split by two axes, the later one major: pieces are numbered as the layout says."""
    x = normal(10, 3)
    d = sw.distribute_tensor(x, mesh_of((2, 2)), {0: ("b", "a")})
    for op in (
        lambda a: a.flip(0),
        lambda a: a.roll(3, 0),
        lambda a: a.unfold(0, 3, 2),
        lambda a: a.view(5, 2, 3),
        lambda a: torch.cat([a, a]),
        lambda a: F.pad(a[None], (0, 0, 2, 1), mode="circular"),
    ):
        result = op(d)
        assert any(result._layout.splits) and not any(result._layout.pending)
        torch.testing.assert_close(result.full_tensor(), op(x))
