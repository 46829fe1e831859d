"""Softmax and its logarithm. Along a sharded dim two numbers for each row are reduced, and one in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import factor_rule, other_dims
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, Local, Rule, Strategy
from shardwise.rules.math.reductions import PROGRAM_COST, is_inexact, wide
from shardwise.rules.rows.row_numbers import row_terms
from shardwise.rules.rows.row_passes import MAXIMUM, TOTAL, row_products, row_softmax, row_softmax_gradient, row_sums


def _softmax(call: Call) -> list[Strategy]:
    (dim,) = call.dims()
    if not is_inexact(call.inputs[0].dtype):
        torch.softmax(torch.zeros(1, dtype=call.inputs[0].dtype), 0)  # torch refuses
    sharded = [Strategy((dim,), (dim,), 2 * PROGRAM_COST)] if call.inputs[0].ndim else []
    return [*other_dims(call, [dim]).strategies(), *sharded]


def _softmax_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return None
    to_float = bool(call.bound.get("half_to_float") or call.bound.get("dtype"))
    args = [call.inputs[0], dim, call.name == "_log_softmax", to_float]
    return Local(_sharded_softmax, args, groups=(ins[0].splits[dim],))


def _sharded_softmax(group: Collectives, x: Tensor, dim: int, log: bool, to_float: bool) -> Tensor:
    with torch.no_grad():
        sums = group.map(row_sums, x, None, 0, dim, None, False)
        top = sums[MAXIMUM].clone()
        group.reduce_in_place(top, "max")  # where there is a NaN the total is one, too
        row_terms(sums, top)
        total = sums[TOTAL]
        group.reduce_in_place(total, "sum")
        found = torch.empty_like(x, dtype=torch.float32 if to_float else None)
        group.map(row_softmax, x, found, top, total, dim, log)
    return known_softmax(group, x, found, dim, log=log)


def known_softmax(group: Collectives, x: Tensor, known: Tensor, dim: int, *, log: bool = False) -> Tensor:
    """The softmax of a tensor, or its logarithm, with its gradient of any order."""
    return group.with_gradient_by_itself(known, _Gradient(dim, log, x.dtype), x)


@dataclass(frozen=True, slots=True)
class _Gradient:
    """That of a softmax along `dim`, or of its logarithm. Only the result is kept; a number for each row is summed."""

    dim: int
    log: bool
    dtype: torch.dtype

    def __call__(self, group: Collectives, grad: Tensor, known: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._differentiable(group, wide(grad), wide(known)).to(self.dtype)
        total = group.reduce(group.map(row_products, grad, known, self.dim, self.log), "sum")
        out = torch.empty_like(grad, dtype=self.dtype)
        group.map(row_softmax_gradient, grad, known, out, total, self.dim, self.log)
        return out

    def _differentiable(self, group: Collectives, grad: Tensor, known: Tensor) -> Tensor:
        terms = grad if self.log else grad * known
        total = group.vary(group.psum(terms.sum(self.dim, keepdim=True)))
        return grad - known.exp() * total if self.log else (grad - total) * known


register("_softmax", "_log_softmax", rule=Rule(_softmax, _softmax_local))
register("_safe_softmax", rule=factor_rule(lambda call: other_dims(call, call.dims())))
