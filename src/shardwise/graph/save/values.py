"""The values that programs are made of, as JSON and back. They are a closed set, and reading one runs nothing.

A value that JSON has is itself. Any other is an object of one key, which says what it is: `{"dtype": "float32"}`,
`{"tuple": [...]}`, `{"Output": [0, 3]}`. Values that come again and again (facts, lines, layouts, collectives) are
written once, in a list, and then named by their number in it: `{"shared": 12}`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from shardwise.comm import running_mesh
from shardwise.comm.record import Comm
from shardwise.dispatch.planning.randomness import draw_seed
from shardwise.errors import SavedProgramError
from shardwise.graph.capture.numbers import FUNCTIONS
from shardwise.graph.nodes import Check, Collective, Draw, Seeded, Start, recurrent_layer, wait
from shardwise.graph.passes.report import PassReport, Traffic
from shardwise.graph.program import (
    Differentiable,
    Facts,
    FromArgument,
    FromGradient,
    FromHost,
    FromSaved,
    FromTangent,
    Given,
    Gradient,
    Leaf,
    Line,
    Output,
    Result,
)
from shardwise.layout import Layout, Partial
from shardwise.rules.kit.agreement import Refusal
from shardwise.rules.kit.indices import Bound

RECORDS: dict[str, type] = {
    cls.__qualname__: cls
    for cls in (
        *(Bound, Check, Collective, Comm, Differentiable, Facts, FromArgument, FromGradient, FromHost, FromSaved),
        *(FromTangent, Given, Gradient, Leaf, Line, Output, Partial, PassReport, Refusal, Result, Seeded),
        *(Start, Traffic),
    )
}
"""Values that are written as their fields, in order."""

NO_PROGRAM = "the file holds what is no program"
"""Said of files that somebody else made."""

_SHARED = (Collective, Comm, Facts, Layout, Line)
_NAMED_FUNCTIONS = {f"{function.__module__}.{function.__name__}": function for function in FUNCTIONS}
_NAMED_FUNCTIONS |= {"operator.getitem": operator.getitem, "wait": wait, "recurrent_layer": recurrent_layer}
_FUNCTION_NAMES = {function: name for name, function in _NAMED_FUNCTIONS.items()}
_OF_TORCH = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
_KINDS = {kind.__name__: kind for kind in (bool, int, float)}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class Writer:
    """Writes values. What only means something in this process is written by `refer`: tensors, optimizers, meshes."""

    def __init__(self, refer: Callable[[Any], Any]) -> None:
        self.refer = refer
        self.shared: list[Any] = []
        self.nodes: dict[fx.Node, int] = {}
        self._numbers: dict[Any, int] = {}

    def write(self, x: Any) -> Any:
        match x:
            case None | bool() | str():
                return x
            case int() if type(x) is int:
                return x
            case float():
                return x if math.isfinite(x) else {"float": repr(x)}
            case fx.Node():
                return {"node": self.nodes[x]}
            case list():
                return [self.write(item) for item in x]
        if isinstance(x, _SHARED):
            return {"shared": self._share(x)}
        return self._tagged(x)

    def _share(self, x: Any) -> int:
        x = x.on(running_mesh(x.mesh)) if isinstance(x, Layout) else x
        uncompared = [getattr(x, field.name) for field in fields(x) if not field.compare] if is_dataclass(x) else []
        key = x, *uncompared  # equal values need not be written alike
        if key not in self._numbers:
            self.shared.append(self._tagged(x))
            self._numbers[key] = len(self.shared) - 1
        return self._numbers[key]

    def _tagged(self, x: Any) -> dict[str, Any]:
        match x:
            case torch.Size():
                return {"size": list(x)}
            case tuple():
                return {"tuple": [self.write(item) for item in x]}
            case dict():
                return {"dict": [[self.write(key), self.write(value)] for key, value in x.items()]}
            case frozenset():
                return {"set": [self.write(item) for item in sorted(x)]}
            case complex():
                return {"complex": [x.real, x.imag]}
            case slice() | range():
                return {type(x).__name__: self.write([x.start, x.stop, x.step])}
            case torch.device():
                return {"device": x.type}  # which one of its kind is this process's to say
            case Layout():
                return {"Layout": self.write([x.mesh, x.shape, x.splits, x.pending, x.sizes, x.reduced])}
            case torch._ops.OpOverload():
                return {"op": str(x)}
            case Draw():
                _check_generator(x)
                return {"draw": None}
            case MethodType(__self__=Bound() as bound):
                return {"refusal": self.write(bound)}
        for name, kind in _OF_TORCH.items():
            if isinstance(x, kind):
                return {name: str(x).removeprefix("torch.")}
        if isinstance(x, type) and x in _KINDS.values():
            return {"kind": x.__qualname__}
        if isinstance(x, (type, FunctionType, BuiltinFunctionType)) and x in _FUNCTION_NAMES:
            return {"function": _FUNCTION_NAMES[x]}
        if is_dataclass(x) and RECORDS.get(type(x).__name__) is type(x):
            return {type(x).__name__: [self.write(getattr(x, field.name)) for field in fields(x)]}
        return self.refer(x)


def _check_generator(x: Draw) -> None:
    """Seeds are drawn from torch's own generator, or it cannot be said from which."""
    if getattr(x.draw, "func", None) is not draw_seed or any(x.draw.args):  # type: ignore[attr-defined]
        raise SavedProgramError("a program that draws from a torch.Generator of its own cannot be saved")


class Reader:
    """Reads what a `Writer` has written. `find` knows what only means something in this process, by its tag."""

    def __init__(self, shared: Sequence[Any], find: Callable[[str, Any], Any]) -> None:
        self.find = find
        self.nodes: list[fx.Node] = []
        self._written = shared
        self._shared: dict[int, Any] = {}

    def read(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self.read(item) for item in x]
        if not isinstance(x, dict):
            return x
        ((tag, value),) = x.items()
        if tag == "shared":
            if value not in self._shared:
                self._shared[value] = self.read(self._written[value])
            return self._shared[value]
        if tag == "node":
            return self.nodes[value]
        return self._tagged(tag, value)

    def _tagged(self, tag: str, value: Any) -> Any:
        match tag:
            case "tuple":
                return tuple(self.read(value))
            case "size":
                return torch.Size(value)
            case "dict":
                return dict(self.read(value))
            case "set":
                return frozenset(self.read(value))
            case "float":
                return float(value)
            case "complex":
                return complex(*value)
            case "slice":
                return slice(*self.read(value))
            case "range":
                return range(*self.read(value))
            case "Layout":
                *facts, reduced = self.read(value)
                return Layout(*facts, reduced=reduced)
            case "op":
                return _op(value)
            case "function":
                return _NAMED_FUNCTIONS[value]
            case "device":
                return torch.device(value)
            case "kind":
                return _KINDS[value]
            case "draw":
                return Draw(partial(draw_seed, None))
            case "refusal":
                return self.read(value)._refuse
        if tag in _OF_TORCH:
            return _of_torch(tag, value)
        if tag in RECORDS:
            return _checked(RECORDS[tag](*self.read(value)))
        return self.find(tag, value)


def _checked(record: Any) -> Any:
    """A record that may be read. A collective runs that method of a port which is called as its kind, so no other."""
    if isinstance(record, Collective) and record.kind not in _COLLECTIVES:
        raise SavedProgramError(f"{NO_PROGRAM}: a collective {record.kind!r}")
    return record


def _of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _OF_TORCH[kind]):
        raise SavedProgramError(f"torch.{name} is no {kind} in this version of torch")
    return found


def _op(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        op = None
    if not isinstance(op, torch._ops.OpOverload):
        raise SavedProgramError(f"the program calls {name}, which this process does not know: import what registers it")
    return op
