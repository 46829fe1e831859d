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
from shardwise.rules.nn.row_numbers import AT_TARGET, LOG_SUM, MASS, NORM, in_order, row_losses, row_terms
from shardwise.rules.nn.row_passes import (
    MAXIMUM,
    PICKED,
    TOTAL,
    keeps_logits,
    row_exponentials,
    row_gradient,
    row_sums,
)
from shardwise.rules.nn.softmax import known_softmax

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
def class_parallel_rows(
    shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The losses of rows whose classes are sharded, and the weights of their targets, on all ranks that share
    the classes. Two reductions, each of a few numbers per row: the maximum, then every sum that the loss is made of."""
    if loss.probabilities:
        return _rows_of_probabilities(shards, x, target, weight, loss)
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
        found = reduced(shards, sums, x, target, weight, start, loss)
        largest = None if of_logits else sums[MAXIMUM]
        rows, weights, saved["numbers"] = found.losses(target, loss, largest, for_gradient=has_gradient)
        if not has_gradient:
            return rows, weights
        if weight is not None:
            saved["weights"] = weights
        if of_logits:
            saved["less"] = found.top
    if of_logits:
        may_overwrite = loss.over_logits and shards.map(_can_be_overwritten, x)
    else:
        may_overwrite = not is_listened_to()
    gradient = RowGradient(loss, start, may_overwrite)
    return shards.with_gradient(rows, gradient, [x if of_logits else shards.place(x)], saved), weights


def is_listened_to() -> bool:
    """Whether somebody listens for saved tensors, who may keep them."""
    return _listener(True) is not None


# Forward


@dataclass(frozen=True, slots=True)
class Found:
    """Of rows, from all ranks: the largest logit, and the sums that losses are made of; if classes have weights, those
    of the targets, and that of all classes."""

    top: Tensor
    sums: Tensor
    weights: Tensor | None
    of_classes: Tensor | None

    def losses(
        self, target: Tensor, loss: Loss, largest: Tensor | None = None, *, for_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of rows, their weights, and what their gradients are made of."""
        of_classes = self.of_classes if loss.smoothing else None
        given = self.sums, self.top, largest, target, self.weights, of_classes
        return row_losses(*given, loss.ignore, loss.smoothing, loss.num_classes, loss.z_loss, for_gradient)


def reduced(
    shards: Collectives,
    sums: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    start: Any,
    loss: Loss,
    *,
    together: bool = False,
) -> Found:
    """What is known of rows from what each rank has found: by two reductions; or `together`, by one exchange."""
    of_classes = shards.map(_weight_of_classes, x, weight, start, loss) if loss.smoothing else None
    if together:
        top, sums = _combined(shards, sums, of_classes)
    else:
        top = in_order(shards.reduce(in_order(sums[MAXIMUM]), "max"))
        row_terms(sums, top, of_classes)
        more = shards.map(_weights_of_both, weight, target, start, sums, loss) if loss.split_weight else None
        sums = shards.reduce(sums[TOTAL:] if more is None else torch.cat([sums[TOTAL:], more]), "sum")
    if weight is None:
        return Found(top, sums, None, None)
    if loss.split_weight:
        of_both = 2 if loss.smoothing else 1
        return Found(top, sums[:-of_both], sums[-of_both], sums[-1])
    return Found(top, sums, weights_of(weight, target, 0, loss), wide(weight).sum())


def _weights_of_both(weight: Tensor, target: Tensor, start: int, sums: Tensor, loss: Loss) -> Tensor:
    """The weights of the targets that are here; and, with smoothing, of all classes that are."""
    weights = weights_of(weight, target, start, loss)
    return torch.stack([weights, wide(weight).sum().expand_as(weights)] if loss.smoothing else [weights])


def _weight_of_classes(x: Tensor, weight: Tensor | None, start: int, loss: Loss) -> Tensor:
    """How much the classes that are here weigh together."""
    if weight is None:
        return torch.full((), float(x.shape[loss.dim]), device=x.device)
    return own_part(weight, x, start, loss).sum()


def _combined(shards: Collectives, sums: Tensor, of_classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest logit of all ranks and the sums of their terms, from what every rank tells every other."""
    if of_classes is not None:
        sums = torch.cat([sums, of_classes.expand_as(sums[:1])])
    each = shards.stack(sums)
    top = each[:, MAXIMUM].amax(0)
    shift = each[:, MAXIMUM] - top
    found = [(each[:, TOTAL] * shift.exp()).sum(0), each[:, PICKED].sum(0)]
    if of_classes is not None:
        found.append((each[:, -2] + shift * each[:, -1]).sum(0))
    return top, torch.stack(found)


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
            return [self.differentiable(shards, shards.vary(grad), inputs[0], saved)]
        kept = saved.get("kept", inputs[0]).detach()
        out = shards.map(_room, kept, not graph_is_kept() and self.may_overwrite)
        self.write(shards, grad, kept, out, saved)
        return [out]

    def write(self, shards: Collectives, grad: Tensor, kept: Tensor, out: Tensor, saved: Saved) -> None:
        """Write the gradient to `out`, which may be what is kept."""
        loss, numbers, target = self.loss, saved["numbers"], saved["target"]
        mass = numbers[MASS] if len(numbers) > MASS else None
        given = saved.get("less"), numbers[NORM], mass, grad, loss.share, saved.get("class_weights")
        of_targets = target, numbers[AT_TARGET], loss.ignore, self.start, loss.dim
        shards.map(row_gradient, kept, out, *given, *of_targets)

    def differentiable(self, shards: Collectives, grad: Tensor, x: Tensor, saved: Saved) -> Tensor:
        """The same in ordinary functions of the gradient and of a softmax."""
        loss, target, numbers = self.loss, saved["target"], saved["numbers"]
        counted = target != loss.ignore
        exponentials = wide(saved["kept"]) if "kept" in saved else (wide(x.detach()) - along(saved["less"], loss)).exp()
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


def _rows_of_probabilities(
    shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss
) -> tuple[Tensor, Tensor]:
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
    return rows, log_total.detach()


def _probability_terms(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: Loss) -> Tensor:
    """Per row: the sum of exponentials, of the weighted probabilities, and of the logits under them."""
    target = wide(target)
    if loss.smoothing:
        target = target * (1 - loss.smoothing) + loss.share
    if weight is not None:
        target = target * own_part(weight, x, start, loss).reshape([-1] + [1] * (x.ndim - 1 - loss.dim))
    return torch.stack([x.exp().sum(loss.dim), target.sum(loss.dim), (target * x).sum(loss.dim)])
