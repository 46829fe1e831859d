"""Functions of torch that copy what is not contiguous before they do anything else: `group_norm`.

It is the copy that the backward pass keeps, so the original may be written to. A thin shard is contiguous whatever the
global strides are; whether torch would copy is decided by these, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.dispatch.aliasing.global_strides import on_one_device, shards_contiguous
from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.tensor import DTensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@handles(torch.group_norm, F.group_norm)
def _of_contiguous(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    made = {id(x): _contiguous(x) for x in flat_tensors((args, kwargs))}
    if all(x is made[id(x)] for x in flat_tensors((args, kwargs))):
        return NotImplemented
    args, kwargs = map_tensors((args, kwargs), lambda x: made[id(x)])
    return func(*args, **kwargs)


def _contiguous(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor) or shards_contiguous(x):
        return x
    memory_format = _CHANNELS_LAST.get(x.ndim)
    if memory_format is not None and on_one_device(x).is_contiguous(memory_format=memory_format):
        return x
    return x.contiguous()
