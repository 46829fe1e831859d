"""Places where a function finds what it reaches, each like a dict: `place[key]` is what is there now."""

from __future__ import annotations

import array
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

MAX_BYTES = 1 << 16
"""Of larger arrays the numbers do not count: they are data."""


class Cell:
    """A variable of a closure, as a dict of one."""

    __slots__ = ("cell",)

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, _: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, _: Any, value: Any) -> None:
        self.cell.cell_contents = value


class Contents:
    """What is in something that has no keys, as a dict of one: the same object as long as it is the same."""

    __slots__ = ("before", "copy", "of")

    def __init__(self, of: Any, copy: Callable[[Any], Any]) -> None:
        self.of, self.copy, self.before = of, copy, copy(of)

    def __getitem__(self, _: Any) -> Any:
        now = self.copy(self.of)
        return self.before if now == self.before else now


def contents_of(x: Any) -> Contents | None:
    """What is in a set, a small array, a variable of a context, or what a weak reference refers to."""
    numpy = sys.modules.get("numpy")
    if isinstance(x, set):
        return Contents(x, frozenset)
    if isinstance(x, (bytearray, array.array)) and len(x) <= MAX_BYTES:
        return Contents(x, bytes)
    if numpy is not None and isinstance(x, numpy.ndarray) and x.nbytes <= MAX_BYTES:
        return Contents(x, lambda x: (x.dtype.str, x.shape, x.tobytes()))
    return None


class Asked:
    """What is had by asking: a variable of a context, or what a weak reference refers to."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, _: Any) -> Any:
        return self.of.get(None) if isinstance(self.of, ContextVar) else self.of()


def is_asked(x: Any) -> bool:
    return isinstance(x, (ContextVar, weakref.ref))


class Class:
    """The class of what is in a place."""

    __slots__ = ("of",)

    def __init__(self, of: tuple[Any, Any]) -> None:
        self.of = of

    def __getitem__(self, _: Any) -> type:
        return type(self.of[0][self.of[1]])


class Attributes:
    """Attributes of an object, as a dict, where they are not in one."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)


def environment() -> Contents:
    """Variables of the process's environment."""
    return Contents(os.environ, lambda x: tuple(x.items()))


def slots_of(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
