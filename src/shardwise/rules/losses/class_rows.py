"""The losses of rows whose classes are sharded: one pass over the logits forward, one backward, and nothing gathered.

Of a row, with the largest logit of all ranks taken off, all that its loss and its gradient are made of are a few sums:
of exponentials, the logit of the target, and, with smoothed labels, of logits. Every rank has a term of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.kit.indices import owned
from shardwise.rules.kit.kernels import step
from shardwise.rules.kit.registry import repeats
from shardwise.rules.kit.types import Collectives, Saved
from shardwise.rules.math.reductions import maximum, wide
from shardwise.rules.nn.softmax import known_softmax
from shardwise.rules.rows.row_numbers import mean_loss, row_loss, row_losses, row_terms
from shardwise.rules.rows.row_passes import (
    LARGEST,
    LOG_SUM,
    MASS,
    MAXIMUM,
    NORM,
    TOTAL,
    WEIGHT,
    keeps_logits,
    row_exponentials,
    row_gradient,
    row_sums,
)

_listener = torch._C._autograd._top_saved_tensors_default_hooks
graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss over classes: its options, its global sizes, and what is sharded."""

    reduction: str
    ignore: int
    smoothing: float
    dim: int  # that of the classes
    num_classes: int
    num_rows: int
    probabilities: bool  # targets are probabilities of all classes, not the number of one
    split_classes: bool
    split_weight: bool
    dtype: torch.dtype
    batch: tuple[int, ...] = ()  # axes that split rows, not classes
    z_loss: float = 0.0
    over_logits: bool = False  # the gradient may be written over the logits

    @property
    def is_only_ours(self) -> bool:
        """Whether it has options that torch's has not."""
        return bool(self.z_loss) or self.over_logits

    @property
    def share(self) -> float:
        """What smoothing takes from the target and gives to each class."""
        return self.smoothing / self.num_classes


@step
def class_parallel_loss(shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The loss of rows whose classes are sharded, on all ranks that share the classes; that of each row, the sum of a
    rank's rows, or the mean of all. Two reductions, each of a few numbers per row: the maximum, then every sum that the
    loss is made of."""
    if loss.probabilities:
        return _of_probabilities(shards, x, target, weight, loss)
    has_gradient = torch.is_grad_enabled() and x.requires_grad
    of_logits = not has_gradient or loss.over_logits or keeps_logits(x.device.type)
    with torch.no_grad():
        start, saved = shards.offset(0, loss.dim), {"target": target}
        if weight is not None and loss.smoothing:
            saved["class_weights"] = shards.map(own_part, weight, x, start, loss)
        given = x, target, start, loss.dim, saved.get("class_weights"), bool(loss.smoothing)
        if of_logits:
            sums = shards.map(row_sums, *given)
        else:
            sums, saved["kept"] = shards.map(row_exponentials, *given)
        if of_logits or weight is not None or loss.smoothing or loss.z_loss:
            numbers = numbers_of_rows(shards, sums, target, weight, start, loss, of_logits=of_logits)
            rows, saved["numbers"], value, total = _reduced(shards, numbers, loss, has_gradient)
        else:
            value, total, saved["numbers"] = _of_plain_rows(shards, sums, target, loss)
        if not has_gradient:
            return value
        if total is not None:
            saved["total"] = total
        if weight is not None:
            saved["weights"] = rows[1]
    if of_logits:
        may_overwrite = loss.over_logits and shards.map(_can_be_overwritten, x)
    else:
        may_overwrite = not is_listened_to()
    gradient = RowGradient(loss, start, may_overwrite)
    return shards.with_gradient(value, gradient, [x if of_logits else shards.place(x)], saved)


def _reduced(
    shards: Collectives, numbers: Sequence[Any], loss: Loss, has_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The losses of rows and their weights, and what their gradients are made of; the loss; and for a mean the weight
    of all rows."""
    is_mean = loss.reduction == "mean"
    if loss.reduction != "none" and not (is_mean and loss.batch):
        rows, known, value, total = row_loss(*numbers, has_gradient, is_mean, _dtype(numbers[0], loss))
        return rows, known, value, total if is_mean else None
    rows, known = row_losses(*numbers, has_gradient)
    if not is_mean:
        return rows, known, rounded(rows[0], loss), None
    sums = rows.unsqueeze(-1).flatten(1).sum(1)
    shards.along(loss.batch).reduce_in_place(sums, "sum")
    value, total = sums.unbind()
    return rows, known, rounded(mean_loss(value, total, loss.smoothing > 0), loss), total


def rounded(value: Tensor, loss: Loss) -> Tensor:
    """A loss in its dtype."""
    return value.to(_dtype(value, loss))


def _dtype(value: Tensor, loss: Loss) -> torch.dtype:
    """Autocast leaves losses of half precision in single precision, which a trace does not see."""
    return value.dtype if not value.is_meta and torch.is_autocast_enabled(value.device.type) else loss.dtype


def is_listened_to() -> bool:
    """Whether somebody listens for saved tensors, who may keep them."""
    return _listener(True) is not None


# Forward


def numbers_of_rows(
    shards: Collectives,
    sums: Tensor,
    target: Tensor,
    weight: Tensor | None,
    start: Any,
    loss: Loss,
    *,
    of_logits: bool = True,
    together: bool = False,
) -> tuple[Any, ...]:
    """What `row_losses` is given, but for whether gradients are wanted, from the sums that each rank has found: by two
    reductions; or `together`, by one exchange. Without gradients `of_logits`, these are of exponentials relative to
    what is largest here."""
    top = weights = of_classes = None
    if together:
        each = shards.stack(sums)
    else:
        top = sums[MAXIMUM].clone()
        shards.reduce_in_place(top, "max")  # where there is a NaN the total is one, too
        row_terms(sums, top)
        each = sums.unsqueeze(0)
        if loss.split_weight:
            more = shards.map(_weights_of_both, weight, target, start, sums, loss)
            found = shards.reduce(torch.cat([sums[TOTAL:WEIGHT], more]), "sum")
            each = torch.cat([sums[:TOTAL], found]).unsqueeze(0)
            weights, of_classes = found[-len(more)], found[-1]
        else:
            shards.reduce_in_place(sums[TOTAL:WEIGHT], "sum")
    if weight is not None and not loss.split_weight:
        weights, of_classes = weights_of(weight, target, 0, loss), wide(weight).sum()
    largest = None if of_logits else sums[MAXIMUM]
    given = each, top, largest, target, weights, of_classes if loss.smoothing else None
    return *given, loss.ignore, loss.smoothing, loss.num_classes, loss.z_loss


def _of_plain_rows(
    shards: Collectives, sums: Tensor, target: Tensor, loss: Loss
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `_reduced` gives for a loss without options, from exponentials relative to what is largest here: by two
    thirds of the calls, which are what a small loss takes its time for."""
    largest, total, picked = sums.unbind()
    top = largest.clone()
    shards.reduce_in_place(top, "max")
    factor = largest.sub_(top).exp_()
    total.mul_(factor)
    shards.reduce_in_place(sums[TOTAL:], "sum")
    rows = total.log().sub_(picked.sub_(top))
    numbers = torch.stack([top, factor.div_(total), rows.neg().expm1_()])
    counted = target != loss.ignore
    rows = torch.where(counted, rows, 0.0)
    if loss.reduction == "none":
        return rounded(rows, loss), None, numbers
    value = rows.sum()
    if loss.reduction == "sum":
        return rounded(value, loss), None, numbers
    count = counted.sum(dtype=value.dtype)
    if loss.batch:
        value, count = shards.along(loss.batch).reduce(torch.stack([value, count]), "sum").unbind()
    return rounded(value / count, loss), count, numbers


def comparable(shards: Collectives, target: Tensor) -> Tensor:
    """Targets that can be compared with any class: less the first class of a shard, narrow integers would wrap."""
    is_narrow = target.dtype in (torch.uint8, torch.int8, torch.int16)
    return shards.map(Tensor.long, target) if is_narrow else target


def _weights_of_both(weight: Tensor, target: Tensor, start: int, sums: Tensor, loss: Loss) -> Tensor:
    """The weights of the targets that are here; and, with smoothing, of all classes that are."""
    weights = weights_of(weight, target, start, loss)
    return torch.stack([weights, wide(weight).sum().expand_as(weights)] if loss.smoothing else [weights])


def weights_of(weight: Tensor, target: Tensor, start: int, loss: Loss) -> Tensor:
    """The weights of the targets, from those that start at `start`; zero for others, and for ignored targets."""
    weight = wide(weight.detach())
    if not len(weight):
        return weight.new_zeros(target.shape)
    mine, index = owned(target, start, len(weight))
    return torch.where(mine & (target != loss.ignore), weight[index.clamp(0, len(weight) - 1)], 0)


def own_part(weight: Tensor, x: Tensor, start: int, loss: Loss) -> Tensor:
    """The weights of the classes held here."""
    return wide(weight if loss.split_weight else weight.narrow(0, start, x.shape[loss.dim]))


def _can_be_overwritten(x: Tensor) -> bool:
    """Whether logits are results, and not a leaf, or a view of one, and no element of theirs is another's too."""
    base = x._base if x._is_view() else x
    return base is not None and not base.is_leaf and not repeats(x)


# Backward


def _room(kept: Tensor, may_overwrite: bool) -> Tensor:
    return kept if may_overwrite else torch.empty_like(kept)


@dataclass(frozen=True, slots=True)
class RowGradient:
    """That of rows: probabilities times `mass`, less what is taken from the target and, by smoothing, from all classes.
    Nothing is communicated, unless it is differentiated again."""

    loss: Loss
    start: Any
    may_overwrite: Any

    def __call__(self, shards: Collectives, grad: Tensor, inputs: Sequence[Tensor], saved: Saved) -> Sequence[Tensor]:
        if torch.is_grad_enabled():
            return [self.differentiable(shards, self.of_each_row(shards, grad, saved), inputs[0], saved)]
        kept = saved.get("kept", inputs[0]).detach()
        out = shards.map(_room, kept, not graph_is_kept() and self.may_overwrite)
        self.write(shards, grad, kept, out, saved)
        return [out]

    def of_each_row(self, shards: Collectives, grad: Tensor, saved: Saved) -> Tensor:
        """The gradient of rows, to be differentiated again."""
        grad = shards.vary(grad)
        if "total" in saved:
            grad = shards.along(self.loss.batch).vary(grad) / saved["total"]
        return grad.expand_as(saved["target"])

    def write(self, shards: Collectives, grad: Tensor, kept: Tensor, out: Tensor, saved: Saved) -> None:
        """Write the gradient to `out`, which may be what is kept."""
        loss, of_logits = self.loss, "kept" not in saved
        of_rows = saved["numbers"], grad, saved.get("total")
        of_classes = loss.share, saved.get("class_weights"), saved["target"], loss.ignore, self.start, loss.dim
        shards.map(row_gradient, kept, out, of_logits, *of_rows, *of_classes)

    def differentiable(self, shards: Collectives, grad: Tensor, x: Tensor, saved: Saved) -> Tensor:
        """The same in ordinary functions of the gradient and of a softmax."""
        loss, target, numbers = self.loss, saved["target"], saved["numbers"]
        counted = target != loss.ignore
        exponentials = (
            wide(saved["kept"]) if "kept" in saved else (wide(x.detach()) - along(numbers[LARGEST], loss)).exp()
        )
        probabilities = known_softmax(shards, x, exponentials * along(numbers[NORM], loss), loss.dim)
        factors = probabilities
        if len(numbers) > MASS:
            mass = numbers[MASS]
            if loss.z_loss:
                known = {"known": probabilities.detach()}
                log_sum = shards.with_gradient(numbers[LOG_SUM], _OfLogSum(loss), [x], known)
                mass = mass + 2 * loss.z_loss * (shards.vary(log_sum) - numbers[LOG_SUM])  # nothing, but a gradient
            factors = along(mass, loss) * probabilities
        weights = saved.get("weights", counted.to(probabilities.dtype))
        taken = shards.map(_taken, probabilities, target, weights, saved.get("class_weights"), self.start, loss)
        return (along(torch.where(counted, grad, 0), loss) * (factors - taken)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _OfLogSum:
    """The gradient of the logarithm of a row's sum of exponentials."""

    loss: Loss

    def __call__(self, shards: Collectives, grad: Tensor, inputs: Sequence[Tensor], saved: Saved) -> Sequence[Tensor]:
        known = saved["known"]
        if torch.is_grad_enabled():
            known = known_softmax(shards, inputs[0], known, self.loss.dim)
        return [(along(shards.vary(grad), self.loss) * known).to(inputs[0].dtype)]


def along(rows: Tensor, loss: Loss) -> Tensor:
    """Numbers of rows in a shape that broadcasts over the classes."""
    return rows.unsqueeze(loss.dim)


def _taken(
    like: Tensor, target: Tensor, weights: Tensor, class_weights: Tensor | None, start: int, loss: Loss
) -> Tensor:
    """What is subtracted from the probabilities: at the target, and everywhere."""
    taken = torch.zeros_like(like)
    if not like.shape[loss.dim]:
        return taken
    if loss.smoothing:
        each = 1.0 if class_weights is None else class_weights.reshape([-1] + [1] * (like.ndim - 1 - loss.dim))
        taken += along((target != loss.ignore).to(like.dtype), loss) * loss.share * each
    mine, index = owned(target, start, like.shape[loss.dim])
    at_target = torch.where(mine, (1 - loss.smoothing) * weights, 0)
    return taken.scatter_add_(loss.dim, along(index.clamp(0, like.shape[loss.dim] - 1), loss), along(at_target, loss))


# Targets that are probabilities: by ordinary functions, since they, and class weights beside them, have gradients too


def _of_probabilities(shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    x = wide(x)
    top = maximum(shards, x, (loss.dim,))
    x = x - top
    if weight is not None and not loss.split_weight:
        weight = shards.vary(weight)
    terms = shards.map(_probability_terms, x, target, weight, shards.offset(0, loss.dim), loss)
    total, mass, weighted = shards.psum(terms).unbind()
    log_total = total.log()
    rows = log_total * mass - weighted
    if loss.z_loss:
        rows = rows + loss.z_loss * (log_total + top.squeeze(loss.dim)).square()
    return reduced_evenly(rows, loss)


def reduced_evenly(rows: Tensor, loss: Loss) -> Tensor:
    """Of rows that all weigh the same: each, or a rank's part of their sum or mean."""
    if loss.reduction == "none":
        return rounded(rows, loss)
    return rounded(rows.sum() / loss.num_rows if loss.reduction == "mean" else rows.sum(), loss)


def _probability_terms(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: Loss) -> Tensor:
    """Per row: the sum of exponentials, of the weighted probabilities, and of the logits under them."""
    target = wide(target)
    if loss.smoothing:
        target = target * (1 - loss.smoothing) + loss.share
    if weight is not None:
        target = target * own_part(weight, x, start, loss).reshape([-1] + [1] * (x.ndim - 1 - loss.dim))
    return torch.stack([x.exp().sum(loss.dim), target.sum(loss.dim), (target * x).sum(loss.dim)])
