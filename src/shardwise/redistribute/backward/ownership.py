"""Whether a gradient that arrives in a backward pass belongs to nobody else, so that it may be overwritten.

A gradient may be shared: with another branch of the graph, with whoever captures or keeps it, with a view. Each of them
holds a reference, to the Python object, to the tensor or to its memory. How many references a function sees to a
gradient that nobody shares depends only on how autograd calls it, so they are counted once, on such a gradient. More
than that means that somebody shares it, or that a debugger looks on; then it is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

_references = sys.getrefcount
_tensors = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_storage = torch._C.TensorBase.untyped_storage
_storages = torch._C._storage_Use_Count


def bare_function(
    forward: Callable[..., Any], backward: Callable[..., Any], name: str, **attributes: Any
) -> Callable[..., Any]:
    """`apply` of an autograd function, without detours: functorch's transforms have no business with shards, and
    torch's own backward would only look for ours, which, called by the engine itself, sees the references that
    `is_ours` knows."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), {**methods, **attributes})
    function._backward_cls.apply = backward
    return super(_SingleLevelFunction, function).apply


def _detached(ctx: Any, x: Tensor) -> Tensor:
    ctx.set_materialize_grads(False)  # no gradient is passed on as none
    return x.detach()


own_node = bare_function(_detached, lambda ctx, grad: grad, "OwnNode")
"""The same memory under a node of its own. The version is shared: a write to what a backward pass needs is noticed."""

Counts = tuple[int, ...]
"""References to a gradient as an object, to its tensor and its memory; to the object and tensor of what it views."""


def _counted(use: Callable[[Tensor], Tensor]) -> Counts:
    """The references to a gradient that nobody shares."""
    seen: list[Counts] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        seen.append(_asked(grad))
        return grad

    with torch.enable_grad(), torch.device("cpu"):
        x = torch.ones(2, 1, requires_grad=True)
        (use(bare_function(forward, backward, "Probe")(x)) * 2).sum().backward()
    return seen[0]


def _counts(grad: Tensor) -> Counts:
    own = _references(grad), _tensors(grad), _storages(_storage(grad)._cdata)
    base = grad._base
    return own if base is None else (*own, _references(base), _tensors(base))


def _asked(grad: Tensor) -> Counts:
    """The same, asked as `is_ours` asks: each call holds a reference of its own."""
    return _counts(grad)


# A debugger that keeps frames would be counted too: then nothing is ever ours.
_ALONE = _counted(lambda x: x) if sys.gettrace() is None else (0, 0, 0)
_RESHAPED = _counted(lambda x: x.view(-1)) if sys.gettrace() is None else (0, 0, 0, 0, 0)


def is_ours(grad: Tensor) -> bool:
    """Whether nobody else has a gradient; to be asked in `backward` of a `bare_function`, which has it in its arguments
    and under one name. It may be all of something in another shape, if nobody has that either."""
    found = _counts(grad)
    if len(found) == len(_ALONE):
        return all(map(le, found, _ALONE))
    return grad._base.numel() == grad.numel() and all(map(le, found, _RESHAPED))  # type: ignore[union-attr]
