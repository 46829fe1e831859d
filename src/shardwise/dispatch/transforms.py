"""What looks behind a DTensor, and would take its shard for the whole. Transforms of functions are refused in words;
`torch.compile` leaves DTensors to us.

`torch.func` and forward-mode differentiation wrap tensors in C++, which knows only the shard, and collectives are not
part of what they transform. `torch.compile` runs what it does not trace as it is: with DTensors that is everything that
touches them, which gives the right results, and compiles what does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from shardwise.dispatch.entries import WATCHED
from shardwise.dispatch.special import handles
from shardwise.dispatch.views import CopiedView, Part, StaleView
from shardwise.errors import TransformError
from shardwise.tensor import DTensor

_enabled = torch._C._is_torch_function_enabled

INSTEAD = {
    "grad": "torch.func.grad, vjp, jacrev and their kin",
    "vmap": "torch.vmap",
    "functionalize": "torch.func.functionalize",
    "dual": "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)",
}


def _refusal(what: str) -> TransformError:
    return TransformError(
        f"{INSTEAD[what]} cannot look into DTensors: it would see one rank's shard instead of the tensor. "
        f"torch.autograd.grad and torch.autograd.functional (jacobian, hessian, jvp, vjp, hvp) differentiate functions "
        f"of DTensors, and ops on tensors with a batch dim take the place of vmap"
    )


def _guard(home: Any, name: str, what: str) -> None:
    """Refuse DTensors where a transform takes the tensors that it is given."""
    original = getattr(home, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def guarded(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, DTensor) and _enabled():
            raise _refusal(what)
        return original(x, *args, **kwargs)

    setattr(home, name, guarded)


_guard(eager_transforms, "_wrap_tensor_for_grad", "grad")
_guard(eager_transforms, "_maybe_wrap_functional_tensor", "functionalize")
_guard(vmap, "_add_batch_dim", "vmap")
_guard(vmap, "_remove_batch_dim", "vmap")


@handles(torch._make_dual, torch._unpack_dual)
def _dual(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise _refusal("dual")


@functools.cache
def _leave_to_us() -> None:
    import torch._dynamo.config as config
    from torch._dynamo import allow_in_graph, trace_rules

    for function in WATCHED:
        allow_in_graph(function)
    config.nontraceable_tensor_subclasses |= {DTensor, CopiedView, Part, StaleView}
    trace_rules.add("shardwise")


_compile = torch.compile


@functools.wraps(_compile)
def _compiled(*args: Any, **kwargs: Any) -> Any:
    _leave_to_us()
    return _compile(*args, **kwargs)


torch.compile = _compiled
if "torch._dynamo" in sys.modules:
    _leave_to_us()
