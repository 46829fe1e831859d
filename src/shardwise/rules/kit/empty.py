"""Ranks that hold nothing: what takes the place of a local call whose result is empty there.

Torch's kernels refuse many empty tensors, or leave them out of the graph. An empty result is made instead that depends
on the same tensors, so that every rank takes part in a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.types import Call, HeldValues, Local, Rule, Value, flat_values, is_inexact


def has_empty(layouts: Sequence[Layout]) -> bool:
    """Whether some rank's shard is empty, be the global tensor empty or not."""
    return any(0 in layout.pieces(dim) for layout in layouts for dim, axes in enumerate(layout.splits) if axes)


def skipping_empty(rule: Rule) -> Rule:
    """A rule whose local calls are not made where their results are empty; programs look after that themselves."""

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        return unless_empty(call, outs, rule.local and rule.local(call, ins, outs))

    return replace(rule, local=local)


def unless_empty(call: Call, outs: Sequence[Layout], local: Local | None = None) -> Local | None:
    """A local call, by default the op itself, that is not made where its results are empty."""
    if all(math.prod(shape) for out in outs for shape in out.held_shapes) or (local and local.groups):
        return local
    local = local or Local(call.op, call.args, call.kwargs)
    shapes = HeldValues([tuple(out.held_shapes[rank] for out in outs) for rank in range(len(outs[0].mesh.held))])
    dtypes = tuple(value.dtype for value in call.outputs)
    saves = _Saves.of(call, local)
    return Local(_unless_empty, [local.function, shapes, dtypes, saves, *local.args], local.kwargs)


@dataclass(frozen=True, slots=True)
class _Saves:
    """Which tensors among the arguments of a local call autograd saves where it is made, and whether any tensor."""

    arguments: tuple[bool, ...]
    anything: bool

    @staticmethod
    def of(call: Call, local: Local) -> _Saves:
        """Torch is asked, with meta tensors that all need a gradient; all are, if it cannot tell without data."""
        values = flat_values([*local.args, *local.kwargs.values()])
        found: list[Tensor] = []
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
                metas = {value.index: _meta(value) for value in call.inputs}
                args, kwargs = (
                    _filled(call.args, metas),
                    {name: _filled(arg, metas) for name, arg in call.kwargs.items()},
                )
                with torch.autograd.graph.saved_tensors_hooks(found.append, lambda x: x):
                    call.op(*args, **kwargs)
        except Exception:
            return _Saves((True,) * len(values), True)
        kept = {x.untyped_storage()._cdata for x in found}
        return _Saves(tuple(metas[value.index].untyped_storage()._cdata in kept for value in values), bool(found))


def _meta(value: Value) -> Tensor:
    needs = is_inexact(value.dtype)
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=needs)


def _filled(template: Any, metas: dict[int, Tensor]) -> Any:
    if isinstance(template, Value):
        return metas[template.index]
    return [_filled(item, metas) for item in template] if isinstance(template, (list, tuple)) else template


def _unless_empty(
    function: Callable, shapes: Sequence[tuple[int, ...]], dtypes: Any, saves: _Saves, *args: Any, **kwargs: Any
) -> Any:
    if all(map(math.prod, shapes)):
        return function(*args, **kwargs)
    tensors = _tensors((*args, *kwargs.values()))
    kept = [x for x, is_saved in zip(tensors, saves.arguments, strict=True) if is_saved]
    rest = [x for x, is_saved in zip(tensors, saves.arguments, strict=True) if not is_saved]
    results = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        out = connected_zeros(tensors[0].detach(), shape, *kept, dtype=_dtype(dtype, tensors[0]), unsaved=rest)
        results.append(remembered(out) if saves.anything and out.requires_grad else out)
    return tuple(results) if len(results) > 1 else results[0]


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among some arguments, and in lists of them."""
    lists = [item if isinstance(item, (list, tuple)) else [item] for item in arguments]
    return [item for items in lists for item in items if isinstance(item, Tensor)]


def _dtype(planned: torch.dtype, x: Tensor) -> torch.dtype:
    """A result's dtype. A plan made for tensors of one precision runs others of any."""
    if not (x.is_floating_point() or x.is_complex()):
        return planned
    if planned.is_complex:
        return x.dtype.to_complex()
    return x.dtype.to_real() if planned.is_floating_point else planned


def connected_zeros(
    like: Tensor,
    shape: Sequence[int],
    *others: Tensor | None,
    dtype: torch.dtype | None = None,
    saves: bool = True,
    unsaved: Sequence[Tensor | None] = (),
) -> Tensor:
    """Zeros that depend on tensors without reading them: every rank takes part in a backward pass.

    An op that `saves` something for its gradient does so here as well. A checkpoint begins to recompute when the first
    saved tensor is asked for and stops at the last one: all ranks must do that between the same collectives. What the
    op leaves `unsaved` may be written to before the backward pass, and may be here.
    """
    out = like.new_zeros(shape, dtype=dtype)
    if not (out.is_floating_point() or out.is_complex()):
        return out
    for at, x in enumerate((like, *others, *unsaved)):
        if x is not None and x.requires_grad:
            empty = x.narrow(0, 0, 0) if x.dim() else x[None][:0]
            term = (saved(empty) if saves and at <= len(others) else empty).sum()
            out = out + (term.real if x.is_complex() and not out.is_complex() else term).to(out.dtype)
    return out


def saved(x: Tensor) -> Tensor:
    """Something empty that autograd saves, and refuses to see written to, as it does where there is something."""
    return x * x.detach()


def remembered(x: Tensor) -> Tensor:
    """Something empty, or zero, for which autograd saves another tensor."""
    return x * x.new_zeros(x.shape)
