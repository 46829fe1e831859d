"""What a function reaches beside its arguments: modules, optimizers and numbers, in its closure or its globals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn, optim

Slot = tuple[Any, Any]
"""A dict and a key of it."""

PLAIN = (bool, int, float, str, type(None))
"""Types of values that a program is captured for."""


@dataclass
class Reached:
    """What is found where. Modules and optimizers are looked into; other objects for their attributes."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, optim.Optimizer] = field(default_factory=dict)
    objects: list[tuple[Slot, Any]] = field(default_factory=list)
    """Modules, optimizers and tensors, with where a function would look for them."""
    values: list[tuple[Slot, Any]] = field(default_factory=list)
    """Numbers and other plain values, likewise."""
    _seen: set[int] = field(default_factory=set)

    @staticmethod
    def by(function: Callable[..., Any], leaves: Sequence[Any]) -> Reached:
        found = Reached()
        for leaf in leaves:
            found._object(leaf)
        found._function(function)
        return found

    def _function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self._object(value)
            self._function(function.func)
        elif isinstance(function, MethodType):
            self._object(function.__self__)
            self._function(function.__func__)
        elif isinstance(function, FunctionType) and id(function) not in self._seen and not _is_library(function):
            self._seen.add(id(function))
            for cell in function.__closure__ or ():
                self._slot((_Cell(cell), 0))
            for name in _names(function.__code__):
                if name in function.__globals__:
                    self._slot((function.__globals__, name))
        elif isinstance(function, nn.Module):
            self._object(function)

    def _slot(self, slot: Slot) -> None:
        try:
            value = slot[0][slot[1]]
        except ValueError:  # a variable without a value
            return
        if isinstance(value, PLAIN):
            self.values.append((slot, value))
        elif isinstance(value, (nn.Module, optim.Optimizer, Tensor)):
            self.objects.append((slot, value))
            self._object(value)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            if not _is_library(value):
                self._function(value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (Tensor, type)):
            return
        if isinstance(value, nn.Module):
            self._seen.add(id(value))
            self._module(value)
        elif isinstance(value, optim.Optimizer):
            self._seen.add(id(value))
            self.optimizers[id(value)] = value
        elif isinstance(value, (list, tuple, set)):
            self._seen.add(id(value))
            for item in value:
                self._object(item)
        elif isinstance(value, Mapping):
            self._seen.add(id(value))
            for item in value.values():
                self._object(item)
        elif hasattr(value, "__dict__") and not _is_library(value):
            self._seen.add(id(value))
            for name in value.__dict__:
                self._slot((value.__dict__, name))

    def _module(self, module: nn.Module) -> None:
        for inner in module.modules():
            if id(inner) in self.modules:
                continue
            self.modules[id(inner)] = inner
            for kept in (inner._parameters, inner._buffers):
                self.objects += [((kept, name), value) for name, value in kept.items() if value is not None]
            if not _is_library(inner):
                self._function(type(inner).forward)
                own = inner.__dict__.items()
                self.values += [((inner.__dict__, name), value) for name, value in own if _is_setting(name, value)]


class _Cell:
    """A variable of a closure, as a dict of one."""

    __slots__ = ("cell",)

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, _: Any) -> Any:
        return self.cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, PLAIN) and not name.startswith("_") and name != "training"


def _is_library(value: Any) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return (module or "").split(".")[0] in ("torch", "shardwise", "builtins", "numpy", "transformers")
