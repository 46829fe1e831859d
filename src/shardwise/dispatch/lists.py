"""`_foreach_*` and `_fused_*`: one call for many tensors. Each element is on its own; all run in the one local call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.build import Whole
from shardwise.dispatch.plan import Mover, Plan
from shardwise.dispatch.trace import flat_tensors
from shardwise.errors import InPlaceError
from shardwise.layout import Layout, Partial
from shardwise.redistribute import plan_moves
from shardwise.rules.foreach import REDUCING
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass


def plan_list_call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Bring the lists into the layouts of the first one, element by element, and run the call as it is."""
    name = func.__name__
    in_place = name.endswith("_")
    lead = [x for x in args[0]]
    wanted = [_target(x, in_place, name) for x in lead]
    movers: list[Mover | None] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            tensors = flat_tensors(argument)
            targets = wanted if len(tensors) == len(lead) else [None] * len(tensors)
            movers += [_mover(x, target) for x, target in zip(tensors, targets, strict=True)]
        elif isinstance(argument, Tensor):
            movers.append(_mover(argument, _whole(argument)))
    if in_place:
        return _InPlace(func, movers)
    return Whole(func, movers, [_result(layout, name, args, kwargs) for layout in wanted], [None] * len(wanted))


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


def _result(layout: Layout, name: str, args: tuple, kwargs: dict[str, Any]) -> Layout:
    if name not in REDUCING:
        return layout
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    pending = Partial("norm", float(order)) if name == "_foreach_norm" else Partial("max")
    split = {axis for axes in layout.splits for axis in axes}
    return Layout(layout.mesh, (), (), [pending if axis in split else None for axis in range(layout.mesh.ndim)])


class _InPlace:
    """An in-place list call: the results are the arguments."""

    __slots__ = ("plan",)

    def __init__(self, func: Callable, movers: list[Mover | None]) -> None:
        self.plan = Whole(func, movers, [], [])

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        self.plan.run(args, kwargs)
        return None
