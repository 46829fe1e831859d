"""What users may switch on for a while. Nothing here outlives its `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

_strict: ContextVar[bool] = ContextVar("strict", default=False)
_implicit: ContextVar[bool] = ContextVar("implicit_replication", default=False)
_listener = torch._C._autograd._top_saved_tensors_default_hooks


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


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which only thinks about a call: no dispatch mode of the user's is to see that, and nobody who
    listens for saved tensors to hear of it (a checkpoint counts them, and there is no thinking the second time)."""
    if _listener(True) is not None:
        with saved_tensors_hooks(_itself, _itself):
            return _unseen_by_modes(function, *args)
    return _unseen_by_modes(function, *args)


def _unseen_by_modes(function: Callable[..., Any], *args: Any) -> Any:
    if not torch._C._len_torch_dispatch_stack():
        return function(*args)
    with _disable_current_modes():
        return function(*args)


def _itself(x: Tensor) -> Tensor:
    return x


def is_strict() -> bool:
    return _strict.get()


def replicates_implicitly() -> bool:
    return _implicit.get()
