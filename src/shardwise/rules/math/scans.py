"""Scans. Over a sharded dim every rank scans its part behind the totals of the parts before it: these are all it needs
to know of them, and the scan is torch's own, so that its special values and gradients are too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.dim_rebuild import joined
from shardwise.rules.kit.empty import skipping_empty
from shardwise.rules.kit.notation import factor_rule, other_dims
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, Local, Rule, Strategy, is_inexact
from shardwise.rules.math.reductions import PROGRAM_COST, converted, is_linear, wide

SCANS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cumsum": (torch.cumsum, torch.sum),
    "cumprod": (torch.cumprod, torch.prod),
    "logcumsumexp": (torch.logcumsumexp, torch.logsumexp),
}
"""Each scan, and the reduction that gives its last value."""


def _scan(call: Call) -> list[Strategy]:
    value, (dim,) = call.inputs[0], call.dims()
    if call.name.startswith("logcumsumexp") and not is_inexact(value.dtype):
        torch.logcumsumexp(torch.zeros(1, dtype=value.dtype), 0)  # torch refuses
    found = other_dims(call, [dim]).strategies()
    logs = call.name.startswith("logcumsumexp") and value.dtype.is_complex  # their branches depend on all before them
    if value.ndim and not logs:
        found.append(Strategy((dim,), (dim,), PROGRAM_COST))
    if call.name.rstrip("_") == "cumsum":
        found += [Strategy((Partial(op),), (Partial(op),)) for op in ("sum", "avg") if is_linear(call, op)]
    return found


def _scan_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return converted(call, ins, outs)
    args = [call.inputs[0], dim, call.name.rstrip("_"), call.outputs[0].dtype, ins[0].pieces(dim)]
    return Local(_sharded_scan, args, groups=(ins[0].splits[dim],))


def _sharded_scan(
    group: Collectives, x: Tensor, dim: int, name: str, dtype: torch.dtype, pieces: tuple[int, ...]
) -> Tensor:
    scan, total = SCANS[name]
    x = wide(x.to(dtype))
    totals = group.gather(group.map(_total, x, dim, total), dim, _present(pieces))
    return group.map(_scan_behind, totals, x, dim, scan, group.index(), pieces).to(dtype)


def _present(pieces: tuple[int, ...]) -> list[int]:
    """How many totals each part has: an empty one has none."""
    return [min(size, 1) for size in pieces]


def _total(x: Tensor, dim: int, total: Callable[..., Tensor]) -> Tensor:
    return total(x, dim, keepdim=True).narrow(dim, 0, min(x.shape[dim], 1))


def _scan_behind(
    totals: Tensor, x: Tensor, dim: int, scan: Callable[..., Tensor], index: int, pieces: tuple[int, ...]
) -> Tensor:
    """Contiguous on every rank, as torch's result is: what ranks take for a view follows from the strides of shards."""
    before = sum(_present(pieces[:index]))
    found = scan(joined([totals.narrow(dim, 0, before), x], dim), dim)
    return found.narrow(dim, before, x.shape[dim]).contiguous()


register("cumsum", "cumprod", "logcumsumexp", rule=Rule(_scan, _scan_local))


# Running extrema: the dim must not be sharded


# Of nothing, torch gives the argument itself as its gradient: who writes to that would write to what is saved.
register("cummax", "cummin", rule=skipping_empty(factor_rule(lambda call: other_dims(call, call.dims()))))
