"""Iterators of Python's and of libraries': they cannot be asked how far they are, and no item can be given back.

So while a function is captured something stands in the place of each that it reaches, which raises when the function
takes an item, or looks into it; a function that only could have done so is captured.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from types import BuiltinMethodType, MethodType, MethodWrapperType, TracebackType
from typing import Any

from shardwise.comm.cause import users_line
from shardwise.errors import CaptureError
from shardwise.graph.guards.places import Cell
from shardwise.graph.guards.values import is_library

_REFUSAL = "the program {}, which only Python would do in every run: take items outside, and hand them in"


def may_be_taken(name: str) -> CaptureError:
    """What is said of an iterator in whose place nothing else can be put."""
    return CaptureError(_REFUSAL.format(f"may take the next item of {name}"))


METHODS = (BuiltinMethodType, MethodType, MethodWrapperType)
"""Types of methods that have an object already."""


def is_iterator(x: Any) -> bool:
    """Whether it is such an iterator, or a method of one."""
    if isinstance(x, METHODS):
        x = x.__self__
    return isinstance(x, Iterator) and is_library(x) and not isinstance(x, io.IOBase)


def is_replaceable(slot: tuple[Any, Any]) -> bool:
    """Whether something else can be put where an iterator is."""
    return type(slot[0]) in (dict, list, Cell)


class Untaken:
    """While it is entered, iterators cannot be used in the thread that has entered it."""

    def __init__(self, found: Sequence[tuple[tuple[Any, Any], Any, str]]) -> None:
        self._found = found
        self._stand_ins = [_StandIn(self, value, name) for _, value, name in found]
        self._thread: int | None = None
        self._refused: CaptureError | None = None

    def __enter__(self) -> None:
        self._thread = get_ident()
        for ((kept, key), *_), stand_in in zip(self._found, self._stand_ins, strict=True):
            kept[key] = stand_in

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread = None
        for ((kept, key), value, _), stand_in in zip(self._found, self._stand_ins, strict=True):
            with suppress(LookupError, ValueError):  # it is not there any more
                if kept[key] is stand_in:
                    kept[key] = value
        if error is None and self._refused is not None:  # the program went on after that
            raise self._refused

    def used(self, said: str) -> None:
        """Somebody uses an iterator."""
        if self._thread == get_ident():
            file, number, _ = users_line()
            self._refused = CaptureError(_REFUSAL.format(f"{said} in {file}, line {number}"))
            raise self._refused


class _StandIn:
    """What is in the place of an iterator. To other threads, and afterwards, it is that."""

    __slots__ = ("_during", "_name", "_of")

    def __init__(self, during: Untaken, of: Any, name: str) -> None:
        self._during, self._of, self._name = during, of, name

    def _used(self, what: str = "looks into") -> Any:
        self._during.used(f"{what} {self._name}")
        return self._of

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._used(), name)

    def __next__(self) -> Any:
        return next(self._used("takes the next item of"))

    def __iter__(self) -> Any:
        return iter(self._used("takes the next item of"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._used("calls")(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._used())

    def __bool__(self) -> bool:
        has_length = hasattr(type(self._of), "__bool__") or hasattr(type(self._of), "__len__")
        return bool(self._used()) if has_length else True
