"""`_foreach_*` and `_fused_*`: one call for many tensors. Each element is on its own; all run in the one local call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.build import Whole, runs_in_cpp
from shardwise.dispatch.plan import Mover, Plan, direct_in_place, direct_list
from shardwise.dispatch.trace import flat_tensors
from shardwise.errors import InPlaceError
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import plan_moves
from shardwise.rules.foreach import REDUCING
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass


def plan_list_call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Bring the lists into the layouts of the first one, element by element, and run the call as it is."""
    name = func.__name__
    in_place = name.endswith("_")
    lead = list(args[0])
    wanted = [_target(x, in_place, name) for x in lead]
    movers: list[Mover | None] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            tensors = flat_tensors(argument)
            targets = wanted if len(tensors) == len(lead) else [None] * len(tensors)
            movers += [_mover(x, target) for x, target in zip(tensors, targets, strict=True)]
        elif isinstance(argument, Tensor):
            movers.append(_mover(argument, _whole(argument)))
    if name in REDUCING:
        return _Reduced(func, movers, wanted)
    layouts, mesh = wanted, wanted[0].mesh
    if not any(movers) and runs_in_cpp(mesh):
        return direct_in_place(func) if in_place else direct_list(func, layouts)
    if in_place:
        return _InPlace(func, movers, mesh)
    return Whole(func, movers, layouts, [None] * len(wanted), mesh)


def _whole(x: Tensor) -> Layout | None:
    return Layout(x._layout.mesh, x._layout.shape) if isinstance(x, DTensor) else None


def _target(x: Tensor, in_place: bool, name: str) -> Layout:
    layout = x._layout if isinstance(x, DTensor) else None
    if layout is None:
        raise InPlaceError(f"{name} mixes plain tensors and DTensors in one list; distribute the plain ones first")
    settled = layout.with_(pending=[None] * layout.mesh.ndim)
    if in_place and settled is not layout and name not in ("_foreach_zero_",):
        raise InPlaceError(f"{name} cannot write to a tensor that lies as {layout}; redistribute it first")
    return layout if name == "_foreach_zero_" else settled


def _mover(x: Tensor, target: Layout | None) -> Mover | None:
    """How an element comes to lie like its partner; plain tensors and scalars of other shapes stay as they are."""
    if not isinstance(x, DTensor) or target is None or x._layout is target:
        return None
    if x._layout.shape != target.shape:
        target = Layout(x._layout.mesh, x._layout.shape)
    moves = plan_moves(x._layout, target)
    return Mover(moves) if moves else None


class _Reduced:
    """A list call that reduces each element to a number. What is then pending depends on the order of a norm, which is
    a float: there is a plan for each."""

    __slots__ = ("func", "movers", "plans", "wanted")

    def __init__(self, func: Callable, movers: list[Mover | None], wanted: list[Layout]) -> None:
        self.func, self.movers, self.wanted = func, movers, wanted
        self.plans: dict[float | None, Plan] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        order = None
        if self.func.__name__ == "_foreach_norm":
            order = float((kwargs or {}).get("ord", args[1] if len(args) > 1 else 2))
        plan = self.plans.get(order)
        if plan is None:
            while len(self.plans) >= 8:
                del self.plans[next(iter(self.plans))]
            plan = self.plans[order] = self._plan(order)
        return plan(args, kwargs)

    def _plan(self, order: float | None) -> Plan:
        extremum = order is None or math.isinf(order)
        if extremum and any(0 in layout.pieces(dim) for layout in self.wanted for dim in range(len(layout.shape))):
            return _one_by_one(order)  # an empty shard has no extremum
        pending = Partial("max") if order is None else Partial("norm", order)
        layouts = [_reduced(layout, pending) for layout in self.wanted]
        return Whole(self.func, self.movers, layouts, [None] * len(layouts), self.wanted[0].mesh)


def _one_by_one(order: float | None) -> Plan:
    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if order is None:
            return [torch.max(x) for x in args[0]]
        return [torch.linalg.vector_norm(x, order, dtype=(kwargs or {}).get("dtype")) for x in args[0]]

    return run


def _reduced(layout: Layout, pending: Partial) -> Layout:
    split = {axis for axes in layout.splits for axis in axes}
    return Layout(layout.mesh, (), (), [pending if axis in split else None for axis in range(layout.mesh.ndim)])


class _InPlace:
    """An in-place list call: the results are the arguments."""

    __slots__ = ("plan",)

    def __init__(self, func: Callable, movers: list[Mover | None], mesh: Mesh) -> None:
        self.plan = Whole(func, movers, [], [], mesh)

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        self.plan.run(args, kwargs)
        return None
