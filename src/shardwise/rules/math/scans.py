"""Scans. Over a sharded dim every rank scans its part behind the totals of the parts before it: these are all it needs
to know of them, and the scan is torch's own, so that its special values and gradients are too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.dim_rebuild import joined
from shardwise.rules.kit.notation import Factor, Factors, dims_of
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Collectives, Local, Rule, Strategy
from shardwise.rules.math.reductions import PROGRAM_COST, converted, is_inexact, is_linear, wide

TOTALS: dict[str, Callable[..., Tensor]] = {"cumsum": torch.sum, "cumprod": torch.prod, "logcumsumexp": torch.logsumexp}
"""What a scan makes of a whole part."""

SCANS: dict[str, Callable[..., Any]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
}


def _scan(call: Call) -> list[Strategy]:
    value, (dim,) = call.inputs[0], call.dims()
    if call.name.startswith("logcumsumexp") and not is_inexact(value.dtype):
        torch.logcumsumexp(torch.zeros(1, dtype=value.dtype), 0)  # torch refuses
    free: list[Factor] = [None if d == dim else name for d, name in enumerate(dims_of(value.ndim))]
    found = Factors([free], [free] * len(call.outputs)).strategies()
    logs = call.name.startswith("logcumsumexp") and value.dtype.is_complex  # their branches depend on all before them
    if value.ndim and not logs:
        found.append(Strategy((dim,), (dim,) * len(call.outputs), PROGRAM_COST))
    if call.name.rstrip("_") == "cumsum":
        found += [Strategy((Partial(op),), (Partial(op),)) for op in ("sum", "avg") if is_linear(call, op)]
    return found


def _scan_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    (dim,) = call.dims()
    if not call.inputs[0].ndim or not ins[0].splits[dim]:
        return converted(call, ins, outs)
    name, groups = call.name.rstrip("_"), (ins[0].splits[dim],)
    pieces = ins[0].pieces(dim)
    if len(call.outputs) == 2:
        return Local(_indexed_scan, [call.inputs[0], dim, name, pieces], groups=groups)
    args = [call.inputs[0], dim, name, call.outputs[0].dtype, pieces]
    return Local(_sharded_scan, args, groups=groups)


def _sharded_scan(
    group: Collectives, x: Tensor, dim: int, name: str, dtype: torch.dtype, pieces: tuple[int, ...]
) -> Tensor:
    x = wide(x.to(dtype))
    total = group.map(_total, x, dim, TOTALS[name])
    totals = group.gather(total, dim, _present(pieces))
    return group.map(_scan_behind, totals, x, dim, SCANS[name], group.index(), pieces).to(dtype)


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


# Running extrema, with the global index of each. Torch decides ties and NaNs as it goes along, in the order of the dim.


def _indexed_scan(group: Collectives, x: Tensor, dim: int, name: str, pieces: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scan = SCANS[name]
    value, index = group.map(_last, x, dim, scan, group.offset(0, dim))
    values = group.gather(value, dim, _present(pieces))
    indices = group.gather(index, dim, _present(pieces))
    return group.map(_indexed_scan_behind, values, indices, x, dim, scan, group.index(), group.offset(0, dim), pieces)


def _last(x: Tensor, dim: int, scan: Callable[..., Any], offset: int) -> tuple[Tensor, Tensor]:
    """A part's extremum and its index, as the scan itself ends with them."""
    values, indices = scan(x, dim)
    size = x.shape[dim]
    start = max(size - 1, 0)
    return values.narrow(dim, start, size - start), indices.narrow(dim, start, size - start) + offset


def _indexed_scan_behind(
    values: Tensor,
    indices: Tensor,
    x: Tensor,
    dim: int,
    scan: Callable[..., Any],
    index: int,
    offset: int,
    pieces: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    before, size = sum(_present(pieces[:index])), x.shape[dim]
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    own = torch.arange(offset, offset + size, device=x.device).reshape(shape).expand(x.shape)
    places = torch.cat([indices.narrow(dim, 0, before), own], dim)
    found, at = scan(joined([values.narrow(dim, 0, before), x], dim), dim)
    return found.narrow(dim, before, size).contiguous(), places.gather(dim, at.narrow(dim, before, size).contiguous())


register("cummax", "cummin", rule=Rule(_scan, _scan_local))
