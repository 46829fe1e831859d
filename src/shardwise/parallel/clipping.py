"""Clipping by norm, on the shards. torch's function is right on DTensors, but looks at every gradient several times.

Where all gradients are DTensors of one mesh, of which this process holds one rank, the calls that torch makes for lists
run on the shards, and the total alone is reduced. All else goes torch's way, on DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from shardwise.comm import noters
from shardwise.comm.cause import watchers
from shardwise.dispatch.aliasing.copied_views import copies
from shardwise.dispatch.plan import runs_in_cpp
from shardwise.layout import Layout, Mesh, Partial, Replicate
from shardwise.redistribute import forget
from shardwise.tensor import DTensor, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
_device = torch._C.TensorBase.device.__get__


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, with its results to the last bit; faster where gradients are many and small.

    >>> import shardwise as sw
    >>> weight = torch.nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), sw.simulate((2,), ("tp",)), [sw.Shard(0)]))
    >>> weight.sum().backward()
    >>> sw.parallel.clip_grad_norm_([weight], 1.0).item(), weight.grad.full_tensor().norm().item()
    (4.0, 0.9999997615814209)
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    order = float(norm_type)
    if foreach is not False and not error_if_nonfinite and 0 < order < math.inf and _are_shards(params):
        grads, layouts = _gradients(params)
        if grads:
            total = _total(grads, layouts, order)
            with torch.no_grad():
                coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
                with _disabled():
                    torch._foreach_mul_(grads, coefficient)
            forget(layouts[0].mesh)  # as every write does that is not recorded
            return total
    return clip_grad.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)


def _are_shards(params: Sequence[Any]) -> bool:
    """Whether tensors are DTensors of one mesh, whose gradients may be used as they are."""
    if {x.__class__ for x in params} != {DTensor} or watchers or noters or copies:
        return False
    mesh, kinds = params[0]._layout.mesh, {x._layout for x in params}
    if any(layout.mesh is not mesh or layout.has_pending for layout in kinds) or not runs_in_cpp(mesh):
        return False
    return torch._C._is_torch_function_enabled() and not torch._C._is_torch_function_mode_enabled()


def _gradients(params: Sequence[Any]) -> tuple[list[Tensor], list[Layout]]:
    """The gradients, with their layouts; none if torch would make several lists of them, or they are laid out
    otherwise than their parameters."""
    with _disabled():
        found = [(grad, x._layout.gradient) for x in params if (grad := _get_grad(x)) is not None]
        kinds = {(_dtype(grad), _device(grad)) for grad, _ in found}
    alike = all(grad.__class__ is Tensor or grad.__dict__.get("_layout") is layout for grad, layout in found)
    grads, layouts = [list(column) for column in zip(*found)] or ([], [])
    return (grads, layouts) if alike and len(kinds) == 1 else ([], [])


def _total(grads: Sequence[Tensor], layouts: Sequence[Layout], order: float) -> DTensor:
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
