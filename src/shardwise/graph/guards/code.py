"""What code names: attributes, globals, and modules that it imports."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType

from torch import nn

_LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_READS = frozenset(name for name in dis.opname if not name.startswith(("STORE", "DELETE"))) & {
    dis.opname[number] for number in dis.hasname
}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, with that of functions that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> Iterator[str]:
    for one in codes_in(code):
        yield from one.co_names


@functools.lru_cache(maxsize=4096)
def read_by(code: CodeType) -> frozenset[str]:
    """Names of all attributes that code may read, those that it has as strings with them."""
    found = {i.argval for one in codes_in(code) for i in dis.get_instructions(one) if i.opname in _READS}
    for constant in (constant for one in codes_in(code) for constant in one.co_consts):
        found.update(x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def read_by_class(cls: type) -> frozenset[str]:
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
                named = read_by(function.__code__)
                found |= named
                waiting += named - seen
                seen |= named
    return found


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """Names that code looks up among globals; as strings, if it asks for all of these."""
    found = {i.argval for one in codes_in(code) for i in dis.get_instructions(one) if i.opname in _LOADS_GLOBAL}
    return read_by(code) if "globals" in found else frozenset(found)


def imported_by(function: FunctionType) -> Iterator[ModuleType]:
    """Modules that a function imports, as far as they were before."""
    package = function.__globals__.get("__package__")
    for name, level in _imports(function.__code__):
        full = resolve_name("." * level + name, package) if level and package else name
        if full in sys.modules:
            yield sys.modules[full]


@functools.lru_cache(maxsize=4096)
def _imports(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Names of what is imported, and how many packages above it is looked for."""
    found = []
    for one in codes_in(code):
        before: list[dis.Instruction] = []
        for instruction in dis.get_instructions(one):
            if instruction.opname == "IMPORT_NAME":
                found.append((instruction.argval, before[-2].argval))
            before.append(instruction)
    return tuple(found)
