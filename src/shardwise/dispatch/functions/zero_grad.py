"""Gradients zeroed in place: what `no_sync` keeps of them is forgotten, as it is when they are set to None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.functions.handlers import handles
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.redistribute import drop, unreduced

_disabled = torch._C.DisableTorchFunctionSubclass
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


@handles(Tensor.zero_, torch.zero_, torch._foreach_zero_)
def _zero(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if unreduced:
        zeroed = [id(x) for x in flat_tensors((args, kwargs))]
        with _disabled():
            for parameter in [parameter for found in unreduced.values() if (parameter := found()) is not None]:
                if id(_grad(parameter)) in zeroed:
                    drop(parameter)
    return NotImplemented
