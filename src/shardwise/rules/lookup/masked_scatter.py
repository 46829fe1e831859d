"""masked_scatter: the places of a mask, filled with the elements of a source in order.

A rank that sees the whole mask knows which elements are its own, so only the mask and the source are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.indices import padded
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import PENDING, Call, HeldValues, Local, Rule, Strategy, replicated


def _ways(call: Call) -> list[Strategy]:
    found = [replicated(call), Strategy((PENDING, None, PENDING), (PENDING,))]
    if call.inputs[0].shape == call.outputs[0].shape:
        found += [Strategy((dim, None, None), (dim,)) for dim in range(call.inputs[0].ndim)]
    return found


def _local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    target = ins[0]
    if not any(target.splits):
        return None
    return Local(_fill, [*call.inputs, target.shape, HeldValues(target.held_starts)])


def _fill(x: Tensor, mask: Tensor, source: Tensor, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The shard `x` of a target of a global shape, which begins at `starts`."""
    mask = mask.expand(shape)
    places = mask.flatten().cumsum(0)
    _check(places[-1:].sum(), source.numel())
    places = places.reshape(shape) - 1
    for dim, start in enumerate(starts):
        mask, places = (y.narrow(dim, start, x.shape[dim]) for y in (mask, places))
    # Where the mask is false there may be no element.
    found = padded(source.flatten(), [0])[places.clamp(0, source.numel())]
    return torch.where(mask, found, x)


def _check(needed: Tensor, given: int) -> None:
    if needed.device.type == "cpu":
        if int(needed) > given:
            raise RuntimeError("Number of elements of source < number of ones in mask")
    elif not needed.is_meta:  # without waiting for it, as torch does there
        torch._assert_async(needed <= given)


register("masked_scatter", rule=Rule(_ways, _local))
