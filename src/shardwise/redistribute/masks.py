"""R → P on one rank: a value that counts once. The rank that contributes it has the value, the others have zeros.

Each has a node that passes the gradient on as it is, on every rank alike, so that gradients add up in the same order.
They are no views: a tensor that keeps one, as it keeps what it was moved to, would never be freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.redistribute.backward.deferred_gradients import SECOND_ORDER
from shardwise.redistribute.backward.ownership import bare_function, own_node
from shardwise.redistribute.dim_order import copy_format
from shardwise.redistribute.transitions import Move

_grad_enabled = torch._C.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_numel = torch._C.TensorBase.numel
_size = torch._C.TensorBase.size


def masking(move: Move) -> Callable[[Tensor], Tensor]:
    """R → P on one rank: the value, or nothing. A node on every rank, so that gradients add up in the same order."""
    dual, counts, thin = move.dual, move.keeps_value, move.source.layout.thinness > 0
    mask = _kept if counts else _silenced
    is_vector = len(move.source.layout.shape) == 1  # a bias, most often

    def run(x: Tensor) -> Tensor:
        if not (_grad_enabled() and x.requires_grad):
            return x if counts else _zeros(x)
        if is_vector:
            out = x.clone() if counts else _zeroed(x.clone())
        else:
            out = mask(x, thin)
        out.grad_fn.metadata[SECOND_ORDER] = dual  # type: ignore[union-attr, index]
        return out

    return run


SMALL = 1 << 16
"""Elements that are copied, or overwritten with zeros, sooner than a tensor is made that shares or takes no memory."""


def _is_large(x: Tensor) -> bool:
    # Of a bias that is not contiguous, torch's linear sums the gradient in another order: replicas would differ.
    return _numel(x) > SMALL and len(_size(x)) > 1


def _zeros(x: Tensor) -> Tensor:
    return zeros_without_memory(x) if _is_large(x) else torch.zeros_like(x)


def zeros_without_memory(x: Tensor) -> Tensor:
    """Zeros of a shard's shape that take no memory."""
    return x.new_zeros(()).expand(_size(x))


def _kept(x: Tensor, thin: bool = False) -> Tensor:
    return own_node(x) if _is_large(x) else x.clone(memory_format=copy_format(x, thin))


def _silenced(x: Tensor, thin: bool = False) -> Tensor:
    if _is_large(x):
        out = own_node(x)
        out.data = zeros_without_memory(out)
        return out
    return _zeroed(x.clone(memory_format=copy_format(x, thin)))


def _zeroed(copied: Tensor) -> Tensor:
    """Zeros in the place of a copy in the graph."""
    _set_grad_enabled(False)  # which costs less than an alias outside of the graph
    try:
        return copied.zero_()
    finally:
        _set_grad_enabled(True)


def _zeros_in_place_of(ctx: Any, x: Tensor) -> Tensor:
    ctx.set_materialize_grads(False)
    return zeros_without_memory(x)


placeholder = bare_function(_zeros_in_place_of, lambda ctx, grad: grad, "OwnNode")
"""Zeros in the place of a shard in the graph: whether that is written to afterwards is nothing to them."""

# A whole tensor and a term that is added to it, on a rank that contributes the term only → a copy of the term.
_joined = bare_function(lambda ctx, whole, term: _like_sum(whole, term), lambda ctx, grad: (grad, grad), "Joined")


def _like_sum(whole: Tensor, term: Tensor) -> Tensor:
    """A copy of the term, strided as the sum is."""
    return torch.empty_like(whole).copy_(term)


def joined(whole: Tensor, term: Tensor) -> Tensor:
    """`whole + term` as far as a rank sees it that contributes nothing but the term; gradients are those of the sum."""
    if whole.dtype is term.dtype:
        if not (_grad_enabled() and (whole.requires_grad or term.requires_grad)):
            return _like_sum(whole, term)
        if _numel(term) > SMALL:
            return _joined(whole, term)
    # Of few elements, to add them and write the term over it costs less than a node in Python.
    out = torch.add(whole, term)
    _set_grad_enabled(False)
    try:
        return out.copy_(term)
    finally:
        _set_grad_enabled(True)
