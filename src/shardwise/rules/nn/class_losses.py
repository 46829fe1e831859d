"""Losses over classes, which targets name or give probabilities of. With the classes sharded, cross entropy needs two
small reductions forward and none backward, and nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.rules.kit.empty import has_empty, remembered
from shardwise.rules.kit.indices import Bound
from shardwise.rules.kit.kernels import kernel_for, step
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import SUM, AxisPlacement, Call, Collectives, Local, Rule, Strategy, replicated
from shardwise.rules.math.reductions import PROGRAM_COST, maximum, wide
from shardwise.rules.nn.losses import MEAN, NONE, TOTAL, reduction_of


def _class_dim(call: Call) -> int:
    return 1 if call.inputs[0].ndim > 1 else 0


def _batch_axes(layout: Layout, classes: int) -> tuple[int, ...]:
    return tuple(axis for dim, axes in enumerate(layout.splits) if dim != classes for axis in axes)


def _weight_ways(call: Call) -> list[list[AxisPlacement]]:
    """Where classes are sharded, class weights may be so too, or stay whole."""
    return [[0], [None]] if call["weight"] is not None else [[]]


def _check_targets(batch: Collectives, target: Tensor, ignore: int, num_classes: int, *, own: bool = False) -> None:
    """Refuse targets that name no class, on all ranks alike: those that split the batch confer first."""
    bound = Bound(range(num_classes), batch.size > 1, own, "target")
    if bound.is_needed(target):
        bound.check(batch, batch.map(_not_ignored, target, ignore))


def _not_ignored(target: Tensor, ignore: int) -> Tensor:
    if target.device.type == "cpu":
        return target[target != ignore]
    return torch.where(target == ignore, 0, target)  # elsewhere it is not known how many there are


def _look_up(x: Tensor, dim: int, target: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The entries of `x` that targets name along a dim which starts at `offset` here, and which targets these are. The
    others' entries are zero; where there are no classes at all they are still part of the graph."""
    index = target - offset
    mine = (index >= 0) & (index < x.shape[dim])
    if not x.shape[dim]:
        return remembered(x).sum(dim), mine
    places = _places(x.shape, dim, index.clamp(0, x.shape[dim] - 1))
    picked = x.reshape(-1).index_select(0, places).view(index.shape)  # `gather` would keep `x` for its backward pass
    return torch.where(mine, picked, 0), mine


def _places(shape: Sequence[int], dim: int, index: Tensor) -> Tensor:
    """Where in a flat tensor the entries lie that an index names along a dim."""
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    begin = torch.arange(outer, device=index.device).unsqueeze(1) * (shape[dim] * inner)
    return (index.reshape(outer, inner) * inner + begin + torch.arange(inner, device=index.device)).reshape(-1)


def _weights_of(weight: Tensor, target: Tensor, offset: int, ignore: int) -> Tensor:
    """The weights of the targets, from those that start at `offset`; zero for others, and for those to ignore."""
    index = target - offset
    mine = (index >= 0) & (index < len(weight)) & (target != ignore)
    if not len(weight):
        return weight.new_zeros(target.shape)
    return torch.where(mine, weight.detach()[index.clamp(0, len(weight) - 1)], 0)


def _check_weight(x: Tensor, weight: Tensor | None, loss: Callable[..., Tensor]) -> None:
    """Let torch refuse weights of another dtype, if it does."""
    if weight is not None and weight.dtype != x.dtype:
        loss(*(torch.zeros(1, 1, dtype=x.dtype), torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=weight.dtype)))


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


def _nll_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(ins[0].splits):
        return Local(_whole_nll, [call.op, *call.args], call.kwargs)
    classes = _class_dim(call)
    given = [call[name] for name in ("self", "target", "weight", "reduction", "ignore_index")]
    batch, num_classes = _batch_axes(ins[0], classes), call.inputs[0].shape[classes]
    if not ins[0].splits[classes] and call["reduction"] != MEAN and not has_empty(ins):
        return Local(_batch_nll, [num_classes, call.op, *given], groups=(batch,))
    axes = tuple(axis for cut in ins[0].splits for axis in cut)
    own_weight = len(ins) > 2 and any(ins[2].splits)
    return Local(_sharded_nll, [*given, classes, num_classes, own_weight], groups=(axes, batch))


def _whole_nll(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel takes contiguous tensors only; torch sees to that before it calls it."""
    return op(x.contiguous(), *args, **kwargs)


def _batch_nll(
    batch: Collectives, num_classes: int, op: Any, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int
) -> Any:
    """Whole rows of classes: the kernel itself, whose sums are terms of the global ones."""
    _check_targets(batch, target, ignore, num_classes, own=True)
    return batch.map(_whole_nll, op, x, target, weight, reduction, ignore)


def _sharded_nll(
    group: Collectives,
    batch: Collectives,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    classes: int,
    num_classes: int,
    own_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Each rank looks up the targets that fall into its classes. A mean is the global sum over the global weight, both
    in one reduction."""
    _check_weight(x, weight, F.nll_loss)
    _check_targets(batch, target, ignore, num_classes)
    at = group.offset(0, classes)
    losses, weights = group.map(_local_nll, x, target, weight, ignore, classes, at, at if own_weight else 0)
    if reduction == NONE:
        return losses, losses.detach().new_zeros(())
    sums = torch.stack([wide(losses).sum(), wide(weights).sum()])
    if reduction == MEAN:
        sums = group.psum(sums)
    loss, total = sums[0], sums.detach()[1]
    return (loss / total if reduction == MEAN else loss).to(x.dtype), total.to(x.dtype)


def _local_nll(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore: int, classes: int, offset: int, weight_offset: int
) -> tuple[Tensor, Tensor]:
    """The loss terms, and their weights, of the targets whose class is held here; zero elsewhere."""
    picked, mine = _look_up(x, classes, target, offset)
    mine = mine & (target != ignore)
    if weight is None:
        return -torch.where(mine, picked, 0), mine.to(x.dtype)
    weights = torch.where(mine, _weights_of(weight, target, weight_offset, ignore), 0)
    return -torch.where(mine, picked, 0) * weights, weights


register("nll_loss_forward", "nll_loss2d_forward", rule=Rule(_nll, _nll_local))


# Cross entropy


@dataclass(frozen=True, slots=True)
class _Entropy:
    """What a cross entropy is of: its options, its global sizes, which parts are split, and what runs on the device for
    rows of sharded and of whole classes."""

    reduction: str
    ignore: int
    smoothing: float
    classes: int
    num_classes: int
    num_rows: int
    probabilities: bool
    split_classes: bool
    own_weight: bool
    dtype: torch.dtype
    rows: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def _has_probabilities(call: Call) -> bool:
    return call["target"].shape == call["input"].shape


def _cross_entropy(call: Call) -> list[Strategy]:
    x, classes, probabilities = call["input"], _class_dim(call), _has_probabilities(call)
    reduction, weights = reduction_of(call), [None] * (len(call.inputs) - 2)
    found = [replicated(call)]
    for dim in range(x.ndim):
        row = dim if dim < classes else dim - 1
        if dim == classes:
            target = dim if probabilities else None
            found += [Strategy((dim, target, *w), (None,), 2 * PROGRAM_COST) for w in _weight_ways(call)]
        elif reduction == "mean" and not probabilities:  # divided by a weight that all targets must be seen for
            found.append(Strategy((dim, row, *weights), (None,), PROGRAM_COST))
        else:
            found.append(
                Strategy((dim, dim if probabilities else row, *weights), (row if reduction == "none" else SUM,))
            )
    return found


def _cross_entropy_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    if not any(ins[0].splits):
        return Local(F.cross_entropy, call.args, call.kwargs)
    x, classes = call["input"], _class_dim(call)
    num_classes = x.shape[classes]
    entropy = _Entropy(
        reduction_of(call),
        call["ignore_index"],
        call["label_smoothing"] if call["label_smoothing"] > 0 else 0.0,  # so does torch
        classes,
        num_classes,
        x.numel // max(num_classes, 1),
        _has_probabilities(call),
        bool(ins[0].splits[classes]),
        len(ins) > 2 and any(ins[2].splits),
        call.outputs[0].dtype,
        kernel_for(class_parallel_rows, ins[0].mesh.device_type),
        kernel_for(F.cross_entropy, ins[0].mesh.device_type),
    )
    groups = (_batch_axes(ins[0], classes), ins[0].splits[classes])
    return Local(_sharded_cross_entropy, [x, call["target"], call["weight"], entropy], groups=groups)


def _sharded_cross_entropy(
    batch: Collectives, shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, of: _Entropy
) -> Tensor:
    """Rows of losses, whole on the ranks that share the classes; then their sum, or mean, over the batch."""
    if weight is not None and weight.requires_grad and not of.probabilities:
        raise RuntimeError(
            "The function 'nll_loss_forward' is not differentiable with respect to argument 'weight'. This input "
            "cannot have requires_grad True."
        )
    _check_weight(x, weight, F.cross_entropy)
    if not of.probabilities:
        _check_targets(batch, target, of.ignore, of.num_classes, own=not of.split_classes)
    if of.split_classes:
        rows, weights = of.rows(shards, x, target, weight, of)
    elif of.reduction == "sum":
        return batch.map(_local_loss, x, target, weight, of)
    else:
        rows, weights = batch.map(_local_rows, x, target, weight, of)
    if of.reduction == "none":
        return _rounded(rows, of)
    if of.reduction == "mean" and not of.probabilities:
        loss, total = batch.psum(torch.stack([rows.sum(), weights.sum()]))
        mean = loss / total
        return _rounded(torch.where(total == 0, math.nan, mean) if of.smoothing else mean, of)  # as torch's sum of two
    return _rounded(rows.sum() / of.num_rows if of.reduction == "mean" else rows.sum(), of)


def _rounded(loss: Tensor, of: _Entropy) -> Tensor:
    """A loss in its dtype. Autocast leaves one of half precision in single precision, which a trace does not see."""
    return loss if not loss.is_meta and torch.is_autocast_enabled(loss.device.type) else loss.to(of.dtype)


def _local_loss(x: Tensor, target: Tensor, weight: Tensor | None, of: _Entropy, reduction: str = "sum") -> Tensor:
    return of.loss(x, target, weight, ignore_index=of.ignore, reduction=reduction, label_smoothing=of.smoothing)


def _local_rows(x: Tensor, target: Tensor, weight: Tensor | None, of: _Entropy) -> tuple[Tensor, Tensor]:
    """The losses of whole rows, by torch itself, and the weights of their targets."""
    rows = _local_loss(x, target, weight, of, "none")
    if of.probabilities or of.reduction == "none":
        return wide(rows), rows.detach()
    weights = (target != of.ignore).to(x.dtype) if weight is None else _weights_of(weight, target, 0, of.ignore)
    return wide(rows), wide(weights)


@step
def class_parallel_rows(
    shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, of: _Entropy
) -> tuple[Tensor, Tensor]:
    """The losses of rows whose classes are sharded, and the weights of their targets, whole on the ranks that share
    the classes. Two reductions, each of a few numbers per row: the maximum, then every sum that the loss is made of."""
    x = wide(x)
    x = x - maximum(shards, x, (of.classes,))
    if weight is not None and not of.own_weight and of.probabilities:
        weight = shards.vary(weight)
    terms = _probability_terms if of.probabilities else _index_terms
    offset = shards.offset(0, of.classes)
    sums = shards.psum(shards.map(terms, x, target, weight, offset, offset if of.own_weight else 0, of))
    log_z = sums[0].log()
    if of.probabilities:
        return log_z * sums[1] - sums[2], log_z.detach()
    ignored = target == of.ignore
    weights = torch.where(ignored, 0, 1).to(x.dtype) if weight is None else sums[-1].detach()
    rows = (log_z - sums[1]) * weights
    if of.smoothing:
        smooth = log_z * (of.num_classes if weight is None else sums[3]) - sums[2]
        rows = (1 - of.smoothing) * rows + smooth * (of.smoothing / of.num_classes)
    return torch.where(ignored, 0, rows), weights


def _own_part(weight: Tensor, x: Tensor, offset: int, weight_offset: int, of: _Entropy) -> Tensor:
    """The weights of the classes held here, in a shape that broadcasts over the rows."""
    size = x.shape[of.classes]
    return wide(weight.narrow(0, offset - weight_offset, size)).reshape([-1] + [1] * (x.ndim - 1 - of.classes))


def _index_terms(
    x: Tensor, target: Tensor, weight: Tensor | None, offset: int, weight_offset: int, of: _Entropy
) -> Tensor:
    """Per row: the sum of exponentials, the target's logit, and what else is needed: with smoothing the weighted sum of
    all logits and the sum of all weights; the target's weight. The exponentials take the memory of the logits, of which
    autograd keeps nothing: `x` is the caller's no more."""
    picked, mine = _look_up(x, of.classes, target, offset)
    terms = [picked]
    if of.smoothing and weight is None:
        terms.append(x.sum(of.classes))
    if of.smoothing and weight is not None:
        own = _own_part(weight.detach(), x, offset, weight_offset, of)
        terms += [(x * own).sum(of.classes), own.sum().expand(picked.shape)]
    if weight is not None:
        terms.append(torch.where(mine, wide(_weights_of(weight, target, weight_offset, of.ignore)), 0))
    exponentials = x.exp_() if x.shape[of.classes] else x.exp()  # of nothing, `x` itself is remembered
    return torch.stack([exponentials.sum(of.classes), *terms])


def _probability_terms(
    x: Tensor, target: Tensor, weight: Tensor | None, offset: int, weight_offset: int, of: _Entropy
) -> Tensor:
    """Per row: the sum of exponentials, of the weighted probabilities, and of the logits under them."""
    target = wide(target)
    if of.smoothing:
        target = target * (1 - of.smoothing) + of.smoothing / of.num_classes
    if weight is not None:
        target = target * _own_part(weight, x, offset, weight_offset, of)
    return torch.stack([x.exp().sum(of.classes), target.sum(of.classes), (target * x).sum(of.classes)])


register_function(
    F.cross_entropy,
    "Tensor input, Tensor target, Tensor? weight=None, bool? size_average=None, int ignore_index=-100, "
    "bool? reduce=None, str reduction='mean', float label_smoothing=0.0",
    rule=Rule(_cross_entropy, _cross_entropy_local),
)
