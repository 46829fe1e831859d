"""Gradients of DTensors: torch accumulates plain shards, which become DTensors when they are looked at; those that are
given or observed; and results whose gradients have a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor
from shardwise.layout import Layout
from shardwise.local import empty_gradient, give_strides
from shardwise.redistribute import DISJOINT, Move, Typed, drop, group_size, transition, unreduced
from shardwise.tensor.dtensor import DTensor, as_layout, kernels_see, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
# (function, types, args, kwargs): run it where a DTensor is its shard
_on_shard = torch._C._disabled_torch_function_impl
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


# The attribute


def _grad(x: DTensor) -> DTensor | None:
    grad: Any = _on_shard(_get_grad, (), (x,))  # type: ignore[call-arg]
    if "_peers" not in x.__dict__:
        if grad is None or grad.__class__ is DTensor:
            return grad
    elif grad is None and any(peer.grad is not None for peer in x._peers):
        with _disabled():
            grad = empty_gradient(x)
    return None if grad is None else _labelled(x, grad)


def _change_grad(x: DTensor, value: Tensor | None) -> None:
    if unreduced:
        drop(x)
    if value is None:
        _on_shard(_set_grad, (), (x, None))  # type: ignore[call-arg]
        if "_peers" in x.__dict__:
            for peer in x._peers:
                peer.grad = None
        return
    peers = x.__dict__.get("_peers", ())
    with _disabled():
        grad = as_layout(value, x._layout.gradient, "grad")
        seen = kernels_see(grad)
        _set_grad(x, seen)
        if seen is not grad:
            x.__dict__["_grad_set"] = seen, grad
        for peer, piece in zip(peers, grad.__dict__.get("_peers", ()), strict=True):
            peer.grad = piece


def _labelled(x: DTensor, grad: Any) -> DTensor:
    """What torch accumulated, as a DTensor."""
    with _disabled():
        peers = x.__dict__.get("_peers", ())
        others = _of_peers(peers) if peers else ()
        if grad.requires_grad and pending_axes(x._layout, "sum"):
            return gradient_tensor((grad, *others), x._layout)
        if grad.is_meta and x._layout.mesh.device_type == "meta":
            return _labelled_on_meta(x, grad)
        if not isinstance(grad, DTensor):
            if x._layout.thinness:
                give_strides((x, *peers), (grad, *others))
            grad.__class__ = DTensor
            grad.__dict__["_layout"] = x._layout.gradient
        if peers:
            grad._peers = others
        return grad


def _of_peers(peers: Sequence[Tensor]) -> tuple[Any, ...]:
    found = tuple(empty_gradient(peer) if peer.grad is None else peer.grad for peer in peers)
    if any(grad is None for grad in found):
        raise RuntimeError(
            "only some of the simulated ranks have a gradient: a backward pass of a plain tensor was given "
            "this DTensor in inputs=; use torch.autograd.grad, or call backward on a DTensor"
        )
    return found


def _labelled_on_meta(x: DTensor, grad: Tensor) -> DTensor:
    """An alias of what torch accumulated: torch goes on adding to it, which on meta a function in Python does, and
    that would see the global shape."""
    known = x.__dict__.get("_grad_set")
    if known is None or known[0] is not grad:
        alias = x._layout.mesh.port.alias(grad, Tensor)
        known = x.__dict__["_grad_set"] = grad, wrap(alias, x._layout.gradient)
    return known[1]


DTensor.grad = property(_grad, _change_grad, lambda x: _change_grad(x, None))  # type: ignore[assignment]


# A gradient of a pending sum is whole on every rank, and what each rank computes from it differs: `V` in the table of
# transitions. Users see it replicated. The two meet only where a gradient is itself differentiated.


def gradient_tensor(grads: Sequence[Tensor], layout: Layout, *, ours: bool = False) -> DTensor:
    """The gradient of a tensor in `layout`, from the held ranks' plain gradients. Unless they are `ours`, and nobody
    else has them, it is a view: autograd then sees that they are in use."""
    with _disabled():
        if not ours:
            grads = [grads[0].view_as(grads[0]), *grads[1:]]
        if (axes := pending_axes(layout, "sum")) and torch.is_grad_enabled():
            varying = Typed(layout.gradient, frozenset(axes))
            grads = transition(Move(varying, Typed(layout.gradient), axes), grads)
        return wrap(local_tensor(grads), layout.gradient)


def pending_axes(layout: Layout, reduce_op: str) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.pending) if p is not None and p.reduce_op == reduce_op)


# Gradients that are given or observed


def observe(x: DTensor) -> None:
    """Somebody looks at the gradient of this tensor itself."""
    if "_gathered" in x.__dict__:
        x._gathered.observe()
    if (kept := x.__dict__.get("_moved")) and DISJOINT in kept:
        kept[DISJOINT][0].observe()


def gradient_shards(gradient: Tensor, layout: Layout, name: str) -> tuple[Tensor, ...]:
    """A gradient for a tensor in `layout`, as the held ranks' gradients. The terms of an average have equal
    shares of it, for ranks may have used their term with other values: terms that merely add up to it will not do."""
    averaged = pending_axes(layout, "avg")
    dual = layout.gradient.with_(pending=[None if a in averaged else p for a, p in enumerate(layout.gradient.pending)])
    local = localise(as_layout(gradient, dual, name))
    with _disabled():
        shards: Sequence[Tensor] = (layout.mesh.port.alias(local, Tensor), *local.__dict__.get("_peers", ()))
        if (axes := pending_axes(layout, "sum") + averaged) and torch.is_grad_enabled():
            shards = transition(Move(Typed(dual), Typed(dual, frozenset(axes)), axes), shards)
        return tuple(shard / group_size(layout.mesh, averaged) for shard in shards) if averaged else tuple(shards)


# Results


def settled(x: Any) -> Any:
    """A result whose gradient has a layout: those of the terms of a product, or of a norm, are not its terms."""
    return as_layout(x, within_graph(x._layout), "a result") if isinstance(x, DTensor) else x


def within_graph(layout: Layout) -> Layout:
    """The layout of a result within a graph. Extrema beside something else are reduced, too: which rank has one, and
    with it the gradient, depends on the other axis, along which the gradient is whole."""
    kept = without_terms(layout)
    if len({p.reduce_op for p in kept.pending if p is not None}) < 2:
        return kept
    return kept.with_(pending=[p if p is not None and p.reduce_op in ("sum", "avg") else None for p in kept.pending])


def without_terms(layout: Layout) -> Layout:
    """The layout in which products and norms are reduced, whose terms no value is taken apart into."""
    return layout.with_(pending=[p if p is not None and p.divides_gradients else None for p in layout.pending])
