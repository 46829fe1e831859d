"""What this torch can do with plain tensors. Some of it is newer than the oldest torch that Shardwise runs on, so tests
ask torch itself: what it cannot do is skipped, or compared without its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compare import as_tensors
from torch import Tensor


def differentiates(function: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether torch knows the gradient of a function, or has none to know: `aminmax` and `narrow_copy` got theirs late.

    >>> differentiates(torch.exp, torch.ones(3))
    True
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = [x for x in as_tensors(function(*leaves)) if x.requires_grad]
    try:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    except RuntimeError as error:
        if "derivative for" not in str(error) or "is not implemented" not in str(error):
            raise
        return False
    return True


def traces(function: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether torch can tell the shape of a function's result without computing it; `_standard_gamma` could not always.

    Otherwise Shardwise gathers, and says so.
    """
    try:
        function(*(torch.empty_like(x, device="meta") for x in inputs))
    except NotImplementedError:
        return False
    return True
