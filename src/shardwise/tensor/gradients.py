"""Gradients of DTensors that are given or observed, and results whose gradients have a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.redistribute import Move, Typed, group_size, transition
from shardwise.tensor.dtensor import DTensor, as_layout, localise, pending_axes

_disabled = torch._C.DisableTorchFunctionSubclass
_as_subclass = torch._C.TensorBase.as_subclass


def observe(x: DTensor) -> None:
    """Somebody looks at the gradient of this tensor itself."""
    if "_gathered" in x.__dict__:
        x._gathered.observe()


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
