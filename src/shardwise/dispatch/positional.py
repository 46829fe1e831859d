"""Calls that name all their arguments: `torch.select(input=x, dim=0, index=2)`.

Much depends on the first tensor of a call (what a view is a view of, what is written to), and it is looked for where it
mostly is. So the first arguments are put where they belong, in the order of the op's schema or of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Named = dict[str, Any]


def by_position(func: Callable, kwargs: Named) -> tuple[tuple, Named]:
    """The same call, with the arguments that come first by position."""
    if func not in _leading:
        if len(_leading) >= MOST:
            _leading.clear()
        _leading[func] = _leading_parameters(func)
    args, rest = [], dict(kwargs)
    for names in _leading[func]:
        name = next((name for name in names if name in rest), None)
        if name is None:
            break
        args.append(rest.pop(name))
    return tuple(args), rest


_leading: dict[Any, list[tuple[str, ...]]] = {}
MOST = 4096


def _leading_parameters(func: Callable) -> list[tuple[str, ...]]:
    """The names of the first parameters, in their order, as far as all overloads agree on it."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _agreed(_schemas(func))
    if inspect.isfunction(func):
        kinds = inspect.Parameter
        parameters = list(inspect.signature(func, follow_wrapped=False).parameters.values())
        if any(p.kind in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY) for p in parameters):
            return []
        return [(p.name,) for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if packet is None or not inspect.isbuiltin(func):
        return []
    return [(name, "input") if name == "self" else (name,) for (name,) in _agreed(_schemas(packet))]


def argument_names(func: Callable, args: Sequence[Any]) -> list[str]:
    """What the arguments that a call gives by position are called, for its user to read."""
    known = _OF_METHODS.get(getattr(func, "__name__", ""))
    if known is None and inspect.isfunction(func):
        inner = inspect.unwrap(func)  # of operators (`x ** 2`) a method in C++, which has a schema but no signature
        if not inspect.isfunction(inner):
            return argument_names(inner, args)
        known = [p.name for p in inspect.signature(inner).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    if known is None:
        known = next((names for schema in _overloads(func) if (names := _names_for(schema, args))), [])
        if inspect.isbuiltin(func) and not func.__name__.startswith("_"):
            known = ["input" if name == "self" else name for name in known]
    return [*known, *(str(i + 1) for i in range(len(known), len(args)))][: len(args)]


_OF_METHODS = {
    "__getitem__": ["self", "index"],
    "__setitem__": ["self", "index", "value"],
    "map_": ["self", "tensor", "callable"],
    "map2_": ["self", "x", "y", "callable"],
}
"""No ops, so without a schema."""


def _names_for(schema: Any, args: Sequence[Any]) -> list[str]:
    """The names of a schema's parameters; none if it is not for these arguments."""
    parameters = [a for a in schema.arguments if not a.kwarg_only]
    fits = len(parameters) >= len(args) and all(
        "Tensor" in str(parameter.type) for parameter, x in zip(parameters, args) if _holds_tensors(x)
    )
    return [parameter.name for parameter in parameters] if fits else []


def _holds_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (list, tuple)) and any(isinstance(item, Tensor) for item in x))


def _overloads(func: Callable) -> list[Any]:
    """The schemas of an op, or of the op that a function or a method (`__eq__`) is named after."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _schemas(func)
    name = getattr(func, "__name__", "")
    found = (getattr(torch.ops.aten, name, None), getattr(torch.ops.aten, name.strip("_"), None))
    return next((_schemas(op) for op in found if isinstance(op, torch._ops.OpOverloadPacket)), [])


def _schemas(op: Any) -> list[Any]:
    found = [op._schema] if isinstance(op, torch._ops.OpOverload) else [getattr(op, o)._schema for o in op.overloads()]
    return [schema for schema in found if any("Tensor" in str(argument.type) for argument in schema.arguments)]


def _agreed(schemas: Sequence[Any]) -> list[tuple[str, ...]]:
    orders = [[a.name for a in schema.arguments if not a.kwarg_only] for schema in schemas]
    found: list[tuple[str, ...]] = []
    for names in zip(*orders, strict=False):
        if len(set(names)) > 1:
            break
        found.append((names[0],))
    return found
