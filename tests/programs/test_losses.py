"""Losses with weights, ignored targets and smoothed labels, wherever rows and classes are."""

# ruff: noqa: B023 (functions made in loops are called in them)

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, compare
from meshes import LINE, PAIR, data
from sweep import normal, place
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def test_labels_are_not_smoothed_by_a_negative_number() -> None:
    x, target = torch.randn(4, 6), torch.randint(6, (4,))
    found = F.cross_entropy(place(x, S(1)), place(target, R), label_smoothing=-1.0)
    torch.testing.assert_close(found.full_tensor(), F.cross_entropy(x, target, label_smoothing=-1.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_that_weigh_nothing(smoothing: float) -> None:
    x, target, weight = normal(4, 6), torch.zeros(4, dtype=torch.long), torch.ones(6, dtype=torch.float64)
    weight[0] = 0
    assert F.cross_entropy(x, target, weight, label_smoothing=smoothing).isnan()
    for placement, rows in ((S(0), S(0)), (S(1), R)):
        given = place(x, placement), place(target, rows), place(weight, R)
        assert F.cross_entropy(*given, label_smoothing=smoothing).full_tensor().isnan()


@pytest.mark.parametrize("ignored", [False, True])
def test_logits_that_are_no_numbers(ignored: bool) -> None:
    """What one rank finds among its classes spoils the row on all ranks, as on one device, also where it is ignored."""
    inf, nan = float("inf"), float("nan")
    whole = torch.stack(
        [torch.tensor(row) for row in ([-inf] * 6, [0, inf, 0, 0, 0, 0], [0, 0, 0, 0, nan, 0], [1.0] * 6)]
    )
    target = torch.full((4,), -100) if ignored else torch.tensor([0, 3, 1, 2])
    for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.rand(6)}):
        for reduction in ("none", "sum", "mean"):
            results = []
            for placement, rows in ((None, None), (S(0), S(0)), (S(1), R)):
                x, t = (whole, target) if placement is None else (place(whole, placement), place(target, rows))
                x = x.clone().requires_grad_()
                given = {k: beside(x, v, R) if isinstance(v, Tensor) else v for k, v in options.items()}
                loss = F.cross_entropy(x, t, reduction=reduction, **given)
                (grad,) = torch.autograd.grad(loss.sum(), x)
                results.append([found if placement is None else found.full_tensor() for found in (loss, grad)])
            for found in results[1:]:
                torch.testing.assert_close(found, results[0], equal_nan=True)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_weights_of_another_dtype(loss: Any) -> None:
    x, target, weight = normal(4, 6), torch.zeros(4, dtype=torch.long), torch.ones(6)
    with pytest.raises(RuntimeError) as expected:
        loss(x, target, weight)
    for placement, rows in ((R, R), (S(0), S(0)), (S(1), R)):
        with pytest.raises(RuntimeError) as raised:
            loss(place(x, placement), place(target, rows), place(weight, R))
        assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("mesh", [PAIR, LINE], ids=str)
@pytest.mark.parametrize("ignore", [-100, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses(mesh: sw.Mesh, ignore: int, smoothing: float) -> None:
    target, weight = torch.tensor([0, 1, 2, 2, 3]), data(4).abs()
    for placement in (S(0), S(1), R, P()):
        rows = S(0) if placement == S(0) else R

        def losses(t: Tensor) -> list[Tensor]:
            at, w = beside(t, target, rows), beside(t, weight)
            entropy = F.cross_entropy(t, at, weight=w, ignore_index=ignore, label_smoothing=smoothing)
            return [entropy, F.nll_loss(t, at, weight=w, ignore_index=ignore)]

        compare(losses, [data(5, 4)], mesh, [[placement]])


@pytest.mark.parametrize("placement", [S(0), S(1), R])
def test_weighted_losses_of_other_kinds(placement: sw.Placement) -> None:
    target, weight, wide = torch.tensor([0, 1, 2, 2, 3]), data(4).abs(), data(5, 4).sigmoid()

    def losses(t: Tensor) -> list[Tensor]:
        rows, w = beside(t, target, S(0) if placement == S(0) else R), beside(t, weight)
        soft = beside(t, wide, placement)
        return [
            F.multi_margin_loss(t, rows, weight=w),
            F.binary_cross_entropy(t.sigmoid(), soft, weight=soft),
            F.binary_cross_entropy_with_logits(t, soft, pos_weight=w),
            F.cross_entropy(t, soft, weight=w, label_smoothing=0.1),
            F.cross_entropy(t, rows * 0 - 100, weight=w),  # of nothing: not a number
            F.nll_loss(t.unsqueeze(2).expand(5, 4, 3), rows.unsqueeze(1).expand(5, 3), weight=w, ignore_index=2),
        ]

    compare(losses, [data(5, 4)], LINE, [[placement]])


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_losses_over_rows(loss: Callable, reduction: str) -> None:
    for rows, (a, b) in itertools.product((4, 5, 3), itertools.product([R, S(0), S(1)], repeat=2)):
        compare(lambda t, u: loss(t, u, reduction=reduction), [data(rows, 3), data(rows, 3)], LINE, [[a], [b]])


@pytest.mark.parametrize("placement", [S(0), S(1), P()])
def test_log_softmax_over_a_sharded_class_dim(placement: sw.Placement) -> None:
    x, w = data(3, 7), data(3, 7)
    d = sw.distribute_tensor(x, LINE, [placement]).requires_grad_()
    (F.log_softmax(d, -1) * sw.distribute_tensor(w, LINE, [S(1)])).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), w - torch.softmax(x, -1) * w.sum(-1, keepdim=True))
