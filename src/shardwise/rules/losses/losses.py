"""Losses that are summed where their terms are: element by element, or row by row. Those over classes are in
`class_losses`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.layout.sizes import broadcast_shape
from shardwise.rules.kit.agreement import refuse
from shardwise.rules.kit.indices import Bound, axes_of, checked_call
from shardwise.rules.kit.notation import Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.treatments import traced_form, treat
from shardwise.rules.kit.types import SUM, AxisPlacement, Call, Collectives, Local, Rule, Strategy, replicated
from shardwise.rules.math.pointwise import broadcast, pointwise_factors
from shardwise.rules.math.reductions import wide

NONE, MEAN, TOTAL = 0, 1, 2  # torch's reduction enum


def reduction_of(call: Call) -> str:
    """The reduction that a call asks for, in whatever way: ops have a number for it, Python functions a name."""
    if isinstance(call["reduction"], int):
        return ("none", "mean", "sum")[call["reduction"]]
    if call["size_average"] is not None or call["reduce"] is not None:
        return _reduction.legacy_get_string(call["size_average"], call["reduce"], emit_warning=False)
    return call["reduction"]


def _summed(loss: Any, count: int, *args: Any, **kwargs: Any) -> Any:
    """A shard's term of a sum, or of a mean over `count`: a loss without reduction is summed here, over `count`."""
    out = loss(*args, **kwargs)
    terms, *rest = [out] if isinstance(out, Tensor) else out
    total = (wide(terms).sum() / count).to(terms.dtype)
    return (total, *rest) if rest else total


# Element-wise losses with a reduction


def _pointwise_loss(call: Call) -> Factors:
    shape = broadcast_shape(*(value.shape for value in call.inputs))
    names = dims_of(len(shape))
    ins = [[names[d] if isinstance(d, int) else None for d in broadcast(value.shape, shape)] for value in call.inputs]
    return Factors(ins, [names if call["reduction"] == NONE else ()])


def _pointwise_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if call["reduction"] != MEAN or not any(any(layout.splits) for layout in ins):
        return None
    args, kwargs = call.replace(reduction=NONE)
    count = broadcast_shape(*(value.shape for value in call.inputs)).numel()
    return Local(_summed, [call.op, count, *args], kwargs)


register(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy_with_logits"),
    rule=factor_rule(_pointwise_loss, _pointwise_loss_local),
)


# Binary cross entropy: the same, but torch refuses what is no probability


def _probability_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(any(layout.splits) for layout in ins):
        return None
    local = _pointwise_loss_local(call, ins, outs) or Local(call.op, call.args, call.kwargs)
    step = partial(local.function, *local.args[: -len(call.args)], **local.kwargs)
    return Local(_of_probabilities, [step, *local.args[-len(call.args) :]], groups=(axes_of(ins),))


def _of_probabilities(group: Collectives, step: Any, x: Tensor, *args: Any) -> Tensor:
    refuse(group, _is_no_probability, x, "all elements of input should be between 0 and 1")
    return group.map(step, x, *args)


def _is_no_probability(x: Tensor) -> Tensor:
    return ~((x >= 0) & (x <= 1))


register("binary_cross_entropy", rule=factor_rule(_pointwise_loss, _probability_loss_local))


# Gaussian likelihood: torch's own reads whether a variance is negative, so an op of ours does


def nonnegative(var: Tensor) -> Tensor:
    return var


def _nonnegative_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    return Local(_check_variances, call.args, groups=(axes_of(ins),))


def _check_variances(group: Collectives, var: Tensor) -> Tensor:
    negative = group.reduce((var < 0).any().long(), "max")
    if not var.is_meta and int(negative):
        raise ValueError("var has negative entry/entries")
    return var


register_function(
    nonnegative, "Tensor var", rule=factor_rule(pointwise_factors, _nonnegative_local), meta=torch.empty_like
)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    by_row = var.shape != input.shape and var.shape == input.shape[:-1]
    if var.shape != input.shape and not by_row:
        if input.ndim != var.ndim or sum(b for a, b in zip(input.shape, var.shape, strict=True) if a != b) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = traced_form(nonnegative)(var)
    var = var.unsqueeze(-1) if by_row else var
    var = var + (var.clamp(min=eps) - var).detach()  # as in torch, the floor does not stop the gradient
    terms = 0.5 * (var.log() + (input - target) ** 2 / var)
    terms = terms + 0.5 * math.log(2 * math.pi) if full else terms
    return terms if reduction == "none" else getattr(terms, reduction)()


treat(F.gaussian_nll_loss, traced_as=_gaussian_nll_loss)


# Margins between the classes of one row: rows are free


def _row_loss(call: Call) -> list[Strategy]:
    if call.inputs[0].ndim < 2:
        return [replicated(call)]
    loss: AxisPlacement = 0 if call["reduction"] == NONE else SUM
    outs = (loss, *[0] * (len(call.outputs) - 1))
    return [replicated(call), Strategy((0, 0, *[None] * (len(call.inputs) - 2)), outs)]


def _row_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(any(layout.splits) for layout in ins):
        return None
    arguments, step = dict(call.bound), call.op
    if call["reduction"] != NONE:  # of no rows, torch leaves the sum to chance
        arguments["reduction"] = NONE
        step = partial(_summed, call.op, call.inputs[0].shape[0] if call["reduction"] == MEAN else 1)
    return checked_call(_range_of_targets(call), ins[1], Local(step, [*arguments.values()]), argument=1)


def _range_of_targets(call: Call) -> Bound:
    first = -1 if "multilabel" in call.name else 0  # the labels of a row end at -1
    return Bound(range(first, call.inputs[0].shape[-1]), True, own=True, noun="target")


register("multi_margin_loss", "multilabel_margin_loss_forward", rule=Rule(_row_loss, _row_loss_local))
