"""Clipping by norm, on the shards. torch's functions look at every gradient several times, and at every norm.

Where all gradients are DTensors of one mesh, of which this process holds one rank, the calls that torch makes for lists
run on the shards, and the total alone is reduced. All else goes torch's way, on DTensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import noters
from shardwise.comm.cause import watchers
from shardwise.dispatch.plan import runs_in_cpp
from shardwise.layout import Layout, Mesh, Partial, Replicate
from shardwise.tensor import DTensor, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_device = torch._C.TensorBase.device.__get__


def total_of_shards(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        order = float(norm_type)
        direct = foreach is not False and not error_if_nonfinite and 0 < order < math.inf
        layouts = _layouts_of_shards(tensors) if direct else None
        return _total(tensors, layouts, order) if layouts else original(tensors, order, error_if_nonfinite, foreach)

    return total_norm


def clipping_shards(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        direct = foreach is not False and total_norm.__class__ is DTensor and _layouts_of_shards(parameters)
        with _disabled():
            grads = [grad for p in parameters if (grad := _get_grad(p)) is not None] if direct else []
        if not {grad.__class__ for grad in grads} <= {DTensor, Tensor} or not grads:
            return original(parameters, max_norm, total_norm, foreach)
        with torch.no_grad():
            coefficient = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
            with _disabled():
                torch._foreach_mul_(grads, coefficient)

    return clip


def _layouts_of_shards(tensors: Any) -> list[Layout] | None:
    """Those of a list of DTensors of one mesh, if their shards may be used as they are."""
    if not isinstance(tensors, list) or {x.__class__ for x in tensors} != {DTensor} or watchers or noters:
        return None
    layouts = [x._layout for x in tensors]
    mesh = layouts[0].mesh
    if any(layout.mesh is not mesh or layout.has_pending for layout in {*layouts}) or not runs_in_cpp(mesh):
        return None
    if not torch._C._is_torch_function_enabled() or torch._C._is_torch_function_mode_enabled():
        return None
    with _disabled():  # some may be kept on the host
        return layouts if mesh.device_type == "cpu" or len(set(map(_device, tensors))) == 1 else None


def _total(grads: Sequence[DTensor], layouts: Sequence[Layout], order: float) -> DTensor:
    """The same arithmetic as on DTensors, with one collective: for the total or, where some gradients are replicated,
    for the norms of the others. What is replicated along an axis that splits another counts once."""
    mesh, kinds = layouts[0].mesh, {*layouts}
    axes = {axis for layout in kinds for axis in layout.split_axes}
    shares = {x: math.prod(mesh.shape[axis] for axis in axes.difference(x.split_axes)) ** (1 / order) for x in kinds}
    with _disabled(), torch.no_grad():
        norms = torch._foreach_norm(grads, order)  # type: ignore[arg-type]
        if not axes:
            return wrap(torch.linalg.vector_norm(torch.stack(norms), order), Layout(mesh, ()))
        mixed = not all(x.split_axes for x in kinds)
        own = [norm for norm, x in zip(norms, layouts, strict=True) if x.split_axes] if mixed else norms
        terms = torch.stack(own)
        if any(shares[x] != 1 for x in kinds if x.split_axes):
            terms = terms / terms.new_tensor([shares[x] for x in layouts if x.split_axes])
        if not mixed:
            return _reduced(torch.linalg.vector_norm(terms, order), mesh, axes, order)
        left = iter(_reduced(terms, mesh, axes, order).unbind())
        every = [next(left) if x.split_axes else norm for norm, x in zip(norms, layouts, strict=True)]
        return wrap(torch.linalg.vector_norm(torch.stack(every), order), Layout(mesh, ()))


def _reduced(norms: Tensor, mesh: Mesh, axes: Collection[int], order: float) -> DTensor:
    pending = [Partial("norm", order) if axis in axes else None for axis in range(mesh.ndim)]
    found = wrap(norms, Layout(mesh, tuple(norms.shape)).with_(pending=pending))
    return found.redistribute(placements=[Replicate()] * mesh.ndim)
