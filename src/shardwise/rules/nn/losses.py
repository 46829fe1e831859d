"""Losses that are summed where they lie: element by element, or row by row. Those over classes are in `entropy`."""

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
from shardwise.rules.kit.agreement import agreed
from shardwise.rules.kit.indices import Bound, axes_of
from shardwise.rules.kit.notation import Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import SUM, AxisPlacement, Call, Collectives, Local, Lowering, Rule, Strategy, replicated
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import wide

NONE, MEAN, TOTAL = 0, 1, 2  # torch's reduction enum


# Element-wise losses with a reduction


def _pointwise_loss(call: Call) -> Factors:
    shape = torch.broadcast_shapes(*(value.shape for value in call.inputs))
    names = dims_of(len(shape))
    ins = [[names[d] if isinstance(d, int) else None for d in broadcast(value.shape, shape)] for value in call.inputs]
    return Factors(ins, [names if call["reduction"] == NONE else ()])


def _pointwise_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """A mean over shards is the sum over each shard, divided by the global number of elements."""
    if call["reduction"] != MEAN or not any(any(layout.splits) for layout in ins):
        return None
    args, kwargs = call.replace(reduction=NONE)
    count = torch.broadcast_shapes(*(value.shape for value in call.inputs)).numel()
    return Local(_scaled, [call.op, count, *args], kwargs)


def _scaled(loss: Any, count: int, *args: Any, **kwargs: Any) -> Tensor:
    terms = loss(*args, **kwargs)
    return (wide(terms).sum() / count).to(terms.dtype)


register(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy_with_logits"),
    rule=factor_rule(_pointwise_loss, _pointwise_loss_local),
)


# Binary cross entropy: the same, but torch refuses what is no probability


def _probability_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not any(any(layout.splits) for layout in ins):
        return None
    args: list[Any] = [call[argument.name] for argument in call.op._schema.arguments]
    step = call.op
    if call["reduction"] == MEAN:
        args[-1] = NONE
        step = partial(_scaled, call.op, torch.broadcast_shapes(*(value.shape for value in call.inputs)).numel())
    return Local(_of_probabilities, [step, *args], groups=(_axes(ins),))


def _of_probabilities(group: Collectives, step: Any, x: Tensor, *args: Any) -> Tensor:
    if agreed(group, _is_no_probability, x):
        raise RuntimeError("all elements of input should be between 0 and 1")
    return group.map(step, x, *args)


def _is_no_probability(x: Tensor) -> Tensor:
    return ~((x >= 0) & (x <= 1))


register("binary_cross_entropy", rule=factor_rule(_pointwise_loss, _probability_loss_local))


# Gaussian likelihood: element-wise, but the variances are looked at first


def _gaussian_shapes(call: Call) -> tuple[tuple[int, ...], ...]:
    """The shapes as they broadcast: a variance for each row has one dim less."""
    x, target, var = call["input"].shape, call["target"].shape, call["var"].shape
    return x, target, var if var == x or var != x[:-1] else (*var, 1)


def _gaussian(call: Call) -> Factors:
    shapes = _gaussian_shapes(call)
    names = dims_of(len(torch.broadcast_shapes(*shapes)))
    full = torch.broadcast_shapes(*shapes)
    ins = [[names[d] if isinstance(d, int) else None for d in broadcast(shape, full)] for shape in shapes]
    ins[2] = ins[2][: call["var"].ndim]
    return Factors(ins, [names if call["reduction"] == "none" else ()])


def _gaussian_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    shapes = _gaussian_shapes(call)
    count = torch.broadcast_shapes(*shapes).numel() if call["reduction"] == "mean" else 1
    options = [len(shapes[2]) > call["var"].ndim, call["full"], call["eps"], call["reduction"], count]
    return Local(_sharded_gaussian, [call["input"], call["target"], call["var"], *options], groups=(_axes(ins),))


def _sharded_gaussian(
    group: Collectives,
    x: Tensor,
    target: Tensor,
    var: Tensor,
    by_row: bool,
    full: bool,
    eps: float,
    reduction: str,
    count: int,
) -> Tensor:
    negative = group.reduce((var < 0).any().long(), "max")
    if not var.is_meta and int(negative):
        raise ValueError("var has negative entry/entries")
    terms = group.map(_gaussian_terms, x, target, var.unsqueeze(-1) if by_row else var, full, eps)
    return terms if reduction == "none" else (wide(terms).sum() / count).to(terms.dtype)


def _gaussian_terms(x: Tensor, target: Tensor, var: Tensor, full: bool, eps: float) -> Tensor:
    var = var.clone()
    with torch.no_grad():  # as in torch, the floor does not stop the gradient
        var.clamp_(min=eps)
    terms = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    return terms + 0.5 * math.log(2 * math.pi) if full else terms


def _gaussian_on_meta(
    x: Tensor, target: Tensor, var: Tensor, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """The shape of the result, and torch's complaints."""
    by_row = var.shape != x.shape and var.shape == x.shape[:-1]
    if var.shape != x.shape and not by_row:
        if x.ndim != var.ndim or sum(b for a, b in zip(x.shape, var.shape, strict=True) if a != b) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    terms = _gaussian_terms(x, target, var.unsqueeze(-1) if by_row else var, full, eps)
    return terms if reduction == "none" else terms.sum()


def _with_variances(
    input: Tensor, target: Tensor, var: Any, *args: Any, **options: Any
) -> tuple[tuple, dict[str, Any]]:
    """One number for all variances, as a tensor of them."""
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    return (input, target, var, *args), options


register_function(
    F.gaussian_nll_loss,
    "Tensor input, Tensor target, Tensor var, bool full=False, float eps=1e-6, str reduction='mean'",
    rule=factor_rule(_gaussian, _gaussian_local),
    before=_with_variances,
    meta=_gaussian_on_meta,
)


# Margins between the classes of one row: rows are free


def reduction_of(call: Call) -> str:
    """The reduction that a call asks for, in whatever way: ops have a number for it, Python functions a name."""
    if isinstance(call["reduction"], int):
        return ("none", "mean", "sum")[call["reduction"]]
    if call["size_average"] is not None or call["reduce"] is not None:
        return _reduction.legacy_get_string(call["size_average"], call["reduce"], emit_warning=False)
    return call["reduction"]


def _row_loss(call: Call) -> list[Strategy]:
    if call.inputs[0].ndim < 2:
        return [replicated(call)]
    loss: AxisPlacement = 0 if reduction_of(call) == "none" else SUM
    outs = (loss, *[0] * (len(call.outputs) - 1))
    return [replicated(call), Strategy((0, 0, *[None] * (len(call.inputs) - 2)), outs)]


def _row_loss_of(function: Any) -> Lowering:
    """How the shards run as an op, or as a Python function of the same arguments."""

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
        if not any(any(layout.splits) for layout in ins):
            return Local(function or call.op, call.args, call.kwargs)
        named = {argument.name: call[argument.name] for argument in call.op._schema.arguments}
        step = function or call.op
        reduction = reduction_of(call)
        if reduction != "none":  # of no rows, torch leaves the sum to chance
            named.update({name: None for name in ("size_average", "reduce") if name in named})
            named["reduction"] = "none" if function else NONE
            step = partial(_scaled_rows, step, call.inputs[0].shape[0] if reduction == "mean" else 1)
        return Local(_checked_rows, [_range_of_targets(call), step, *named.values()], groups=(_axes(ins),))

    return local


def _axes(ins: Sequence[Layout]) -> tuple[int, ...]:
    return tuple(sorted(axes_of(ins)))


def _range_of_targets(call: Call) -> Bound:
    num_classes = call.inputs[0].shape[-1]
    if "multilabel" in call.name:  # the labels of a row end at -1
        return Bound(range(-1, num_classes), True, noun="target")
    return Bound(range(num_classes), True, own=True, noun="target")


def _checked_rows(group: Collectives, bound: Bound, step: Any, x: Tensor, target: Tensor, *args: Any) -> Any:
    bound.check(group, target)
    return group.map(step, x, target, *args)


def _scaled_rows(step: Any, count: int, *args: Any) -> Any:
    out = step(*args)
    terms, *rest = [out] if isinstance(out, Tensor) else out
    loss = (wide(terms).sum() / count).to(terms.dtype)
    return (loss, *rest) if rest else loss


def _row_loss_on_meta(function: Any) -> Any:
    def meta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = function(x, *args, **kwargs)
        return found if x.ndim > 1 else found.reshape(())  # torch's meta kernels give a single row's loss a dim

    return meta


# The same by the ops' own names, where a reduction is a number


register("multi_margin_loss", "multilabel_margin_loss_forward", rule=Rule(_row_loss, _row_loss_of(None)))


_REDUCTION = "bool? size_average=None, bool? reduce=None, str reduction='mean'"
_BY_ROW: dict[Any, str] = {
    F.multi_margin_loss: f"Tensor input, Tensor target, int p=1, float margin=1.0, Tensor? weight=None, {_REDUCTION}",
    F.multilabel_margin_loss: f"Tensor input, Tensor target, {_REDUCTION}",
}
for _function, _schema in _BY_ROW.items():
    register_function(
        _function, _schema, rule=Rule(_row_loss, _row_loss_of(_function)), meta=_row_loss_on_meta(_function)
    )
