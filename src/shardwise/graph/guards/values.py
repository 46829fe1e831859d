"""Values that count by what they are, and not by which object they are; and what is no value of the user's."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import sys
from pathlib import PurePath
from types import EllipsisType, ModuleType
from typing import Any

import torch

from shardwise.layout import Placement

PLAIN = (bool, int, float, str, type(None))
"""Types of values that a program is captured for."""

VALUES = (
    *(*PLAIN, complex, bytes, enum.Enum, slice, range, EllipsisType, torch.dtype, torch.device, torch.layout),
    *(fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, PurePath, Placement),
    *((sys.modules["numpy"].generic,) if "numpy" in sys.modules else ()),  # which torch imports, where it is there
)
"""Types of values that count by what they are, not by which object they are."""

MAX_ITEMS = 256
"""The items of longer lists and dicts are not looked into, only at."""

OURS = frozenset({"torch", "shardwise", "numpy", "builtins", "_thread"})
"""Libraries whose objects are known not to be settings."""


def is_value(x: Any) -> bool:
    return isinstance(x, VALUES) or (isinstance(x, tuple) and len(x) <= MAX_ITEMS and all(map(is_value, x)))


def is_same(before: Any, now: Any) -> bool:
    """Whether two things do the same in a program: equal values of one type, or else the same object."""
    return before is now or (is_value(before) and type(before) is type(now) and repr(before) == repr(now))


def is_library(value: Any, known: frozenset[str] = frozenset()) -> bool:
    """Whether this is code, or an object of a class, that is not the user's; or of a `known` one."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    root = (module or type(value).__module__ or "").partition(".")[0]
    return root in known if known else _is_library_name(root)


@functools.lru_cache(maxsize=1024)
def _is_library_name(root: str) -> bool:
    if root in OURS or (root in sys.stdlib_module_names and root != "__main__"):
        return True
    where = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in where or "dist-packages" in where
