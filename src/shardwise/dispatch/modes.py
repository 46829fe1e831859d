"""What users may switch on for a while. Nothing here outlives its `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_strict: ContextVar[bool] = ContextVar("strict", default=False)
_implicit: ContextVar[bool] = ContextVar("implicit_replication", default=False)


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside, a call that cannot run on the shards it is given, and would gather them, raises `StrictModeError`."""
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors that meet DTensors are taken as replicated: every rank must hold the same values."""
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


def is_strict() -> bool:
    return _strict.get()


def replicates_implicitly() -> bool:
    return _implicit.get()
