"""Backward ops, called by name: gathered, and right."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, sweep

import shardwise as sw

R, S = sw.Replicate(), sw.Shard
aten = torch.ops.aten
WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)


def softmax_gradient(g, x):
    return aten._softmax_backward_data(g, F.softmax(x, 1), 1, torch.float64)


def log_softmax_gradient(g, x):
    return aten._log_softmax_backward_data(g, F.log_softmax(x, 0), 0, torch.float64)


def max_pool_gradient(g, x):
    return aten.max_pool2d_with_indices_backward(g, x, *WINDOW, F.max_pool2d(x, 2, return_indices=True)[1])


def unfold_gradient(g):
    return aten.unfold_backward(g, [5, 7], 1, 3, 2)


OPS = {
    "softmax": (softmax_gradient, (5, 4), (5, 4)),
    "log_softmax": (log_softmax_gradient, (5, 4), (5, 4)),
    "max_pool2d": (max_pool_gradient, (3, 2, 2, 3), (3, 2, 4, 6)),
    "unfold": (unfold_gradient, (5, 3, 3)),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in OPS.values()], ids=OPS)
def test_gradients(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))
