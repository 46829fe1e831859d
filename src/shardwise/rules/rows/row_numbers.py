"""What is computed from a few numbers of each row: steps, so that a device may compute them at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.rules.kit.kernels import one_pass
from shardwise.rules.rows.row_passes import LOGITS, MAXIMUM, TOTAL, WEIGHT


def are_classes(target: Tensor, ignore: int, num_classes: int) -> Tensor:
    """Whether all targets name classes that exist, but for those that are ignored."""
    return ((target == ignore) | ((target >= 0) & (target < num_classes))).all()


def asserts_itself(target: Tensor) -> bool:
    """Whether targets are on a device that says itself, and later, that one names no class, as torch has it there."""
    return target.device.type not in ("cpu", "meta")


@one_pass("(Tensor(a!) sums, Tensor top) -> ()")
def row_terms(sums: Tensor, top: Tensor) -> None:
    """Bring what was summed up relative to the largest logit here to that of all ranks: totals of exponentials, and
    weighted sums of logits."""
    shift = sums[MAXIMUM] - top
    if len(sums) > WEIGHT:
        sums[LOGITS].addcmul_(shift, sums[WEIGHT])
    sums[TOTAL].mul_(shift.exp_())


@one_pass(
    "(Tensor sums, Tensor? top, Tensor? largest, Tensor target, Tensor? weights, Tensor? of_classes, int ignore, "
    "float smoothing, int num_classes, float z_loss, bool for_gradient) -> (Tensor, Tensor)"
)
def row_losses(
    sums: Tensor,
    top: Tensor | None,
    largest: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    of_classes: Tensor | None,
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """The losses of rows and their weights; and what their gradients are made of. From the sums of all ranks, relative
    to `top`; or, where there is none, from what each rank has found, one after the other. `largest` is that here, if
    exponentials were taken relative to it and not to `top`."""
    if asserts_itself(target):
        torch._assert_async(are_classes(target, ignore, num_classes))
    if top is None:
        top, sums = _combined(sums)
    else:
        sums = sums[0]
    _, total, picked, *spread = sums.unbind()
    picked, log_total, share = picked - top, total.log(), smoothing / num_classes
    rows = log_total - picked if weights is None else (log_total - picked) * weights
    if smoothing:
        of_all = log_total * (num_classes if of_classes is None else of_classes) - spread[0]
        rows = (1 - smoothing) * rows + share * of_all
    if z_loss:
        rows = rows + z_loss * (log_total + top).square()
    found = torch.stack([rows, torch.ones_like(rows) if weights is None else weights]).masked_fill_(target == ignore, 0)
    if not for_gradient:
        return found, rows.new_empty(0)
    norm = total.reciprocal() if largest is None else (largest - top).exp_().div_(total)
    chance = picked.exp_().div_(total)
    if weights is None and not smoothing and not z_loss:
        return found, torch.stack([top, norm, chance.sub_(1)])
    log_sum, counts = log_total.add_(top), found[1]
    mass = (1 - smoothing) * counts + (smoothing if of_classes is None else share * of_classes) + 2 * z_loss * log_sum
    at_target = chance.mul_(mass).sub_((1 - smoothing + share) * counts)
    return found, torch.stack([top, norm, at_target, mass, log_sum])


@one_pass(
    "(Tensor sums, Tensor? top, Tensor? largest, Tensor target, Tensor? weights, Tensor? of_classes, int ignore, "
    "float smoothing, int num_classes, float z_loss, bool for_gradient, bool mean, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def row_loss(
    sums: Tensor,
    top: Tensor | None,
    largest: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    of_classes: Tensor | None,
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
    mean: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `row_losses` gives; and the loss of all rows, a sum or a mean, with the weight of all."""
    options = ignore, smoothing, num_classes, z_loss, for_gradient
    rows, numbers = row_losses.function(sums, top, largest, target, weights, of_classes, *options)
    return rows, numbers, *loss_of_rows(rows, mean, smoothing > 0, dtype)


def loss_of_rows(rows: Tensor, mean: bool, smoothed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss of all rows from those of single rows and their weights; and the weight of all."""
    value, total = (rows if rows.ndim == 2 else rows.reshape(2, -1)).sum(1).unbind()
    return (mean_loss(value, total, smoothed) if mean else value).to(dtype), total.clone()


def mean_loss(value: Tensor, total: Tensor, smoothed: bool) -> Tensor:
    """A sum of losses over their weight; if this is nothing, what torch says."""
    mean = value / total
    return torch.where(total == 0, math.nan, mean) if smoothed else mean


def _combined(each: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of all ranks, and their sums relative to it."""
    top = each[:, MAXIMUM].amax(0)
    shift = each[:, MAXIMUM] - top
    sums = each.sum(0)
    sums[TOTAL] = (each[:, TOTAL] * shift.exp()).sum(0)
    if len(sums) > WEIGHT:
        sums[LOGITS] += (shift * each[:, WEIGHT]).sum(0)
    return top, sums
