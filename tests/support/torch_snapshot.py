"""All that torch is in this process: the attributes of its modules and classes by identity, what its registries hold,
and what its dispatcher would run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

Snapshot = dict[str, Any]
_dict_of = vars(ModuleType)["__dict__"].__get__


def snapshot() -> Snapshot:
    found: Snapshot = {}
    seen: set[type] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            found.update(_members(name, _dict_of(module), seen))
    for op in torch._C._dispatch_get_all_op_names():
        found[f"op {op}"] = torch._C._dispatch_dump(op)
    return found


def _members(path: str, members: Any, seen: set[type]) -> Iterator[tuple[str, Any]]:
    for name, value in list(members.items()):
        yield f"{path}.{name}", value
        yield from _inside(f"{path}.{name}", value)
        kinds = (value, type(value)) if type(value) is type or isinstance(value, type) else ()
        for cls in (base for kind in kinds for base in kind.__mro__):
            if cls not in seen and cls.__module__.partition(".")[0] in ("torch", "_C"):
                seen.add(cls)
                yield from _members(f"{cls.__module__}.{cls.__qualname__}", vars(cls), seen)


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What can change in a value that stays the same object: code, attributes of functions, items of containers."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    function = function.fget if isinstance(function, property) else function
    if isinstance(function, FunctionType):
        yield f"{path}()", function.__code__
        yield from ((f"{path}.{name}", attribute) for name, attribute in function.__dict__.items())
    elif isinstance(value, dict):
        yield from ((f"{path}[{_named(key)}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield f"{path}[:]", tuple(map(id, value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{path}{{{_named(item)}}}", item) for item in list(value))


def _named(key: Any) -> str:
    if isinstance(key, (str, int)):
        return str(key)
    return f"{getattr(key, '__module__', '')}.{getattr(key, '__qualname__', '')}#{id(key)}"


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """The names of what was added, removed or replaced."""
    return sorted(
        name
        for name in {*before, *after}
        if name not in before or name not in after or not _same(before[name], after[name])
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (str, int, float, tuple)) and a == b)
