"""What a function reaches beside its arguments: modules, optimizers and numbers, in its closure or its globals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn, optim
from torch.utils._pytree import keystr, tree_flatten_with_path

Slot = tuple[Any, Any]
"""A dict, or a list, and a key of it."""

PLAIN = (bool, int, float, str, type(None))
"""Types of values that a program is captured for."""


class Found(NamedTuple):
    """Something that a function reaches: where it would look for it, what is there, and what a person would call it,
    `model.head.weight` say."""

    slot: Slot
    value: Any
    name: str


@dataclass
class Reached:
    """What is found where. Modules and optimizers are looked into; other objects for their attributes."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, optim.Optimizer] = field(default_factory=dict)
    objects: list[Found] = field(default_factory=list)
    """Modules, optimizers and tensors."""
    values: list[Found] = field(default_factory=list)
    """Numbers and other plain values."""
    names: dict[int, str] = field(default_factory=dict)
    """Of modules and optimizers."""
    codes: list[CodeType] = field(default_factory=list)
    """Of the functions that are the user's."""
    _seen: set[int] = field(default_factory=set)

    @staticmethod
    def by(function: Callable[..., Any], leaves: Sequence[Any], names: Sequence[str] | None = None) -> Reached:
        """What a function reaches that is called with such leaves, which have such names."""
        found = Reached()
        for number, leaf in enumerate(leaves):
            found._object(leaf, f"argument {number}" if names is None else names[number])
        found._function(function)
        return found

    def _function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
            for name, value in given.items():
                self._object(value, f"partial({name})")
            self._function(function.func)
        elif isinstance(function, MethodType):
            bound = function.__self__
            self._object(bound, "" if isinstance(bound, nn.Module) else "self")
            self._function(function.__func__)
        elif isinstance(function, FunctionType) and id(function) not in self._seen and not _is_library(function):
            self._seen.add(id(function))
            self.codes.append(function.__code__)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._slot((_Cell(cell), 0), name)
            for name in _names(function.__code__):
                if name in function.__globals__:
                    self._slot((function.__globals__, name), name)
        elif isinstance(function, nn.Module):
            self._object(function, "")

    def _slot(self, slot: Slot, name: str) -> None:
        try:
            value = slot[0][slot[1]]
        except ValueError:  # a variable without a value
            return
        if isinstance(value, PLAIN):
            self.values.append(Found(slot, value, name))
        elif isinstance(value, (nn.Module, optim.Optimizer, Tensor)):
            self.objects.append(Found(slot, value, name))
            self._object(value, name)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            if not _is_library(value):
                self._function(value)
        else:
            self._object(value, name)

    def _object(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, (Tensor, type)):
            return
        if isinstance(value, nn.Module):
            self._seen.add(id(value))
            self._module(value, name)
        elif isinstance(value, optim.Optimizer):
            self._seen.add(id(value))
            self.optimizers[id(value)] = value
            self.names[id(value)] = name
        elif isinstance(value, (list, tuple, Mapping)):
            self._seen.add(id(value))
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                self._item((value, key), item, f"{name}[{key!r}]")
        elif isinstance(value, set):
            self._seen.add(id(value))
            for item in value:
                self._object(item, f"{name}{{…}}")
        elif hasattr(value, "__dict__") and not _is_library(value):
            self._seen.add(id(value))
            for key in value.__dict__:
                self._slot((value.__dict__, key), _joined(name, key))

    def _item(self, slot: Slot, item: Any, name: str) -> None:
        if isinstance(item, Tensor):
            self.objects.append(Found(slot, item, name))
        else:
            self._object(item, name)

    def _module(self, module: nn.Module, name: str) -> None:
        for path, inner in module.named_modules():
            if id(inner) in self.modules:
                continue
            here = _joined(name, path)
            self.modules[id(inner)], self.names[id(inner)] = inner, here
            for kept in (inner._parameters, inner._buffers):
                tensors = [(key, value) for key, value in kept.items() if value is not None]
                self.objects += [Found((kept, key), value, _joined(here, key)) for key, value in tensors]
            if not _is_library(inner):
                self._function(type(inner).forward)
                settings = [(key, value) for key, value in inner.__dict__.items() if _is_setting(key, value)]
                self.values += [Found((inner.__dict__, key), value, _joined(here, key)) for key, value in settings]


def leaf_names(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """What a function calls the leaves of its arguments: `batch['tokens']`, or `args[0]` where it has no name for one.

    >>> leaf_names(lambda model, batch: None, (None, {"tokens": 1}), {})
    ['model', "batch['tokens']"]
    """
    bound: Any = getattr(function, "__self__", None)
    function = (
        bound.forward if isinstance(bound, nn.Module) else function
    )  # a module is called by a function of torch's
    named = [name for name, _ in zip(_positional(function), args)]
    roots = [*named, *(f"args[{number}]" for number in range(len(named), len(args)))]
    found = []
    for number, root in enumerate(roots):
        found += [f"{root}{keystr(path)}" for path, _ in tree_flatten_with_path(args[number])[0]]
    for key, value in kwargs.items():
        found += [f"{key}{keystr(path)}" for path, _ in tree_flatten_with_path(value)[0]]
    return found


def _positional(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a function that may be given by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C++
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


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
