"""Plans in full generality: a function on the shards with any arguments and results, and a call step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.dispatch.plan import Mover, mover_for, runs_in_cpp, wrap_fresh
from shardwise.dispatch.planning.lower import Lowered
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.layout import Layout, Mesh
from shardwise.local import is_leaf, spread
from shardwise.redistribute import Move, in_place, run_path, run_together
from shardwise.rules import Value
from shardwise.tensor import DTensor, localise

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


class Whole:
    """The function itself on the shards, in full generality: nested arguments, several results, the simulator,
    functions in Python. `plain` says that the function must see plain local tensors, not DTensors."""

    __slots__ = ("function", "is_direct", "labels", "layouts", "mesh", "movers", "plain", "returned")

    def __init__(
        self,
        function: Callable,
        movers: list[Mover | None],
        layouts: list[Layout],
        returned: list[int | None],
        mesh: Mesh,
        plain: bool = False,
    ) -> None:
        self.mesh = mesh
        self.plain = plain or not runs_in_cpp(mesh)
        self.function = function
        self.movers = movers
        self.layouts = layouts
        self.returned = returned
        self.is_direct = not self.plain and not any(movers) and not any(at is not None for at in returned)

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if self.is_direct:
            return self._direct(args, kwargs)
        out, originals = self.run(args, kwargs)
        with _disabled():
            return self._wrapped(out, originals)

    def _direct(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        """Nothing moves, and every result is fresh: of long lists each step counts."""
        with _disabled():
            out = self.function(*args, **kwargs or {})
            if out.__class__ is list or out.__class__ is tuple:
                return out.__class__(map(wrap_fresh, out, self.layouts))
            return self._wrapped(out, [])

    def run(self, args: tuple, kwargs: dict[str, Any] | None) -> tuple[Any, list[Tensor]]:
        """The local results, and the tensor arguments as they came."""
        originals: list[Tensor] = []
        movers = iter(self.movers)

        def localised_argument(x: Tensor) -> Tensor:
            originals.append(x)
            mover = next(movers)
            y = mover(x) if mover is not None else x
            return _as_local(y, self.mesh) if self.plain else y

        with _disabled():
            local_args = tuple(map_tensors(arg, localised_argument) for arg in args)
            local_kwargs = map_tensors(kwargs, localised_argument) if kwargs else {}
        if self.plain:
            return self.function(*local_args, **local_kwargs), originals
        with _disabled():
            return self.function(*local_args, **local_kwargs), originals

    def _wrapped(self, out: Any, originals: list[Tensor]) -> Any:
        results = iter(zip(self.layouts, self.returned, strict=True))

        def wrap(x: Tensor) -> Tensor:
            layout, argument = next(results)
            if argument is not None and originals[argument].__class__ is DTensor:
                if originals[argument] is x or type(x) is Ranked or self.mesh.device_type == "meta":
                    return originals[argument]
            return wrap_fresh(x, layout)

        return map_tensors(out, wrap)


def _as_local(x: Tensor, mesh: Mesh) -> Tensor:
    """An argument as a local tensor that Python may see. One that came plain is every rank's, and has one gradient."""
    return localise(x) if x.__class__ is DTensor else x if x.__class__ is Ranked else spread(x, mesh)


# Step by step


class MoveStep:
    """Bring an interior value into another layout; one that is `fresh`, and was never seen, may be overwritten."""

    __slots__ = ("moves", "run", "source", "target")

    def __init__(self, source: int, target: int, moves: tuple[Move, ...], *, fresh: bool = False) -> None:
        self.source, self.target, self.moves = source, target, moves
        self.run = in_place(moves[0]) if fresh and len(moves) == 1 else partial(run_path, moves=moves)

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        slots[self.target] = self.run(slots[self.source])


class MoveArgument:
    """Bring an argument into another layout, sharing the move with other uses of it."""

    __slots__ = ("mover", "moves", "source", "target")

    def __init__(self, source: int, target: int, moves: tuple[Move, ...]) -> None:
        self.source, self.target, self.moves, self.mover = source, target, moves, mover_for(moves)

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        x = originals[self.source]
        y = self.mover(x)
        slots[self.target] = slots[self.source] if y is x else y


class MoveTogether:
    """Bring several operands of a call into other layouts, by one collective."""

    __slots__ = ("arguments", "paths", "steps")

    def __init__(self, steps: Sequence[MoveStep | MoveArgument]) -> None:
        self.steps, self.paths = steps, [step.moves for step in steps]
        self.arguments = [step for step in steps if isinstance(step, MoveArgument)]

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        if any(step.mover.key in originals[step.source].__dict__.get("_moved", ()) for step in self.arguments):
            for step in self.steps:  # another call has moved some of them
                step(slots, originals)
            return
        moved = run_together([slots[step.source] for step in self.steps], self.paths)
        for step, x in zip(self.steps, moved, strict=True):
            slots[step.target] = x
        for step in self.arguments:
            x = originals[step.source]
            if _grad_enabled() and x.requires_grad and not is_leaf(x):
                x.__dict__.setdefault("_moved", {})[step.mover.key] = slots[step.target], x._version, step.moves


class CallStep:
    """Run a local function."""

    __slots__ = ("args", "function", "kwargs", "targets")

    def __init__(self, function: Callable, args: list[Any], kwargs: dict[str, Any], targets: list[int]) -> None:
        self.function, self.args, self.kwargs, self.targets = function, args, kwargs, targets

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        args = [_fill(arg, slots) for arg in self.args]
        kwargs = {name: _fill(arg, slots) for name, arg in self.kwargs.items()}
        out = self.function(*args, **kwargs)
        if isinstance(out, Tensor):
            slots[self.targets[0]] = out
        else:
            for target, tensor in zip(self.targets, flat_tensors(out), strict=True):
                slots[target] = tensor


class Slot:
    """Where an argument of a step is found."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _fill(template: Any, slots: list[Any]) -> Any:
    if template.__class__ is Slot:
        return slots[template.index]
    if template.__class__ is list or template.__class__ is tuple:
        return [_fill(item, slots) for item in template]
    return template


class Steps:
    """A flat list of steps over numbered slots."""

    __slots__ = ("mesh", "num_slots", "output", "outputs", "plain", "returned", "simulated", "steps", "labels")

    def __init__(self, lowered: Lowered) -> None:
        trace = lowered.trace
        self.steps: list[Any] = []
        self.num_slots = len(trace.values) + len(trace.inputs)
        self.mesh = lowered.mesh
        self.simulated = len(lowered.mesh.held) > 1
        self.output = trace.output
        self.plain = not runs_in_cpp(lowered.mesh)
        self.outputs: dict[int, tuple[int, Layout]] = {}
        self.returned: dict[int, int] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        originals = flat_tensors(args)
        if kwargs:
            originals += flat_tensors(kwargs)
        slots: list[Any] = [None] * self.num_slots
        if self.plain:
            slots[: len(originals)] = [_as_local(x, self.mesh) for x in originals]
        else:
            slots[: len(originals)] = originals
        if self.simulated:
            self._run(slots, originals)
        else:
            with _disabled():
                self._run(slots, originals)
        with _disabled():
            return self._result(self.output, slots, originals)

    def _run(self, slots: list[Any], originals: list[Tensor]) -> None:
        for step in self.steps:
            step(slots, originals)

    def _result(self, template: Any, slots: list[Any], originals: list[Tensor]) -> Any:
        if isinstance(template, Value):
            argument = self.returned.get(template.index)
            if argument is not None:
                return originals[argument]
            slot, layout = self.outputs[template.index]
            out = slots[slot]
            return wrap_fresh(out, layout)
        if isinstance(template, list):
            return [self._result(item, slots, originals) for item in template]
        if isinstance(template, tuple):
            items = [self._result(item, slots, originals) for item in template]
            if type(template) is tuple:
                return tuple(items)
            return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
        return template


class ConstantStep:
    """A tensor that the traced function brought along. Every call has its own: it may be written to, or returned."""

    __slots__ = ("mesh", "slot", "tensor")

    def __init__(self, slot: int, tensor: Tensor, mesh: Mesh) -> None:
        self.slot, self.tensor, self.mesh = slot, tensor, mesh

    def __call__(self, slots: list[Any], originals: Sequence[Tensor]) -> None:
        slots[self.slot] = spread(self.tensor.clone(), self.mesh)
