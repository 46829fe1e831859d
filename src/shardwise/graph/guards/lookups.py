"""Attributes that a function asks for by names that stand nowhere in its code, noted while it is captured."""

from __future__ import annotations

import builtins
import sys
from types import TracebackType
from typing import Any

from shardwise.graph.guards.reached import Reached

_getattr, _hasattr = getattr, hasattr

_OF_THEIR_OWN = {"torch", "shardwise", "numpy", *sys.stdlib_module_names} - {"__main__", "dataclasses"}
"""Who asks for what is no setting of the user's."""


class Lookups:
    """While it is entered, Python's `getattr` and `hasattr` note what the user's code asks for of what it reaches."""

    def __init__(self, of: Reached) -> None:
        self.of = of
        self.names: set[str] = set()
        self.absent: list[tuple[Any, str]] = []
        """Objects with names that they did not have."""

    def __enter__(self) -> None:
        setattr(builtins, "getattr", self._get)  # noqa: B010
        setattr(builtins, "hasattr", self._has)  # noqa: B010

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        setattr(builtins, "getattr", _getattr)  # noqa: B010
        setattr(builtins, "hasattr", _hasattr)  # noqa: B010

    def _get(self, x: Any, name: str, *default: Any) -> Any:
        self._note(x, name)
        return _getattr(x, name, *default)

    def _has(self, x: Any, name: str) -> bool:
        self._note(x, name)
        return _hasattr(x, name)

    def _note(self, x: Any, name: str) -> None:
        asking, _, _ = (sys._getframe(2).f_globals.get("__name__") or "").partition(".")
        if name.startswith("__") or asking in _OF_THEIR_OWN or not self.of.knows(x):
            return
        self.names.add(name)
        if name not in _getattr(x, "__dict__", (name,)):
            self.absent.append((x, name))
