"""What a function reaches beside its arguments: modules, optimizers and values, in its closure, its globals, its
defaults, and in the attributes and items of objects that these hold.

Attributes count if code that is reached names them. What libraries do is taken to stay as it is, but for what their
modules are set to.
"""

from __future__ import annotations

import argparse
import enum
import functools
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn, optim

from shardwise.graph.guards.code import globals_of, imported_by, names_in, read_by, read_by_class
from shardwise.graph.guards.hooks import given_to, hooks_of
from shardwise.graph.guards.iterators import METHODS, is_iterator, is_replaceable
from shardwise.graph.guards.places import Asked, Attributes, Cell, contents_of, environment, is_asked, slots_of
from shardwise.graph.guards.values import MAX_ITEMS, OURS, VALUES, is_library, is_value

Slot = tuple[Any, Any]
"""A dict, or a list, and a key of it."""

CONTAINERS = (list, tuple, deque, Mapping, set, frozenset)

MAX_COMPARED = 1 << 16
"""Of still longer ones only the lengths count: they hold data."""

_MAKE = frozenset({"__init__", "__new__", "__post_init__"})
_NOT_RUN = _MAKE.union(
    *({"__init_subclass__", "__set_name__", "__del__", "__repr__", "__str__", "__hash__"},),
    *({"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__"},),
)


def runs_unnamed(key: str, *, is_made: bool = False) -> bool:
    """Whether a method of a class runs though no code names it; `is_made`: objects of the class may be made, too."""
    if key.startswith("__") and key.endswith("__"):
        return key not in _NOT_RUN or (is_made and key in _MAKE)
    return key in ("forward", "backward", "setup_context")


NAMESPACES = (SimpleNamespace, argparse.Namespace)
"""Objects of libraries that hold what users put there."""

_KEPT_BY_TORCH = frozenset(nn.Module().__dict__)
_KEPT_BY_OPTIMIZERS = frozenset({"defaults", "state", "param_groups", "step"})

_ALL_ATTRIBUTES = frozenset({"vars", "__dict__"})
"""Who names one of these may read attributes whose names stand nowhere."""


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
    iterators: list[Found] = field(default_factory=list)
    """Those of Python's and of libraries', where something else can be put in their place."""
    taken: list[str] = field(default_factory=list)
    """Names of other iterators."""
    streams: list[tuple[Any, str]] = field(default_factory=list)
    """Streams of random numbers that are not torch's."""
    codes: list[CodeType] = field(default_factory=list)
    """Of the functions that are the user's."""
    absent: list[Found] = field(default_factory=list)
    """What is looked for where it is not: globals, of which Python has some of its own, and attributes."""
    marks: list[Found] = field(default_factory=list)
    """Attributes of tensors that are arguments: the slots are their numbers and names."""
    _seen: set[Any] = field(default_factory=set)
    _kept: list[Any] = field(default_factory=list)
    """So that ids that were seen stay theirs."""

    @staticmethod
    def by(
        function: Callable[..., Any],
        leaves: Sequence[Any],
        names: Sequence[str] | None = None,
        also: Collection[str] = (),
    ) -> Reached:
        """What a function reaches that is called with such leaves, which have such names; attributes of some names
        count `also`."""
        read = frozenset(also)
        while True:
            found = Reached(read)
            for number, leaf in enumerate(leaves):
                name = f"argument {number}" if names is None else names[number]
                found._argument(leaf, number, name) if isinstance(leaf, Tensor) else found._object(leaf, name)
            found._function(function)
            now = read.union(*map(read_by, found.codes))
            classes: set[type] = {x.__class__ for x in found.modules.values()}
            now = now.union(*(read_by_class(one) - _ALL_ATTRIBUTES for one in classes))
            if now == read:
                if read & {"environ", "getenv"}:
                    found._slot((environment(), 0), "os.environ")
                return found
            read = now

    def lacks(self, absent: Sequence[tuple[Any, str]]) -> None:
        """That the function has looked for attributes of objects that do not have these themselves."""
        for x, name in absent:
            self._are_absent(x.__dict__, [name], self.names.get(id(x), type(x).__name__))

    def knows(self, x: Any) -> bool:
        """Whether an object is reached, and its attributes count."""
        return (id(x),) in self._seen and not isinstance(x, (type, ModuleType))

    def _counts(self, key: str) -> bool:
        """Whether code may read an attribute."""
        return key in self.read or not _ALL_ATTRIBUTES.isdisjoint(self.read)

    def _argument(self, x: Tensor, number: int, name: str) -> None:
        self.marks += [Found((number, key), x.__dict__[key], _joined(name, key)) for key in self._marks(x)]

    def _marks(self, x: Tensor) -> list[str]:
        """The user's attributes of a tensor."""
        return [key for key in x.__dict__ if not key.startswith("_") and self._counts(key)]

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
        elif (wrapped := _wrapped(function)) is not None:  # cached, or captured by itself
            self._function(wrapped)
        else:
            self._object(function, "")

    def _code(self, function: FunctionType) -> None:
        code = function.__code__
        self.codes.append(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._slot((Cell(cell), 0), name)
        for name in dict.fromkeys((*names_in(code), *sorted(globals_of(code)))):
            if name in function.__globals__:
                self._slot((function.__globals__, name), name)
        self._are_absent(function.__globals__, globals_of(code) - set(function.__globals__), "")
        for module in imported_by(function):
            self._object(module, module.__name__)
        defaults = function.__defaults__ or ()
        first = code.co_argcount - len(defaults)
        for number in range(len(defaults)):
            self._slot((defaults, number), code.co_varnames[first + number])
        for name in function.__kwdefaults__ or ():
            self._slot((function.__kwdefaults__, name), name)
        for part in ("__code__", "__defaults__", "__kwdefaults__"):  # as whoever loads code anew sets them
            self.others.append(Found((Attributes(function), part), getattr(function, part), function.__qualname__))
        self._attributes(function.__dict__, function.__qualname__)

    def _are_absent(self, kept: dict[str, Any], names: Collection[str], where: str) -> None:
        for name in sorted(names):
            if self._is_new(kept, name):
                self.absent.append(Found((kept, name), None, _joined(where, name)))

    def _slot(self, slot: Slot, name: str) -> None:
        try:
            value = slot[0][slot[1]]
        except ValueError:  # a variable without a value
            return
        if not isinstance(slot[0], Cell) and not self._is_new(slot[0], slot[1]):
            return
        if is_value(value):
            self.values.append(Found(slot, value, name))
            if isinstance(value, enum.Enum):
                self._object(value, name)
        elif isinstance(value, (nn.Module, optim.Optimizer, Tensor)):
            self.objects.append(Found(slot, value, name))
            self._object(value, name)
            self._hooks(value)
        elif is_iterator(value) and is_replaceable(slot):
            self.iterators.append(Found(slot, value, name))
        else:
            self.others.append(Found(slot, value, name))
            is_called = callable(value) and not isinstance(value, type) and not is_library(value)
            self._function(value) if is_called and not isinstance(value, CONTAINERS) else self._object(value, name)

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
        if not self._is_new(value):
            return
        if isinstance(value, enum.Enum) and not is_library(value):
            self._attributes(value.__dict__, name)
        elif isinstance(value, VALUES):
            return
        elif isinstance(value, Tensor):
            for key in self._marks(value):
                self._slot((value.__dict__, key), _joined(name, key))
        elif is_iterator(value):
            self.taken.append(name)
        elif hasattr(type(value), "bit_generator") or isinstance(value, random.Random):
            self.streams.append((value, name))
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif isinstance(value, optim.Optimizer):
            self._optimizer(value, name)
        elif isinstance(value, CONTAINERS):
            self._container(value, name)
            if not is_library(type(value)):
                self._instance(value, name)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)) or _wrapped(value) is not None:
            self._function(value)
        elif isinstance(value, type):
            if not is_library(value):
                self._class(value, name, is_made=True)
        elif isinstance(value, ModuleType):
            if not is_library(value):
                self._attributes(value.__dict__, name)
        elif isinstance(value, METHODS):
            self._object(value.__self__, name)
        elif is_asked(value):
            self._slot((Asked(value), 0), name)
        elif (contents := contents_of(value)) is not None:
            self._slot((contents, 0), name)
        elif isinstance(value, NAMESPACES) or not is_library(value):
            self._instance(value, name)
        elif not is_library(value, OURS):
            self._settings(getattr(value, "__dict__", {}), name)

    def _instance(self, value: Any, name: str) -> None:
        """An object of a class of the user's."""
        self._is_of_class(value, name)
        if hasattr(value, "__dict__"):
            self._holder(value, name)
            self._attributes(value.__dict__, name)
        self._class(type(value), name)
        for key in (key for cls in type(value).__mro__ for key in slots_of(cls) if self._counts(key)):
            if hasattr(value, key):
                self._slot((Attributes(value), key), _joined(name, key))

    def _is_of_class(self, value: Any, name: str) -> None:
        self.others.append(Found((Attributes(value), "__class__"), type(value), f"the class of {name}"))

    def _optimizer(self, optimizer: optim.Optimizer, name: str) -> None:
        self.optimizers[id(optimizer)] = optimizer
        self.names[id(optimizer)] = name
        if "step" in optimizer.__dict__:
            self._slot((optimizer.__dict__, "step"), _joined(name, "step"))
        self._are_absent(optimizer.__dict__, {"step"} - set(optimizer.__dict__), name)
        if not is_library(optimizer):
            self._holder(optimizer, name)
            self._class(type(optimizer), name)
            self._attributes(optimizer.__dict__, name, but=_KEPT_BY_OPTIMIZERS)

    def _holder(self, value: Any, name: str, *, is_sized: bool = True) -> None:
        """Something that may get more attributes than it has."""
        self.holders.append((value.__dict__, name))
        if is_sized:
            self.lengths.append(Sized(value.__dict__, len(value.__dict__), name))

    def _settings(self, kept: Mapping[str, Any], name: str) -> None:
        """Of objects of libraries only plain attributes count, and functions, which are not looked into."""
        for key in [key for key in kept if key in self.read and key not in _KEPT_BY_TORCH]:
            if is_value(kept[key]):
                self._slot((kept, key), _joined(name, key))
            elif callable(kept[key]) and is_library(kept[key]) and self._is_new(kept, key):
                self.others.append(Found((kept, key), kept[key], _joined(name, key)))

    def _container(self, value: Any, name: str) -> None:
        if isinstance(value, (list, deque, Mapping, set)):
            self.lengths.append(Sized(value, len(value), name))
        if len(value) > MAX_ITEMS:
            return
        if (contents := contents_of(value)) is not None:
            self._slot((contents, 0), name)
            return
        if isinstance(value, frozenset):
            for item in value:
                self._object(item, f"{name}{{…}}")
            return
        for key in list(value) if isinstance(value, Mapping) else range(len(value)):
            self._slot((value, key), f"{name}[{'…' if isinstance(key, Tensor) else repr(key)}]")

    def _attributes(self, kept: Mapping[str, Any], name: str, *, but: Collection[str] = ()) -> None:
        for key in [key for key in kept if self._counts(key) and key not in but]:
            self._slot((kept, key), _joined(name, key))

    def _class(self, cls: type, name: str, *, is_made: bool = False) -> None:
        """What objects find in their class. It may get what hides what another has, which it has been given by."""
        for one in cls.__mro__:
            if is_library(one) or not self._is_new(one, f"class {is_made}"):
                continue
            kept = one.__dict__
            self.lengths.append(Sized(kept, len(kept), one.__qualname__))
            for key, value in [*kept.items()]:
                if self._counts(key) or (runs_unnamed(key, is_made=is_made) and _is_code(value)):
                    self._slot((kept, key), _joined(name, key))
                    self._method(value)

    def _method(self, value: Any) -> None:
        if isinstance(value, property):
            self._function(value.fget)
        elif isinstance(value, (staticmethod, classmethod)):
            self._function(value.__func__)

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
                for key, value in tensors:
                    self._object(value, _joined(here, key))
                    self._hooks(value)
            self._hooks(inner)
            self._holder(inner, here or type(inner).__name__, is_sized=not is_library(inner))
            if is_library(inner):
                self._settings(inner.__dict__, here)
                if "forward" in inner.__dict__:
                    self._slot((inner.__dict__, "forward"), _joined(here, "forward"))
                continue
            self._is_of_class(inner, here or type(inner).__name__)
            self._class(type(inner), here)
            for key in [key for key in inner.__dict__ if self._counts(key) or runs_unnamed(key)]:
                if key not in _KEPT_BY_TORCH:
                    self._slot((inner.__dict__, key), _joined(here, key))


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _wrapped(x: Any) -> Any:
    """The function that another is made of."""
    try:
        return x.__wrapped__
    except Exception:  # which an object of the user's may raise
        return None


def _is_code(x: Any) -> bool:
    return isinstance(x, (FunctionType, property, staticmethod, classmethod, functools.cached_property))
