"""Transforms of functions, which would take a DTensor's shard for the tensor: refused in words.

`torch.func` and forward-mode differentiation wrap tensors in C++, which knows only the shard, and collectives are not
part of what they transform. `torch.export`, `torch.jit.trace` and `make_fx` write down what happens to plain tensors;
they ask for memory or metadata that a DTensor does not give, and so raise by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwise.dispatch.functions.handlers import handles
from shardwise.errors import TransformError
from shardwise.tensor import DTensor

_enabled = torch._C._is_torch_function_enabled

REFUSED = {
    "grad": "torch.func.grad, vjp, jacrev and their kin",
    "vmap": "torch.vmap",
    "dual": "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)",
}


def refusal(what: str) -> TransformError:
    return TransformError(
        f"{REFUSED[what]} cannot look into DTensors: it would see one rank's shard instead of the tensor. "
        f"torch.autograd.grad and torch.autograd.functional (jacobian, hessian, jvp, vjp, hvp) differentiate functions "
        f"of DTensors, and ops on tensors with a batch dim take the place of vmap"
    )


def refusing(what: str) -> Callable[[Callable], Callable]:
    """Refuse DTensors where a transform takes the tensors that it is given."""

    def guard(original: Callable) -> Callable:
        @functools.wraps(original)
        def guarded(x: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, DTensor) and _enabled():
                raise refusal(what)
            return original(x, *args, **kwargs)

        return guarded

    return guard


@handles(torch._make_dual, torch._unpack_dual)
def _dual(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise refusal("dual")
