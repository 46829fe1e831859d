"""Losses over classes, which targets name or give probabilities of. With the classes sharded, cross entropy needs two
small reductions forward and none backward, and nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.rules.kit.empty import remembered
from shardwise.rules.kit.indices import Bound, owned
from shardwise.rules.kit.kernels import kernel_for, step
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import SUM, AxisPlacement, Call, Collectives, Local, Rule, Strategy, replicated
from shardwise.rules.math.reductions import PROGRAM_COST, maximum, wide
from shardwise.rules.nn.losses import MEAN, NONE, TOTAL, reduction_of


@dataclass(frozen=True, slots=True)
class _Loss:
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

    @staticmethod
    def of(call: Call, ins: Sequence[Layout]) -> _Loss:
        x, dim = call.inputs[0], _class_dim(call)
        return _Loss(
            reduction_of(call),
            call["ignore_index"],
            max(call.bound.get("label_smoothing", 0.0), 0.0),
            dim,
            x.shape[dim],
            x.numel // max(x.shape[dim], 1),
            _has_probabilities(call),
            bool(ins[0].splits[dim]),
            len(ins) > 2 and any(ins[2].splits),
            call.outputs[0].dtype,
        )


def _class_dim(call: Call) -> int:
    return 1 if call.inputs[0].ndim > 1 else 0


def _has_probabilities(call: Call) -> bool:
    return call["target"].shape == call.inputs[0].shape


def _batch_axes(layout: Layout, classes: int) -> tuple[int, ...]:
    return tuple(axis for dim, axes in enumerate(layout.splits) if dim != classes for axis in axes)


def _weight_ways(call: Call) -> list[list[AxisPlacement]]:
    """Where classes are sharded, class weights may be sharded too, or replicated."""
    return [[0], [None]] if call["weight"] is not None else [[]]


def _check_targets(batch: Collectives, target: Tensor, loss: _Loss, *, own: bool = False) -> None:
    """Refuse targets that are no class, on all ranks alike: those that split the batch agree first."""
    bound = Bound(range(loss.num_classes), batch.size > 1, own, "target")
    if bound.is_needed(target):
        bound.check(batch, batch.map(_not_ignored, target, loss.ignore, batch.is_captured))


def _not_ignored(target: Tensor, ignore: int, captured: bool) -> Tensor:
    if target.device.type == "cpu" and not captured:
        return target[target != ignore]
    return torch.where(target == ignore, 0, target)  # elsewhere it is not known how many there are


def _look_up(x: Tensor, dim: int, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The entries of `x` at the targets along a dim that starts at `start` here, zero where a target is held by another
    rank; and which targets are held here."""
    mine, index = owned(target, start, x.shape[dim])
    if not x.shape[dim]:
        return remembered(x).sum(dim), mine
    places = _places(x.shape, dim, index.clamp(0, x.shape[dim] - 1))
    picked = x.reshape(-1).index_select(0, places).view(index.shape)  # `gather` would keep `x` for its backward pass
    return torch.where(mine, picked, 0), mine


def _places(shape: Sequence[int], dim: int, index: Tensor) -> Tensor:
    """Indices into the flattened tensor of the entries at an index along a dim."""
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    begin = torch.arange(outer, device=index.device).unsqueeze(1) * (shape[dim] * inner)
    return (index.reshape(outer, inner) * inner + begin + torch.arange(inner, device=index.device)).reshape(-1)


def _weights_of(weight: Tensor, target: Tensor, start: int, ignore: int) -> Tensor:
    """The weights of the targets, from those that start at `start`; zero for others, and for ignored targets."""
    if not len(weight):
        return weight.new_zeros(target.shape)
    mine, index = owned(target, start, len(weight))
    return torch.where(mine & (target != ignore), weight.detach()[index.clamp(0, len(weight) - 1)], 0)


# Negative log likelihood: a look-up. Sharded classes leave a pending sum.


def _nll(call: Call) -> list[Strategy]:
    x, classes = call.inputs[0], _class_dim(call)
    num_weights = len(call.inputs) - 2
    found = [replicated(call)]
    total: AxisPlacement = SUM if call["reduction"] == TOTAL else None
    cost = PROGRAM_COST if call["reduction"] == MEAN else 0.0
    for dim in range(x.ndim):
        if dim == classes:
            loss: AxisPlacement = None if call["reduction"] == MEAN else SUM
            found += [Strategy((dim, None, *w), (loss, total), cost) for w in _weight_ways(call)]
        else:
            target = dim if dim < classes else dim - 1
            loss = target if call["reduction"] == NONE else total
            found.append(Strategy((dim, target, *([None] * num_weights)), (loss, total), cost))
    return found


def _nll_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    if not any(ins[0].splits):
        return Local(_contiguous_nll, [call.op, *call.args], call.kwargs)
    loss, batch = _Loss.of(call, ins), _batch_axes(ins[0], _class_dim(call))
    args = [call.op, call["self"], call["target"], call["weight"], loss]
    return Local(_sharded_nll, args, groups=(tuple(axis for cut in ins[0].splits for axis in cut), batch))


def _contiguous_nll(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel takes contiguous tensors only; torch sees to that before it calls it."""
    return op(x.contiguous(), *args, **kwargs)


def _sharded_nll(
    group: Collectives, batch: Collectives, op: Any, x: Tensor, target: Tensor, weight: Tensor | None, loss: _Loss
) -> tuple[Tensor, Tensor]:
    """Each rank looks up the targets among its classes. A mean is the global sum over the global weight, both in one
    reduction."""
    _check_targets(batch, target, loss, own=not loss.split_classes)
    if not loss.split_classes and loss.reduction != "mean":
        return group.map(
            _contiguous_nll, op, x, target, weight, NONE if loss.reduction == "none" else TOTAL, loss.ignore
        )
    losses, weights = group.map(_local_nll, x, target, weight, group.offset(0, loss.dim), loss)
    if loss.reduction == "none":
        return losses, losses.detach().new_zeros(())
    sums = torch.stack([wide(losses).sum(), wide(weights).sum()])
    if loss.reduction == "mean":
        sums = group.psum(sums)
    value, total = sums[0], sums.detach()[1]
    return (value / total if loss.reduction == "mean" else value).to(x.dtype), total.to(x.dtype)


def _local_nll(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: _Loss) -> tuple[Tensor, Tensor]:
    """The loss terms, and their weights, of the targets whose class is held here; zero elsewhere."""
    picked, mine = _look_up(x, loss.dim, target, start)
    mine = mine & (target != loss.ignore)
    if weight is None:
        return -torch.where(mine, picked, 0), mine.to(x.dtype)
    own_weights = _weights_of(weight, target, start if loss.split_weight else 0, loss.ignore)
    weights = torch.where(mine, own_weights, 0)
    return -torch.where(mine, picked, 0) * weights, weights


register("nll_loss_forward", "nll_loss2d_forward", rule=Rule(_nll, _nll_local))


# Cross entropy


def _cross_entropy(call: Call) -> list[Strategy]:
    x, classes, probabilities = call["input"], _class_dim(call), _has_probabilities(call)
    reduction, weights = reduction_of(call), [None] * (len(call.inputs) - 2)
    found = [replicated(call)]
    for dim in range(x.ndim):
        row = dim if dim < classes else dim - 1
        if dim == classes:
            target = dim if probabilities else None
            found += [Strategy((dim, target, *w), (None,), 2 * PROGRAM_COST) for w in _weight_ways(call)]
        elif reduction == "mean" and not probabilities:  # divided by the weight of all targets
            found.append(Strategy((dim, row, *weights), (None,), PROGRAM_COST))
        else:
            out: AxisPlacement = row if reduction == "none" else SUM
            found.append(Strategy((dim, dim if probabilities else row, *weights), (out,)))
    return found


def _cross_entropy_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    if not any(ins[0].splits):
        return Local(F.cross_entropy, call.args, call.kwargs)
    args = [call["input"], call["target"], call["weight"], _Loss.of(call, ins)]
    classes = _class_dim(call)
    return Local(_sharded_cross_entropy, args, groups=(_batch_axes(ins[0], classes), ins[0].splits[classes]))


def _sharded_cross_entropy(
    batch: Collectives, shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: _Loss
) -> Tensor:
    """Rows of losses, replicated on the ranks that share the classes; then their sum, or mean, over the batch."""
    if weight is not None and weight.requires_grad and not loss.probabilities:
        raise RuntimeError(
            "The function 'nll_loss_forward' is not differentiable with respect to argument 'weight'. This input "
            "cannot have requires_grad True."
        )
    if not loss.probabilities:
        _check_targets(batch, target, loss, own=not loss.split_classes)
    if loss.split_classes:
        run = kernel_for(class_parallel_rows, x.device.type)
        rows, weights = run(shards, x, target, weight, loss)
    elif loss.reduction == "sum":
        return batch.map(_local_loss, x, target, weight, loss)
    else:
        rows, weights = batch.map(_local_rows, x, target, weight, loss)
    if loss.reduction == "none":
        return _rounded(rows, loss)
    if loss.reduction == "mean" and not loss.probabilities:
        value, total = batch.psum(torch.stack([rows.sum(), weights.sum()]))
        mean = value / total
        return _rounded(torch.where(total == 0, math.nan, mean) if loss.smoothing else mean, loss)  # so says torch
    return _rounded(rows.sum() / loss.num_rows if loss.reduction == "mean" else rows.sum(), loss)


def _rounded(value: Tensor, loss: _Loss) -> Tensor:
    """A loss in its dtype. Autocast leaves one of half precision in single precision, which a trace does not see."""
    return value if not value.is_meta and torch.is_autocast_enabled(value.device.type) else value.to(loss.dtype)


def _local_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: _Loss, reduction: str = "sum") -> Tensor:
    options: Any = {"ignore_index": loss.ignore, "reduction": reduction, "label_smoothing": loss.smoothing}
    return kernel_for(F.cross_entropy, x.device.type)(x, target, weight, **options)


def _local_rows(x: Tensor, target: Tensor, weight: Tensor | None, loss: _Loss) -> tuple[Tensor, Tensor]:
    """The losses of rows whose classes are all here, by torch itself, and the weights of their targets."""
    rows = _local_loss(x, target, weight, loss, "none")
    if loss.probabilities or loss.reduction == "none":
        return wide(rows), rows.detach()
    weights = (target != loss.ignore).to(x.dtype) if weight is None else _weights_of(weight, target, 0, loss.ignore)
    return wide(rows), wide(weights)


@step
def class_parallel_rows(
    shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: _Loss
) -> tuple[Tensor, Tensor]:
    """The losses of rows whose classes are sharded, and the weights of their targets, on all ranks that share
    the classes. Two reductions, each of a few numbers per row: the maximum, then every sum that the loss is made of."""
    x = wide(x)
    x = x - maximum(shards, x, (loss.dim,))
    if weight is not None and not loss.split_weight and loss.probabilities:
        weight = shards.vary(weight)
    terms = _probability_terms if loss.probabilities else _index_terms
    sums = shards.psum(shards.map(terms, x, target, weight, shards.offset(0, loss.dim), loss))
    log_z = sums[0].log()
    if loss.probabilities:
        return log_z * sums[1] - sums[2], log_z.detach()
    ignored = target == loss.ignore
    weights = torch.where(ignored, 0, 1).to(x.dtype) if weight is None else sums[-1].detach()
    rows = (log_z - sums[1]) * weights
    if loss.smoothing:
        smooth = log_z * (loss.num_classes if weight is None else sums[3]) - sums[2]
        rows = (1 - loss.smoothing) * rows + smooth * (loss.smoothing / loss.num_classes)
    return torch.where(ignored, 0, rows), weights


def _own_part(weight: Tensor, x: Tensor, start: int, loss: _Loss) -> Tensor:
    """The weights of the classes held here, in a shape that broadcasts over the rows."""
    own = weight if loss.split_weight else weight.narrow(0, start, x.shape[loss.dim])
    return wide(own).reshape([-1] + [1] * (x.ndim - 1 - loss.dim))


def _index_terms(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: _Loss) -> Tensor:
    """Per row: the sum of exponentials, the target's logit, and what else is needed: with smoothing the weighted sum of
    all logits and the sum of all weights; the target's weight. The exponentials overwrite `x`, of which autograd keeps
    nothing and which the caller does not use again."""
    picked, mine = _look_up(x, loss.dim, target, start)
    terms = [picked]
    if loss.smoothing and weight is None:
        terms.append(x.sum(loss.dim))
    if loss.smoothing and weight is not None:
        own = _own_part(weight.detach(), x, start, loss)
        terms += [(x * own).sum(loss.dim), own.sum().expand(picked.shape)]
    if weight is not None:
        own_weights = _weights_of(weight, target, start if loss.split_weight else 0, loss.ignore)
        terms.append(torch.where(mine, wide(own_weights), 0))
    exponentials = x.exp_() if x.shape[loss.dim] else x.exp()  # an empty `x` is saved by the look-up
    return torch.stack([exponentials.sum(loss.dim), *terms])


def _probability_terms(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: _Loss) -> Tensor:
    """Per row: the sum of exponentials, of the weighted probabilities, and of the logits under them."""
    target = wide(target)
    if loss.smoothing:
        target = target * (1 - loss.smoothing) + loss.smoothing / loss.num_classes
    if weight is not None:
        target = target * _own_part(weight, x, start, loss)
    return torch.stack([x.exp().sum(loss.dim), target.sum(loss.dim), (target * x).sum(loss.dim)])


register_function(
    F.cross_entropy,
    "Tensor input, Tensor target, Tensor? weight=None, bool? size_average=None, int ignore_index=-100, "
    "bool? reduce=None, str reduction='mean', float label_smoothing=0.0",
    rule=Rule(_cross_entropy, _cross_entropy_local),
)
