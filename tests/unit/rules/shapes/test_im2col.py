"""Ops that trade channels for space: patches as columns and back, pixels and channels shuffled."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

OPS = {
    "unfold": (lambda a: F.unfold(a, 2, padding=1), (3, 2, 4, 3)),
    "unfold, no batch": (lambda a: F.unfold(a, (2, 1), dilation=2, stride=(1, 2)), (3, 4, 3)),
    "fold": (lambda a: F.fold(a, (4, 3), 2, padding=1), (3, 8, 20)),
    "fold, no batch": (lambda a: F.fold(a, (4, 3), 2), (8, 6)),
    "pixel_shuffle": (lambda a: F.pixel_shuffle(a, 2), (3, 8, 2, 3)),
    "pixel_shuffle, no batch": (lambda a: F.pixel_shuffle(a, 2), (8, 2, 3)),
    "pixel_unshuffle": (lambda a: F.pixel_unshuffle(a, 2), (3, 2, 4, 6)),
    "channel_shuffle": (lambda a: F.channel_shuffle(a, 2), (3, 4, 2, 3)),
}


@pytest.mark.parametrize(("op", "shape"), OPS.values(), ids=OPS)
def test_patches(op, shape):
    sweep(op, normal(*shape))


def test_explicit_pieces():
    sweep(lambda a: F.fold(F.unfold(a[:, 3:, 1:], 2), (4, 3), 2), normal(2, 5, 5, 3))
    sweep(lambda a: F.pixel_unshuffle(F.pixel_shuffle(a[1:, 4:], 2), 2), normal(3, 12, 2, 2))


STAYS = {
    "unfold batch": (lambda a: F.unfold(a, 2), S(0), "[4,32,9] S(0)@a"),
    "unfold channels": (lambda a: F.unfold(a, 2), S(1), "[4,32,9] S(1)@a"),
    "fold channels": (lambda a: F.fold(a.flatten(2), (5, 5), 2), S(1), "[4,2,5,5] S(1)@a"),
    "pixel_shuffle channels": (lambda a: F.pixel_shuffle(a, 2), S(1), "[4,2,8,8] S(1)@a"),
    "pixel_shuffle rows": (lambda a: F.pixel_shuffle(a, 2), S(2), "[4,2,8,8] S(2)@a"),
    "pixel_unshuffle rows": (lambda a: F.pixel_unshuffle(a, 2), S(2), "[4,32,2,2] S(2)@a"),
    "pixel_unshuffle channels": (lambda a: F.pixel_unshuffle(a, 2), S(1), "[4,32,2,2] S(1)@a"),
    "channel_shuffle rows": (lambda a: F.channel_shuffle(a, 2), S(2), "[4,8,4,4] S(2)@a"),
}


@pytest.mark.parametrize(("op", "where", "layout"), STAYS.values(), ids=STAYS)
def test_nothing_moves(op, where, layout):
    x = place(normal(4, 8, 4, 4), where)
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_total_counts() == 0
    assert str(result._layout) == layout
    torch.testing.assert_close(result.full_tensor(), op(normal(4, 8, 4, 4)))


@pytest.mark.parametrize("name", ["unfold", "fold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"])
def test_a_pending_sum_passes_through(name):
    op, shape = OPS[name]
    x = place(normal(*shape), P())
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_total_counts() == 0
    assert result.placements == (P(),)
