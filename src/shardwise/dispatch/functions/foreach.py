"""`_foreach_*` and `_fused_*`: one call for many tensors. Each element is on its own; all run in the one local call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import CopiedView, depend
from shardwise.dispatch.aliasing.inplace_via_copy import InplaceViaCopy, without_pending
from shardwise.dispatch.aliasing.result_strides import WithStrides
from shardwise.dispatch.aliasing.views import OnCopiedViews, Writes
from shardwise.dispatch.functions.single_elements import (
    each,
    forgotten,
    in_turn,
    is_recorded,
    is_tensors,
    lead_of,
    refuse_unwritable,
    returned,
)
from shardwise.dispatch.guarded import Guarded
from shardwise.dispatch.interop.nodes import pass_none_on
from shardwise.dispatch.plan import Mover, Plan, direct_list, has_terms, mover_of, reduced_first, runs_in_cpp
from shardwise.dispatch.planning.ask_torch import refused
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.dispatch.steps import Whole
from shardwise.errors import InPlaceError
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import Group, plan_moves
from shardwise.rules.math.foreach import FUSED, REDUCING, STATE, UNSCALE, is_list_op, list_name
from shardwise.tensor import DTensor, localise

_disabled = torch._C.DisableTorchFunctionSubclass


def plan_list_call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Bring the lists into the layouts of the first one, element by element, and run the call as it is."""
    if places := _plain_apart(func, args, kwargs):
        return _ByMesh(func, places)
    name, written = list_name(func), lead_of(args, kwargs) if list_name(func).endswith("_") else []
    is_step = name in (*FUSED, UNSCALE)
    if any(isinstance(x, CopiedView) for x in flat_tensors((args, kwargs))):
        several = len(written) > 1 and any(x.__class__ is CopiedView for x in written)
        return partial(in_turn, func) if several and not is_step else OnCopiedViews(func)
    if terms := [at for at, x in enumerate(written) if isinstance(x, DTensor) and has_terms(x._layout)]:
        return reduced_first(func, terms)
    plan = _plan_together(func, args, kwargs)
    if isinstance(plan, _ByMesh):
        return plan
    if written and not isinstance(plan, InplaceViaCopy):
        plan = Guarded(plan, [Writes(name, None)])
    elif not written and any(x._layout.thinness for x in lead_of(args, kwargs)):
        plan = WithStrides(plan, func, [])
    return plan if is_step else _Recorded(plan, func)


def _plan_together(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    name = list_name(func)
    in_place = name.endswith("_")
    lead = lead_of(args, kwargs)
    _refuse(func, args, kwargs)
    wanted = [layout.without_pending for layout in _layouts(lead, name)]
    meshes = list(dict.fromkeys(layout.mesh for layout in wanted))
    if len(meshes) > 1:
        return _ByMesh(func, {mesh: _on(mesh, lead) for mesh in meshes})
    if in_place and (pending := [x._layout for x in lead if x._layout.has_pending]):
        refusal = InPlaceError(f"{name} cannot write to a tensor with the layout {pending[0]}; redistribute it first")
        if name in (*FUSED, UNSCALE):
            raise refusal
        return InplaceViaCopy(func, range(len(lead)), [without_pending], refusal)
    _check_state(func, args, kwargs, wanted)
    if name == UNSCALE:
        return _Unscale(func, wanted[0].mesh)
    try:
        movers = _movers(args, kwargs, wanted)
    except _NotAlike:
        return each(func)
    if name == "_foreach_mm":
        return each(func)
    if name in REDUCING:
        return _Reduced(func, movers, wanted)
    mesh = wanted[0].mesh
    if not any(movers) and runs_in_cpp(mesh):
        return _direct_in_place(func) if in_place else direct_list(func, wanted)
    if in_place:
        return _InPlace(func, movers, mesh)
    return Whole(func, movers, wanted, [None] * len(wanted), mesh)


def _refuse(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Where lists do not match in length, shapes or dtypes, let torch look at such tensors before anything moves."""
    lists = [arg for arg in (*args, *kwargs.values()) if is_tensors(arg)]
    kinds = [[(tuple(x.shape), x.dtype) for x in items] for items in lists]
    mixed = any(dtype.is_complex != kinds[0][0][1].is_complex for _, dtype in kinds[0])
    if (all(found == kinds[0] for found in kinds) and not mixed) or list_name(func) in FUSED:
        return
    if (refusal := refused(func, args, kwargs)) is not None:
        raise refusal


def has_plain_elements(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether some elements of a list call are plain in all of its lists, beside others that are DTensors."""
    return is_list_op(func) and bool(_plain_apart(func, args, kwargs or {}))


def _plain_apart(func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[Mesh | None, list[int]]:
    """Where such elements are, and where the others are, by their meshes. Plain ones come first: what they add to a
    number that all elements share (whether any gradient is infinite) the others tell the other ranks."""
    lead = lead_of(args, kwargs)
    plain = [at for at, x in enumerate(lead) if not isinstance(x, DTensor)]
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and len(x) == len(lead)]
    if not plain or len(plain) == len(lead) or any(isinstance(x[at], DTensor) for x in lists for at in plain):
        return {}
    meshes = dict.fromkeys(x._layout.mesh for x in lead if isinstance(x, DTensor))
    return {None: plain, **{mesh: _on(mesh, lead) for mesh in meshes}}


def _on(mesh: Mesh, lead: Sequence[Any]) -> list[int]:
    return [at for at, x in enumerate(lead) if isinstance(x, DTensor) and x._layout.mesh is mesh]


def _layouts(lead: Sequence[Any], name: str) -> list[Layout]:
    if not all(isinstance(x, DTensor) for x in lead):
        raise InPlaceError(f"{name} mixes plain tensors and DTensors in one list; distribute the plain ones first")
    return [x._layout for x in lead]


def _check_state(func: Callable, args: tuple, kwargs: dict[str, Any], wanted: Sequence[Layout]) -> None:
    """A fused step writes to several lists. All must have the parameters' layouts: a write to a moved copy is lost."""
    if list_name(func) not in FUSED:
        return
    names = [argument.name for argument in getattr(torch.ops.aten, list_name(func)).default._schema.arguments]
    for name, tensors in (*zip(names, args), *kwargs.items()):
        for x, target in zip(tensors, wanted) if name in STATE else ():
            if isinstance(x, DTensor) and x._layout is not target:
                raise InPlaceError(
                    f"{list_name(func)} cannot write to {name} with the layout {x._layout}, while its parameter has "
                    f"{target}. Nothing was changed; redistribute it first"
                )


# How the elements of other lists come into the layouts of the first


class _NotAlike(Exception):
    """An element has a partner of another shape: they broadcast, or multiply, and how depends on their shapes."""


def _movers(args: tuple, kwargs: dict[str, Any], wanted: Sequence[Layout]) -> list[Mover | None]:
    movers: list[Mover | None] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            tensors = flat_tensors(argument)
            if len(tensors) == len(wanted):
                movers += [_mover(x, target) for x, target in zip(tensors, wanted, strict=True)]
            elif tensors:
                raise _NotAlike
        elif isinstance(argument, Tensor):
            movers.append(_whole(argument))
    return movers


def _mover(x: Tensor, target: Layout) -> Mover | None:
    """How an element comes into its partner's layout. A number is whole on all ranks, which use it differently."""
    layout = x._layout if isinstance(x, DTensor) else Layout(target.mesh, tuple(x.shape))
    if layout.shape == target.shape:
        return mover_of(plan_moves(layout, target))
    if layout.shape:
        raise _NotAlike
    return mover_of(plan_moves(layout, Layout(target.mesh, ()), frozenset(target.split_axes)))


def _whole(x: Tensor) -> Mover | None:
    if not isinstance(x, DTensor):
        return None
    return mover_of(plan_moves(x._layout, Layout(x._layout.mesh, x._layout.shape)))


# Plans


class _Recorded:
    """A plan that holds for what autograd does not record. In its graph torch makes one node of the call, which runs
    for all elements, whichever of them a loss depends on: what came before the others is given no gradient. In place
    each element has a node of its own, so each gets a call of its own. A tensor that all elements share, and that needs
    a gradient, is taken by each on its own."""

    __slots__ = ("func", "in_place", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func, self.in_place = plan, func, list_name(func).endswith("_")

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if isinstance(self.plan, InplaceViaCopy) and depend(args[0], list_name(self.func)):
            return in_turn(self.func, args, kwargs)  # a copy does not show what was written to another
        if not is_recorded(args, kwargs):
            return self.plan(args, kwargs)
        several = len(lead_of(args, kwargs or {})) > 1
        if self.in_place and several:
            refuse_unwritable(args[0])
            if not forgotten(args[0], self.func):
                return in_turn(self.func, args, kwargs)
        shared = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *(kwargs or {}).values()))
        out = (each(self.func) if shared else self.plan)(args, kwargs)
        if several and not self.in_place:
            pass_none_on(out)
        return out


class _ByMesh:
    """A call whose elements live on several meshes, or on none: one call for each."""

    __slots__ = ("func", "places")

    def __init__(self, func: Callable, places: dict[Any, list[int]]) -> None:
        self.func, self.places = func, places

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        length = sum(map(len, self.places.values()))
        results: list[Any] = [None] * length
        for mesh, group in self.places.items():
            part = tuple(_part(arg, group, length, mesh) for arg in args)
            named = {name: _part(arg, group, length, mesh) for name, arg in (kwargs or {}).items()}
            out = self.func(*part, **named)
            for at, result in zip(group, out or ()):
                results[at] = result
        return returned(self.func, args, kwargs, results)


def _part(argument: Any, group: Sequence[int], length: int, mesh: Mesh | None) -> Any:
    """The elements of a list that are on one mesh; a number that is on another mesh comes over to this one."""
    if isinstance(argument, (list, tuple)) and len(argument) == length:
        return [argument[at] for at in group]
    if isinstance(argument, DTensor) and argument._layout.mesh is not mesh:
        number = argument.full_tensor()
        return number if mesh is None else DTensor.from_local(number, mesh)
    return argument


class _Reduced:
    """A list call that reduces each element to a number. What is then pending depends on the order of a norm, which is
    a float: there is a plan for each."""

    __slots__ = ("func", "movers", "plans", "wanted")

    def __init__(self, func: Callable, movers: list[Mover | None], wanted: list[Layout]) -> None:
        self.func, self.movers, self.wanted = func, movers, wanted
        self.plans: dict[tuple[float | None, bool], Plan] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        kind = REDUCING[list_name(self.func)]
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in args[0])
        order = float((kwargs or {}).get("ord", args[1] if len(args) > 1 else 2)) if kind == "norm" else None
        plan = self.plans.get((order, needs_gradients))
        if plan is None:
            while len(self.plans) >= 8:
                del self.plans[next(iter(self.plans))]
            plan = self.plans[order, needs_gradients] = self._plan(kind, order, needs_gradients)
        return plan(args, kwargs)

    def _plan(self, kind: str, order: float | None, needs_gradients: bool) -> Plan:
        extremum = kind == "max" or (order is not None and (math.isinf(order) or order < 0))
        empty = any(layout.has_empty or not layout.numel for layout in self.wanted)
        split = any(layout.split_axes for layout in self.wanted)
        if (extremum and empty) or (needs_gradients and kind != "sum" and split):
            return each(self.func)  # an empty shard has no extremum; only terms of a sum have gradients of their own
        pending = Partial("norm", order) if order is not None else Partial(kind)
        layouts = [_reduced(layout, pending) for layout in self.wanted]
        return Whole(self.func, self.movers, layouts, [None] * len(layouts), self.wanted[0].mesh)


def _reduced(layout: Layout, pending: Partial) -> Layout:
    return Layout(
        layout.mesh, (), (), [pending if axis in layout.split_axes else None for axis in range(layout.mesh.ndim)]
    )


class _InPlace:
    """An in-place list call: the results are the arguments. Every rank's shards are written to themselves: the graph of
    a write to aliases is another where a tensor is in the list twice."""

    __slots__ = ("func", "mesh", "movers")

    def __init__(self, func: Callable, movers: list[Mover | None], mesh: Mesh) -> None:
        self.func, self.movers, self.mesh = func, movers, mesh

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        written = {id(x) for x in lead_of(args, kwargs or {})} if self.mesh.device_type != "meta" else ()
        movers = iter(self.movers)

        def shards(x: Tensor) -> Tensor:
            mover = next(movers)
            y = mover(x) if mover is not None else x
            return y if id(y) in written or y.__class__ is not DTensor else localise(y)

        with _disabled():
            local = map_tensors(args, shards), map_tensors(kwargs or {}, shards)
            for rank in range(len(self.mesh.held)):
                mine = [map_tensors(tree, partial(_of_rank, rank)) for tree in local]
                self.func(*mine[0], **mine[1])
        return returned(self.func, args, kwargs, ())


def _of_rank(rank: int, x: Tensor) -> Tensor:
    held = shards_of(x)
    return held[rank] if len(held) > 1 else x


def _direct_in_place(func: Callable) -> Plan:
    """The function itself on the shards: what it returns is the list that it was given, or nothing."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        with _disabled():
            return func(*args, **kwargs) if kwargs else func(*args)

    return run


class _Unscale:
    """Gradients divided by a loss scale, in place. Infinities found on any rank are found on all."""

    __slots__ = ("func", "group")

    def __init__(self, func: Callable, mesh: Mesh) -> None:
        self.func, self.group = func, Group(mesh, tuple(range(mesh.ndim)), ())

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> None:
        grads, found, scale = (*args, *(kwargs or {}).values())
        grads, scale = [localise(x) for x in grads], _local(scale)
        here = _local(found) * grads[0].new_ones((), dtype=torch.float32)  # one for each rank
        self.func(grads, here, scale)
        anywhere = self.group.reduce(here, "max")
        with _disabled():
            for target, value in zip(shards_of(found), shards_of(anywhere)):
                target.copy_(value)


def _local(x: Tensor) -> Tensor:
    return localise(x) if isinstance(x, DTensor) else x
