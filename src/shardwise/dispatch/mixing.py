"""A plain tensor among DTensors: what is said about it, the call and the argument by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from shardwise.dispatch.fallback import shown
from shardwise.dispatch.names import argument_names
from shardwise.errors import MixedTensorError
from shardwise.tensor import DTensor


def mixed(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> MixedTensorError:
    """Names the first plain tensor of a call, and the two ways to make it a DTensor."""
    named = [*zip(argument_names(func, args), args, strict=True), *_given(func, kwargs or {})]
    call = f"{_name(func)}({', '.join(f'{name}: {shown(value, kinds=True)}' for name, value in named)})"
    plain = next((path for name, value in named for path in _plain(name, value)), "?")
    return MixedTensorError(
        f"{call}: argument '{plain}' is a plain torch.Tensor, and how it lies on the mesh is unknown. Make it a "
        f"DTensor with shardwise.distribute_tensor(tensor, mesh, placements), or, if every rank holds the same values, "
        f"run the call inside shardwise.experimental.implicit_replication()"
    )


def _given(func: Callable, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the user is likely to have written: torch's functions in Python pass their defaults on as well."""
    inner = inspect.unwrap(func)
    known = inspect.signature(inner).parameters if inspect.isfunction(inner) else {}
    return [(name, x) for name, x in kwargs.items() if name not in known or not _same(x, known[name].default)]


def _same(x: Any, default: Any) -> bool:
    return type(x) is type(default) and x == default


def _name(func: Callable) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


def _plain(path: str, value: Any) -> Iterator[str]:
    """Where in an argument there are plain tensors that have dims."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim():
        yield path
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _plain(f"{path}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _plain(f"{path}[{key!r}]", item)
