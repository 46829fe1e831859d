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
        known = reduced(shards, sums, x, target, weight, start, loss)
        rows = known.losses(loss)
        weights = known.counted.to(rows.dtype) if known.weights is None else known.weights
        if not has_gradient:
            return rows, weights
        saved |= known.for_gradient(loss, None if of_logits else sums[MAXIMUM])
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
class Known:
    """Of rows, from all ranks: the largest logit; with that taken off, the sum of exponentials and the target's logit;
    which rows count; the target's weight, if classes have any. With smoothed labels, the weighted sum of logits, and of
    class weights."""

    top: Tensor
    total: Tensor
    picked: Tensor
    counted: Tensor
    weights: Tensor | None
    logits: Tensor | None
    class_weights: Tensor | float

    def losses(self, loss: Loss) -> Tensor:
        log_total = self.total.log()
        rows = log_total - self.picked
        if self.weights is not None:
            rows = rows * self.weights
        if self.logits is not None:
            rows = (1 - loss.smoothing) * rows + loss.share * (log_total * self.class_weights - self.logits)
        if loss.z_loss:
            rows = rows + loss.z_loss * (log_total + self.top).square()
        return torch.where(self.counted, rows, 0)

    def for_gradient(self, loss: Loss, largest: Tensor | None) -> dict[str, Tensor]:
        """What is saved: `norm` makes probabilities of exponentials, of logits less `largest` here, or `less`; `mass`
        is what all probabilities of a row are multiplied by in its gradient, if not one."""
        weights = self.weights
        saved: dict[str, Tensor] = {}
        if largest is None:
            saved |= {"less": self.top, "norm": self.total.reciprocal()}
        else:
            saved["norm"] = (largest - self.top).exp_().div_(self.total)
        chance = self.picked.exp().div_(self.total)
        if weights is not None:
            saved |= {"weights": weights, "mass": weights}
        if loss.smoothing or loss.z_loss:
            log_sum = self.total.log() + self.top
            smooth = loss.share * self.class_weights + 2 * loss.z_loss * log_sum
            saved["mass"] = smooth + (1 - loss.smoothing) * (1 if weights is None else weights)
        if loss.z_loss:
            saved["log_sum"] = log_sum
        chance = chance if "mass" not in saved else chance.mul_(saved["mass"])
        from_target = 1 - loss.smoothing + loss.share
        saved["at_target"] = chance.sub_(from_target if weights is None else from_target * weights)
        return saved


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
) -> Known:
    """What is known of rows from what each rank has found: by two reductions; or `together`, by one exchange."""
    of_classes = shards.map(_weight_of_classes, x, weight, start, loss) if loss.smoothing else None
    if together:
        top, found = _combined(shards, sums, of_classes)
    else:
        top = shards.reduce(sums[MAXIMUM], "max")
        found = shards.reduce(shards.map(_terms, sums, top, of_classes, weight, target, start, loss), "sum")
    total, picked, *more = found.unbind()
    counted, class_weights = target != loss.ignore, float(loss.num_classes)
    logits = more.pop(0) if loss.smoothing else None
    known = top, total, picked - top, counted
    if weight is None:
        return Known(*known, None, logits, class_weights)
    if loss.split_weight:
        return Known(*known, more[0], logits, more[-1])
    return Known(*known, weights_of(weight, target, 0, loss), logits, wide(weight).sum())


def _weight_of_classes(x: Tensor, weight: Tensor | None, start: int, loss: Loss) -> Tensor:
    """How much the classes that are here weigh together."""
    if weight is None:
        return torch.full((), float(x.shape[loss.dim]), device=x.device)
    return own_part(weight, x, start, loss).sum()


def _terms(
    sums: Tensor,
    top: Tensor,
    of_classes: Tensor | None,
    weight: Tensor | None,
    target: Tensor,
    start: int,
    loss: Loss,
) -> Tensor:
    """The terms that one rank has of each row's sums, the largest logit of all ranks taken off but of the target's."""
    shift = sums[MAXIMUM] - top
    if of_classes is not None:
        sums[-1].add_(shift * of_classes)
    sums[TOTAL].mul_(shift.exp_())
    if weight is None or not loss.split_weight:
        return sums[1:]
    more = [weights_of(weight, target, start, loss)]
    if of_classes is not None:
        more.append(of_classes.expand_as(shift))
    return torch.cat([sums[1:], torch.stack(more)])


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
        loss = self.loss
        grad = torch.where(saved["target"] != loss.ignore, grad, 0)  # it may be NaN, that of a mean over nothing
        scale = saved["norm"] * grad
        if "mass" in saved:
            scale.mul_(saved["mass"])
        smooth = grad * loss.share if loss.smoothing else None
        rows = saved.get("less"), scale, smooth, saved.get("class_weights")
        at_target = saved["target"], saved["at_target"] * grad
        shards.map(row_gradient, kept, out, *rows, *at_target, self.start, loss.dim)

    def differentiable(self, shards: Collectives, grad: Tensor, x: Tensor, saved: Saved) -> Tensor:
        """The same in ordinary functions of the gradient and of a softmax."""
        loss, target, counted = self.loss, saved["target"], saved["target"] != self.loss.ignore
        exponentials = wide(saved["kept"]) if "kept" in saved else (wide(x.detach()) - along(saved["less"], loss)).exp()
        probabilities = known_softmax(shards, x, exponentials * along(saved["norm"], loss), loss.dim)
        weights = saved.get("weights", counted.to(probabilities.dtype))
        mass = saved.get("mass", weights)
        if loss.z_loss:
            log_sum = shards.with_gradient(saved["log_sum"], _OfLogSum(loss), [x], {"known": probabilities.detach()})
            more = shards.vary(log_sum) - saved["log_sum"]  # nothing, but for its gradient
            mass = mass + torch.where(counted, 2 * loss.z_loss * more, 0)
        taken = shards.map(_taken, probabilities, target, weights, saved.get("class_weights"), self.start, loss)
        factors = along(mass, loss) * probabilities - taken
        grad = torch.where(counted, grad, 0)
        return (along(grad, loss) * factors).to(x.dtype)


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
