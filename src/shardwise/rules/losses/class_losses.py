"""Losses over classes, which targets name or give probabilities of. With the classes sharded, cross entropy needs two
small reductions forward and none backward, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.layout import Layout
from shardwise.rules.kit.empty import remembered
from shardwise.rules.kit.indices import Bound, is_within, looking, owned
from shardwise.rules.kit.kernels import is_traced, kernel_for
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.treatments import traced_form, treat
from shardwise.rules.kit.types import SUM, AxisPlacement, Call, Collectives, Local, Rule, Strategy, replicated
from shardwise.rules.losses.class_rows import (
    Loss,
    class_parallel_loss,
    comparable,
    reduced_evenly,
    rounded,
    weights_of,
)
from shardwise.rules.losses.losses import MEAN, NONE, TOTAL, reduction_of
from shardwise.rules.math.reductions import PROGRAM_COST, wide
from shardwise.rules.rows.row_numbers import are_classes, asserts_itself, mean_loss
from shardwise.rules.rows.row_passes import places_of


def _loss_of(call: Call, ins: Sequence[Layout]) -> Loss:
    x, dim = call.inputs[0], _class_dim(call)
    return Loss(
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
        _batch_axes(ins[0], dim),
        call.bound.get("z_loss", 0.0),
        call.bound.get("inplace_backward", False),
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


def check_targets(batch: Collectives, target: Tensor, loss: Loss, *, own: bool = False) -> None:
    """Refuse targets that are no class, on all ranks alike: those that split the batch agree first."""
    bound = Bound(range(loss.num_classes), batch.size > 1, own, "target")
    if asserts_itself(target):
        if not own:
            torch._assert_async(are_classes(target, loss.ignore, loss.num_classes))
    elif bound.is_needed(target):
        with looking():
            if bound.is_seen_to_hold(batch, target):
                return
            named = target if target.is_meta else batch.map(_not_ignored, target, loss)
        bound.check(batch, named)


def _not_ignored(target: Tensor, loss: Loss) -> Tensor:
    """Targets, but a class for those that are ignored: in every run of a captured program there are as many."""
    return target.masked_fill(target == loss.ignore, 0) if loss.num_classes else target[target != loss.ignore]


def _look_up(x: Tensor, dim: int, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The entries of `x` at the targets along a dim that starts at `start` here, zero where a target is held by another
    rank; and which targets are held here."""
    mine, index = owned(target, start, x.shape[dim])
    if not x.shape[dim]:
        return remembered(x).sum(dim), mine
    places = places_of(x, index.clamp(0, x.shape[dim] - 1), dim).view(-1)
    picked = x.reshape(-1).index_select(0, places).view(index.shape)  # `gather` would keep `x` for its backward pass
    return torch.where(mine, picked, 0), mine


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
    loss, batch = _loss_of(call, ins), _batch_axes(ins[0], _class_dim(call))
    args = [call.op, call["self"], call["target"], call["weight"], loss]
    return Local(_sharded_nll, args, groups=(tuple(axis for cut in ins[0].splits for axis in cut), batch))


def _contiguous_nll(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel takes contiguous tensors only; torch sees to that before it calls it."""
    return op(x.contiguous(), *args, **kwargs)


def _sharded_nll(
    group: Collectives, batch: Collectives, op: Any, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Each rank looks up the targets among its classes. A mean is the global sum over the global weight, both in one
    reduction."""
    check_targets(batch, target, loss, own=not loss.split_classes)
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


def _local_nll(x: Tensor, target: Tensor, weight: Tensor | None, start: int, loss: Loss) -> tuple[Tensor, Tensor]:
    """The loss terms, and their weights, of the targets whose class is held here; zero elsewhere."""
    picked, mine = _look_up(x, loss.dim, target, start)
    mine = mine & (target != loss.ignore)
    if weight is None:
        return -torch.where(mine, picked, 0), mine.to(x.dtype)
    own_weights = weights_of(weight, target, start if loss.split_weight else 0, loss)
    weights = torch.where(mine, own_weights, 0).to(x.dtype)
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
    loss, given = _loss_of(call, ins), [call["input"], call["target"], call["weight"]]
    if not any(ins[0].splits) and not loss.is_only_ours:
        return Local(F.cross_entropy, given, {**_options(loss), "reduction": loss.reduction})
    groups = _batch_axes(ins[0], loss.dim), ins[0].splits[loss.dim]
    return Local(_sharded_cross_entropy, [*given, loss], groups=groups, always=loss.is_only_ours)


def _sharded_cross_entropy(
    batch: Collectives, shards: Collectives, x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss
) -> Tensor:
    """Rows of losses, replicated on the ranks that share the classes; then their sum, or mean, over the batch."""
    if weight is not None and weight.requires_grad and not loss.probabilities:
        raise RuntimeError(
            "The function 'nll_loss_forward' is not differentiable with respect to argument 'weight'. This input "
            "cannot have requires_grad True."
        )
    target = comparable(batch, target)
    asked, wrong = target, None
    if _tells_with_the_sum(batch, target, loss):
        target, wrong = batch.map(_known_targets, target, loss)
    elif not loss.probabilities:
        check_targets(batch, target, loss, own=not loss.split_classes or asserts_itself(target))
    if loss.split_classes or loss.is_only_ours:
        run = kernel_for(class_parallel_loss, x.device.type)
        return run(shards, x, target, weight, loss)
    if loss.reduction == "sum":
        return batch.map(_local_loss, x, target, weight, loss)
    if loss.reduction == "none" or loss.probabilities:
        return reduced_evenly(batch.map(_local_rows, x, target, weight, loss), loss)
    value, total = batch.map(_local_sums, x, target, weight, loss)
    if wrong is not None:
        value, total, wrong = batch.psum(torch.stack([value, total, wrong.to(value.dtype)]))
        if not wrong.is_meta and wrong.item():
            check_targets(batch, asked, loss, own=not loss.split_classes)
    elif batch.size > 1:
        value, total = batch.psum(torch.stack([value, total]))
    return rounded(mean_loss(value, total, loss.smoothing > 0), loss)


def _tells_with_the_sum(batch: Collectives, target: Tensor, loss: Loss) -> bool:
    """Whether ranks find out about targets that are no class by the reduction that adds up their losses: where their
    data is looked at, and there is such a reduction."""
    if loss.split_classes or loss.is_only_ours or loss.reduction != "mean" or loss.probabilities or batch.size == 1:
        return False
    return target.device.type in ("cpu", "meta") and not (batch.is_captured or is_traced())


def _known_targets(target: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Targets that are classes, or ignored; and how many had to be replaced for that."""
    if not target.is_meta and is_within(target, range(loss.num_classes)):
        return target, torch.zeros((), dtype=torch.int64, device=target.device)
    unknown = (target != loss.ignore) & ((target < 0) | (target >= loss.num_classes))
    return target.masked_fill(unknown, 0), unknown.sum()


def _local_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, reduction: str = "sum") -> Tensor:
    target = target if loss.probabilities else target.long()
    return kernel_for(F.cross_entropy, x.device.type)(x, target, weight, **_options(loss), reduction=reduction)


def _options(loss: Loss) -> dict[str, Any]:
    return {"ignore_index": loss.ignore, "label_smoothing": loss.smoothing}


def _local_rows(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The losses of rows whose classes are all here, by torch itself."""
    return wide(_local_loss(x, target, weight, loss, "none"))


def _local_sums(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> tuple[Tensor, Tensor]:
    """Their sum, which in half precision would be rounded before it is divided; and that of the targets' weights."""
    is_half = x.dtype.itemsize < 4
    value = _local_rows(x, target, weight, loss).sum() if is_half else _local_loss(x, target, weight, loss)
    weights = target != loss.ignore if weight is None else weights_of(weight, target, 0, loss)
    return value, weights.sum(dtype=value.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, with two options more.

    `z_loss` is a factor: so many times the square of `logsumexp` of its logits is added to the loss of each row that
    counts, before the reduction, which keeps logits from drifting away. `inplace_backward=True` allows the gradient to
    be written over the logits, where the loss is the last that they are used for: a read of them after the backward
    pass finds their gradient, and an op that saved them for its own gradient raises. Leaves, and logits whose graph is
    retained or differentiated again, are never written to.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> logits, target = torch.randn(4, 10), torch.arange(4)
    >>> x = sw.distribute_tensor(logits, mesh, [sw.Shard(1)]).requires_grad_()
    >>> loss = sw.parallel.cross_entropy(x, sw.distribute_tensor(target, mesh), z_loss=1e-4)
    >>> plain = torch.nn.functional.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(1).square().mean()
    >>> torch.testing.assert_close(loss.full_tensor(), plain)
    """
    if not z_loss >= 0:
        raise ValueError(f"z_loss is a factor of what is added to the loss, and is not negative; got {z_loss}")
    given = (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if has_torch_function(given[:3]):
        more: dict[str, Any] = {"z_loss": z_loss, "inplace_backward": inplace_backward}
        return handle_torch_function(cross_entropy, given[:3], *given, **more)
    loss = _with_long_targets(*given)
    return (
        loss + z_loss * _squares(input, target, weight, ignore_index, _reduction_name(size_average, reduce, reduction))
        if z_loss
        else loss
    )


def _with_long_targets(x: Tensor, target: Tensor, *given: Any, **ours: Any) -> Tensor:
    """Torch's loss, which takes no other integers for classes, without options of ours."""
    return F.cross_entropy(x, target if target.is_floating_point() else target.long(), *given)


def _reduction_name(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    return _reduction.legacy_get_string(size_average, reduce, emit_warning=False)


def _squares(x: Tensor, target: Tensor, weight: Tensor | None, ignore: int, reduction: str) -> Tensor:
    """The squares that `z_loss` adds to the losses of plain rows, reduced as these are."""
    squares = x.logsumexp(min(1, x.ndim - 1)).square()
    if target.shape == x.shape:
        return squares if reduction == "none" else squares.mean() if reduction == "mean" else squares.sum()
    counted = target != ignore
    squares = torch.where(counted, squares, 0)
    if reduction != "mean":
        return squares if reduction == "none" else squares.sum()
    weights = counted if weight is None else torch.where(counted, weight[torch.where(counted, target, 0).long()], 0)
    return squares.sum() / weights.sum()


register_function(
    cross_entropy,
    "Tensor input, Tensor target, Tensor? weight=None, bool? size_average=None, int ignore_index=-100, "
    "bool? reduce=None, str reduction='mean', float label_smoothing=0.0, *, float z_loss=0.0, "
    "bool inplace_backward=False",
    rule=Rule(_cross_entropy, _cross_entropy_local),
    meta=_with_long_targets,
)
treat(F.cross_entropy, traced_as=traced_form(cross_entropy))
