"""What is computed from a few numbers of each row: steps, so that a device may compute them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.rules.kit.kernels import one_pass
from shardwise.rules.nn.row_passes import MAXIMUM, PICKED, TOTAL

NORM, AT_TARGET, MASS, LOG_SUM = range(4)
"""What the gradient of a row is made of: what makes probabilities of its exponentials; the gradient at the target; what
probabilities are multiplied by in it, if that is not one; and the logarithm of the sum of all exponentials, by which
that changes with a z-loss."""


@one_pass("(Tensor target, int ignore, int num_classes) -> Tensor")
def are_classes(target: Tensor, ignore: int, num_classes: int) -> Tensor:
    """Whether all targets name classes that exist, but for those that are ignored."""
    return ((target == ignore) | ((target >= 0) & (target < num_classes))).all()


@one_pass("(Tensor x) -> Tensor")
def in_order(x: Tensor) -> Tensor:
    """Floats as integers of the same order, and these as floats again. Every backend knows the maximum of integers,
    and to most of them a NaN is the largest."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}
    floats = {integer: x for x, integer in bits.items()}
    integers = x if x.dtype in floats else x.view(bits[x.dtype])
    sign = integers >> (8 * x.dtype.itemsize - 1)
    flipped = integers ^ (sign & torch.iinfo(integers.dtype).max)
    return flipped.view(floats[x.dtype]) if x.dtype in floats else flipped


@one_pass("(Tensor(a!) sums, Tensor top, Tensor? of_classes) -> ()")
def row_terms(sums: Tensor, top: Tensor, of_classes: Tensor | None) -> None:
    """Bring what was summed up relative to the largest logit here to that of all ranks: the totals of exponentials
    and, where there are weights of the classes here, the weighted sums of logits."""
    shift = sums[MAXIMUM] - top
    if of_classes is not None:
        sums[-1].add_(shift * of_classes)
    sums[TOTAL].mul_(shift.exp_())


@one_pass(
    "(Tensor sums, Tensor top, Tensor? largest, Tensor target, Tensor? weights, Tensor? of_classes, int ignore, "
    "float smoothing, int num_classes, float z_loss, bool for_gradient) -> (Tensor, Tensor, Tensor)"
)
def row_losses(
    sums: Tensor,
    top: Tensor,
    largest: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    of_classes: Tensor | None,
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the sums of all ranks: the losses of rows, their weights, and what their gradients are made of. `largest` is
    that here, if exponentials were taken relative to it and not to `top`."""
    counted, total, picked = target != ignore, sums[TOTAL - 1], sums[PICKED - 1] - top
    log_total, share = total.log(), smoothing / num_classes
    rows = log_total - picked if weights is None else (log_total - picked) * weights
    if smoothing:
        spread = log_total * (num_classes if of_classes is None else of_classes) - sums[-1]
        rows = (1 - smoothing) * rows + share * spread
    if z_loss:
        rows = rows + z_loss * (log_total + top).square()
    rows, counts = torch.where(counted, rows, 0), counted.to(rows.dtype) if weights is None else weights
    if not for_gradient:
        return rows, counts, rows.new_empty(0)
    norm = total.reciprocal() if largest is None else (largest - top).exp_().div_(total)
    chance = picked.exp_().div_(total)
    if weights is None and not smoothing and not z_loss:
        return rows, counts, torch.stack([norm, chance.sub_(1)])
    log_sum = log_total.add_(top)
    mass = (1 - smoothing) * counts + (smoothing if of_classes is None else share * of_classes) + 2 * z_loss * log_sum
    at_target = chance.mul_(mass).sub_((1 - smoothing + share) * counts)
    return rows, counts, torch.stack([norm, at_target, mass, log_sum])
