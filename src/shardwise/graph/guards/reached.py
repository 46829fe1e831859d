"""What a function reaches beside its arguments: modules, optimizers and values, in its closure, its globals, its
defaults, and in the attributes and items of objects that these hold.

Attributes count if code that is reached names them. What libraries do is taken to stay as it is, but for what their
modules are set to.
"""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, EllipsisType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.graph.guards.hooks import given_to, hooks_of

Slot = tuple[Any, Any]
"""A dict, or a list, and a key of it."""

PLAIN = (bool, int, float, str, type(None))
"""Types of values that a program is captured for."""

VALUES = (*PLAIN, complex, bytes, enum.Enum, slice, range, EllipsisType, torch.dtype, torch.device, torch.layout)
"""Types of values that count by what they are, not by which object they are."""

CONTAINERS = (list, tuple, deque, Mapping, set, frozenset)

MAX_ITEMS = 256
"""Of longer lists and dicts only the lengths count: they hold data."""

ALWAYS = frozenset({"forward", "backward", "setup_context", "__call__"})
"""Methods that run though no code names them."""

NAMESPACES = (SimpleNamespace, argparse.Namespace)
"""Objects of libraries that hold what users put there."""

_OURS = frozenset({"torch", "shardwise", "numpy", "builtins", "_thread"})
"""Libraries whose objects are known not to be settings."""

_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)


class Found(NamedTuple):
    """Something that a function reaches: where it would look for it, what is there, and what a person would call it,
    `model.head.weight` say."""

    slot: Slot
    value: Any
    name: str


class Sized(NamedTuple):
    """A list or a dict that a function reaches, as long as it was."""

    kept: Any
    length: int
    name: str


def is_value(x: Any) -> bool:
    return isinstance(x, VALUES) or (isinstance(x, tuple) and len(x) <= MAX_ITEMS and all(map(is_value, x)))


def is_same(before: Any, now: Any) -> bool:
    """Whether two things do the same in a program: equal values of one type, or else the same object."""
    return before is now or (is_value(before) and type(before) is type(now) and repr(before) == repr(now))


@dataclass
class Reached:
    """What is found where. Modules and optimizers are looked into; other objects for their attributes."""

    read: frozenset[str] = frozenset()
    """Names of attributes that count."""
    modules: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, optim.Optimizer] = field(default_factory=dict)
    objects: list[Found] = field(default_factory=list)
    """Modules, optimizers and tensors."""
    values: list[Found] = field(default_factory=list)
    """Numbers and other plain values."""
    others: list[Found] = field(default_factory=list)
    """Functions, lists, dicts and whatever else holds something."""
    lengths: list[Sized] = field(default_factory=list)
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Attributes of objects and modules, by their names."""
    names: dict[int, str] = field(default_factory=dict)
    """Of modules and optimizers."""
    iterators: list[str] = field(default_factory=list)
    """Names of iterators of Python's and of libraries', which cannot be asked how far they are."""
    streams: list[tuple[Any, str]] = field(default_factory=list)
    """Streams of random numbers that are not torch's."""
    codes: list[CodeType] = field(default_factory=list)
    """Of the functions that are the user's."""
    _seen: set[Any] = field(default_factory=set)
    _kept: list[Any] = field(default_factory=list)
    """So that ids that were seen stay theirs."""

    @staticmethod
    def by(function: Callable[..., Any], leaves: Sequence[Any], names: Sequence[str] | None = None) -> Reached:
        """What a function reaches that is called with such leaves, which have such names."""
        read: frozenset[str] = frozenset()
        while True:
            found = Reached(read)
            for number, leaf in enumerate(leaves):
                found._object(leaf, f"argument {number}" if names is None else names[number])
            found._function(function)
            now = read.union(*map(_named, found.codes), *map(_named_by_class, map(type, found.modules.values())))
            if now == read:
                return found
            read = now

    def _function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            for number in range(len(function.args)):
                self._slot((function.args, number), f"partial({number})")
            for key in function.keywords:
                self._slot((function.keywords, key), f"partial({key})")
            self._function(function.func)
        elif isinstance(function, MethodType):
            bound = function.__self__
            self._object(bound, "" if isinstance(bound, nn.Module) else "self")
            self._function(function.__func__)
        elif isinstance(function, FunctionType):
            if self._is_new(function) and not is_library(function):
                self._code(function)
        elif hasattr(function, "__wrapped__"):  # cached, or captured by itself
            self._function(function.__wrapped__)
        else:
            self._object(function, "")

    def _code(self, function: FunctionType) -> None:
        self.codes.append(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._slot((Cell(cell), 0), name)
        for name in dict.fromkeys(_names(function.__code__)):
            if name in function.__globals__:
                self._slot((function.__globals__, name), name)
        defaults = function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        for number in range(len(defaults)):
            self._slot((defaults, number), function.__code__.co_varnames[first + number])
        for name in function.__kwdefaults__ or ():
            self._slot((function.__kwdefaults__, name), name)

    def _slot(self, slot: Slot, name: str) -> None:
        try:
            value = slot[0][slot[1]]
        except ValueError:  # a variable without a value
            return
        if not isinstance(slot[0], Cell) and not self._is_new(slot[0], slot[1]):
            return
        if is_value(value):
            self.values.append(Found(slot, value, name))
        elif isinstance(value, (nn.Module, optim.Optimizer, Tensor)):
            self.objects.append(Found(slot, value, name))
            self._object(value, name)
            self._hooks(value)
        elif isinstance(value, CONTAINERS) or callable(value) or not is_library(value):
            self.others.append(Found(slot, value, name))
            is_called = callable(value) and not isinstance(value, type) and not is_library(value)
            self._function(value) if is_called else self._object(value, name)
        else:
            self._object(value, name)

    def _hooks(self, x: Any) -> None:
        for hooks in hooks_of(x):
            for hook in hooks.values():
                self._hook(hook)

    def _hook(self, hook: Any) -> None:
        """A hook of the user's; or what a library's is made of."""
        if not is_library(hook.func if isinstance(hook, functools.partial) else hook):
            self._function(hook)
        elif self._is_new(hook):
            for given in given_to(hook):
                self._hook(given)

    def _is_new(self, *what: Any) -> bool:
        """Whether this was not met before."""
        key = tuple(x if isinstance(x, (str, int)) else id(x) for x in what)
        if key in self._seen:
            return False
        self._seen.add(key)
        self._kept += what
        return True

    def _object(self, value: Any, name: str) -> None:
        if isinstance(value, (Tensor, *VALUES)) or not self._is_new(value):
            return
        if isinstance(value, Iterator) and is_library(value) and not isinstance(value, io.IOBase):
            self.iterators.append(name)
        elif hasattr(type(value), "bit_generator") or isinstance(value, random.Random):
            self.streams.append((value, name))
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif isinstance(value, optim.Optimizer):
            self.optimizers[id(value)] = value
            self.names[id(value)] = name
        elif isinstance(value, CONTAINERS):
            self._container(value, name)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)) or hasattr(value, "__wrapped__"):
            self._function(value)
        elif isinstance(value, (type, ModuleType)):
            if not is_library(value):
                self._attributes(value.__dict__, self.read | ALWAYS, name)
        elif isinstance(value, NAMESPACES) or not is_library(value):
            if hasattr(value, "__dict__"):
                self._holder(value, name)
                self._attributes(value.__dict__, self.read, name)
            self._class(type(value), name)
            for key in (key for cls in type(value).__mro__ for key in _slots_of(cls) if key in self.read):
                if hasattr(value, key):
                    self._slot((Attributes(value), key), _joined(name, key))
        elif not is_library(value, _OURS):
            self._settings(getattr(value, "__dict__", {}), name)

    def _holder(self, value: Any, name: str, *, is_sized: bool = True) -> None:
        """Something that may get more attributes than it has."""
        self.holders.append((value.__dict__, name))
        if is_sized:
            self.lengths.append(Sized(value.__dict__, len(value.__dict__), name))

    def _settings(self, kept: Mapping[str, Any], name: str) -> None:
        """Of objects of libraries only plain attributes count."""
        for key in [key for key in kept if key in self.read and key not in _KEPT_BY_TORCH and is_value(kept[key])]:
            self._slot((kept, key), _joined(name, key))

    def _container(self, value: Any, name: str) -> None:
        if isinstance(value, (list, deque, Mapping, set)):
            self.lengths.append(Sized(value, len(value), name))
        if len(value) > MAX_ITEMS:
            return
        if isinstance(value, set):
            self._slot((Members(value), 0), name)
            return
        if isinstance(value, frozenset):
            for item in value:
                self._object(item, f"{name}{{…}}")
            return
        for key in list(value) if isinstance(value, Mapping) else range(len(value)):
            self._slot((value, key), f"{name}[{'…' if isinstance(key, Tensor) else repr(key)}]")

    def _attributes(self, kept: Mapping[str, Any], which: frozenset[str], name: str) -> None:
        for key in [key for key in kept if key in which]:
            self._slot((kept, key), _joined(name, key))
            self._method(kept[key])

    def _method(self, value: Any) -> None:
        if isinstance(value, property):
            self._function(value.fget)
        elif isinstance(value, (staticmethod, classmethod)):
            self._function(value.__func__)

    def _class(self, cls: type, name: str) -> None:
        """What objects find in their class."""
        for one in cls.__mro__:
            if not is_library(one) and self._is_new(one, "class"):
                self._attributes(one.__dict__, self.read | ALWAYS, name)

    def _module(self, module: nn.Module, name: str) -> None:
        for path, inner in module.named_modules():
            if id(inner) in self.modules:
                continue
            here = _joined(name, path)
            self._is_new(inner)
            self.modules[id(inner)], self.names[id(inner)] = inner, here
            for kept in (inner._parameters, inner._buffers):
                tensors = [(key, value) for key, value in kept.items() if value is not None]
                self.objects += [Found((kept, key), value, _joined(here, key)) for key, value in tensors]
                for _, value in tensors:
                    self._hooks(value)
            self._hooks(inner)
            self._holder(inner, here or type(inner).__name__, is_sized=not is_library(inner))
            if is_library(inner):
                self._settings(inner.__dict__, here)
                if "forward" in inner.__dict__:
                    self._slot((inner.__dict__, "forward"), _joined(here, "forward"))
                continue
            self._class(type(inner), here)
            for key in [key for key in inner.__dict__ if key in self.read | ALWAYS and key not in _KEPT_BY_TORCH]:
                self._slot((inner.__dict__, key), _joined(here, key))


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


class Cell:
    """A variable of a closure, as a dict of one."""

    __slots__ = ("cell",)

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, _: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, _: Any, value: Any) -> None:
        self.cell.cell_contents = value


class Members:
    """What is in a set, as a dict of one: the same object as long as it is the same."""

    __slots__ = ("before", "of")

    def __init__(self, of: set[Any]) -> None:
        self.of, self.before = of, frozenset(of)

    def __getitem__(self, _: Any) -> frozenset[Any]:
        return self.before if self.of == self.before else frozenset(self.of)


class Attributes:
    """Attributes of an object that has no dict, as one."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)


def _slots_of(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> frozenset[str]:
    """Names of all attributes that code may read, those that it has as strings with them."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _named(constant)
        found.update(x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def _named_by_class(cls: type) -> frozenset[str]:
    """Names of attributes that a module's forward may read, and whatever methods it calls."""
    found: frozenset[str] = frozenset()
    waiting = ["forward"]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        for one in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            function = one.__dict__.get(name)
            function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
            if isinstance(function, FunctionType):
                named = _named(function.__code__)
                found |= named
                waiting += named - seen
                seen |= named
    return found


def is_library(value: Any, known: frozenset[str] = frozenset()) -> bool:
    """Whether this is code, or an object of a class, that is not the user's; or of a `known` one."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    root = (module or type(value).__module__ or "").partition(".")[0]
    return root in known if known else _is_library_name(root)


@functools.lru_cache(maxsize=1024)
def _is_library_name(root: str) -> bool:
    if root in _OURS or (root in sys.stdlib_module_names and root != "__main__"):
        return True
    where = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in where or "dist-packages" in where
