"""Attributes that a function asks for by names that stand nowhere in its code, noted while it is captured."""

from __future__ import annotations

import builtins
import sys
from threading import get_ident
from types import TracebackType
from typing import Any

from shardwise.graph.guards.reached import Reached

_getattr, _hasattr = getattr, hasattr

_OF_THEIR_OWN = {"torch", "shardwise", "numpy", *sys.stdlib_module_names} - {"__main__", "dataclasses"}
"""Who asks for what is no setting of the user's."""


_watching: list[Lookups] = []
"""Those that are entered. As long as there is one, Python's functions are replaced, in the whole process."""


class Lookups:
    """While it is entered, Python's `getattr` and `hasattr` note what the user's code asks for of what it reaches, in
    the thread that has entered it."""

    def __init__(self, of: Reached) -> None:
        self.of = of
        self.thread = get_ident()
        self.names: set[str] = set()
        self.absent: list[tuple[Any, str]] = []
        """Objects with names that they did not have."""

    def __enter__(self) -> None:
        self.thread = get_ident()
        _watching.append(self)
        _replace(_noting_get, _noting_has)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _watching.remove(self)
        if not _watching:
            _replace(_getattr, _hasattr)

    def note(self, x: Any, name: str) -> None:
        if self.thread != get_ident() or not self.of.knows(x):
            return
        self.names.add(name)
        if name not in _getattr(x, "__dict__", (name,)):
            self.absent.append((x, name))


def _replace(get: Any, has: Any) -> None:
    builtins.__dict__.update(getattr=get, hasattr=has)


def _noting_get(x: Any, name: str, *default: Any) -> Any:
    _note(x, name)
    return _getattr(x, name, *default)


def _noting_has(x: Any, name: str) -> bool:
    _note(x, name)
    return _hasattr(x, name)


def _note(x: Any, name: str) -> None:
    asking, _, _ = (sys._getframe(2).f_globals.get("__name__") or "").partition(".")
    if isinstance(name, str) and not name.startswith("__") and asking not in _OF_THEIR_OWN:
        for one in tuple(_watching):
            one.note(x, name)
