"""Numbers reduced together: a stack of norms, each pending along axes of its own, takes one collective.

`clip_grad_norm_` stacks the norms of all gradients. Each is pending along the axes that split its parameter; stacked as
they are, they would be reduced one by one, in as many collectives as there are parameters. Largest elements are norms
of that kind as long as nobody wants their gradient, which all elements that are as large share, on whatever rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor, shards_of
from shardwise.dispatch.functions.handlers import handles
from shardwise.layout import Layout, Partial, Replicate
from shardwise.tensor import DTensor, wrap

_disabled = torch._C.DisableTorchFunctionSubclass


@handles(torch.linalg.vector_norm)
def _largest(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The largest element of a tensor that needs no gradient, pending like other norms."""
    if len(args) != 2 or kwargs or args[1] != math.inf or args[0].__class__ is not DTensor:
        return NotImplemented
    x, layout = args[0], args[0]._layout
    axes = layout.split_axes
    if not axes or layout.has_pending or not layout.numel or not (x.is_floating_point() or x.is_complex()):
        return NotImplemented
    if torch.is_grad_enabled() and x.requires_grad:
        return NotImplemented
    with _disabled(), torch.no_grad():
        none = torch.zeros((), dtype=x.dtype.to_real(), device=x.device)  # what an empty shard contributes
        held = zip(shards_of(x), layout.held_shapes, strict=True)
        found = [func(shard, math.inf) if math.prod(shape) else none.clone() for shard, shape in held]
    pending = [Partial("norm", math.inf) if axis in axes else None for axis in range(layout.mesh.ndim)]
    return wrap(local_tensor(found), Layout(layout.mesh, ()).with_(pending=pending))


@handles(torch.stack)
def _stack(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    numbers = args[0] if len(args) == 1 and not kwargs else ()
    kinds = {x.__class__ for x in numbers} if len(numbers) > 1 else ()
    if kinds == {DTensor, Tensor} and not torch.is_grad_enabled() and not any(x.ndim for x in numbers):
        return _reduced_numbers(func, numbers)
    if kinds != {DTensor}:
        return NotImplemented
    layouts = {x._layout for x in numbers}
    if any(layout.shape for layout in layouts):
        return NotImplemented
    if len({layout.mesh for layout in layouts}) > 1:  # once reduced, numbers are the same on all meshes
        return _reduced_numbers(func, numbers)
    if torch.is_grad_enabled() and any(x.requires_grad for x in numbers):
        return NotImplemented
    norm = _common_norm(layouts)
    if norm is None:
        return NotImplemented
    pending = [x for x in numbers if x._layout.has_pending]
    norms = _stacked(pending, norm)
    if len(pending) == len(numbers):
        return norms
    left = iter(norms.redistribute(placements=[Replicate()] * norms._layout.mesh.ndim).unbind())
    return func([next(left) if x._layout.has_pending else x for x in numbers])


def _reduced_numbers(func: Callable, numbers: Sequence[DTensor]) -> Any:
    """Those of each mesh with one reduction, where they are norms; plain ones are the same on all."""
    found: dict[int, Any] = dict(enumerate(numbers))
    for mesh in dict.fromkeys(x._layout.mesh for x in numbers if isinstance(x, DTensor)):
        mine = [at for at, x in enumerate(numbers) if isinstance(x, DTensor) and x._layout.mesh is mesh]
        together = func([numbers[at] for at in mine]).full_tensor()
        found.update(zip(mine, together.unbind(), strict=True))
    return func([found[at] for at in range(len(numbers))])


def _common_norm(layouts: Iterable[Layout]) -> Partial | None:
    """The norm that is pending along all axes where anything is."""
    pending = {p for layout in layouts for p in layout.pending if p is not None}
    norm = pending.pop() if len(pending) == 1 else None
    return norm if norm is not None and norm.reduce_op == "norm" and norm.p is not None and norm.p > 0 else None


def _stacked(numbers: Sequence[DTensor], norm: Partial) -> DTensor:
    """A stack of norms that are pending along some axis, hence not negative: pending along all axes where one is. What
    is replicated along such an axis becomes as many equal terms."""
    mesh, layouts = numbers[0]._layout.mesh, {x._layout for x in numbers}
    axes = [axis for axis in range(mesh.ndim) if any(layout.pending[axis] for layout in layouts)]
    shares = {layout: _share(layout, axes, norm) for layout in layouts}
    with _disabled(), torch.no_grad():
        if len(mesh.held) == 1 and set(shares.values()) == {1}:
            stack: Tensor = torch.stack(numbers)  # type: ignore[arg-type]
        else:
            terms = [[shard / shares[x._layout] for shard in shards_of(x)] for x in numbers]
            stack = local_tensor([torch.stack(held) for held in zip(*terms, strict=True)])
    return wrap(
        stack, Layout(mesh, (len(numbers),)).with_(pending=[norm if a in axes else None for a in range(mesh.ndim)])
    )


def _share(layout: Layout, axes: Sequence[int], norm: Partial) -> float:
    """Of how many terms a number is one, to the norm's root. An infinite norm is its largest term."""
    assert norm.p is not None
    return math.prod(layout.mesh.shape[axis] for axis in axes if layout.pending[axis] is None) ** (1 / norm.p)


# Numbers that torch reads out of tensors to cut a view by: a plan for all numbers would have to copy


@handles(Tensor.narrow, torch.narrow, Tensor.tensor_split, torch.tensor_split)
def _cut_by_tensor(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    by = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
    most_dims = 0 if "narrow" in func.__name__ else 1
    if not by or not args or not args[0].ndim or not all(x.dtype == torch.int64 and x.dim() <= most_dims for x in by):
        return NotImplemented
    rest, named = [_read(x) for x in args[1:]], {name: _read(x) for name, x in kwargs.items()}
    if "tensor_indices_or_sections" in named:
        rest.append(named.pop("tensor_indices_or_sections"))
    return func(args[0], *rest, **named)


def _read(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else x
