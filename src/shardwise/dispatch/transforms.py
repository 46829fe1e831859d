"""What looks behind a DTensor, and would take its shard for the whole. Transforms of functions are refused in words;
`torch.compile` leaves DTensors to us.

`torch.func` and forward-mode differentiation wrap tensors in C++, which knows only the shard, and collectives are not
part of what they transform. `torch.export`, `torch.jit.trace` and `make_fx` write down what happens to plain tensors.
`torch.compile` runs what it does not trace as it is: with DTensors that is everything that touches them, which gives
the right results, and compiles what does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch.fx.experimental import proxy_tensor
from torch.jit import _trace as jit_trace
from torch.utils._pytree import tree_leaves

from shardwise.dispatch.copies import CopiedView, Part, StaleView
from shardwise.dispatch.entries import WATCHED, rebind
from shardwise.dispatch.special import handles
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


def _guard_traces(home: Any, name: str) -> None:
    """Refuse DTensors where a function is traced on the arguments that it is given, a module's parameters included."""
    original = getattr(home, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        held = [x for leaf in leaves if isinstance(leaf, nn.Module) for x in leaf.parameters()]
        if any(isinstance(x, DTensor) for x in (*leaves, *held)) and _enabled():
            raise TransformError(
                "torch.export, torch.jit.trace and make_fx write down what happens to plain tensors: of a DTensor they "
                "would see one rank's shard. Trace the program on plain tensors"
            )
        return original(*args, **kwargs)

    setattr(home, name, guarded)


_guard_traces(jit_trace, "_trace_impl")
for _home in (jit_trace, torch.jit):
    _guard_traces(_home, "trace_module")
_guard_traces(proxy_tensor._MakefxTracer, "trace")
_guard_traces(torch.export, "export")


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
rebind([(_compile, _compiled)])
if "torch._dynamo" in sys.modules:
    _leave_to_us()
