"""Calls that name all their arguments: `torch.select(input=x, dim=0, index=2)`.

Much depends on the first tensor of a call (what a view is a view of, what is written to), and it is looked for where it
mostly is. So the first arguments are put where they belong, in the order of the op's schema or of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

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


def parameter_names(func: Any) -> list[str]:
    """The names of a function's first parameters, methods of tensors included, as far as they are known."""
    if (found := _leading_parameters(func)) or not hasattr(torch.ops.aten, getattr(func, "__name__", "")):
        return [names[-1] for names in found]
    return [name for (name,) in _agreed(_schemas(getattr(torch.ops.aten, func.__name__)))]


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
