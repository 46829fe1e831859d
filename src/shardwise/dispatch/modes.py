"""What users may switch on for a while. Nothing here outlives its `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.comm.cause import watchers
from shardwise.words import bytes_said

_strict: ContextVar[bool] = ContextVar("strict", default=False)
_implicit: ContextVar[bool] = ContextVar("implicit_replication", default=False)
_listener = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True, slots=True)
class Limits:
    """Which implicit moves are refused: those of parameters, those for which a rank sends more than `bytes`, and those
    for which `check` raises, which is given the call and the label of what moves."""

    parameters: bool = False
    bytes: int | None = None
    check: Callable[[Any, Any], None] | None = None


_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)


@contextmanager
def strict(enabled: bool = True, *, moves: str | int | None = None) -> Iterator[None]:
    """Inside, a call that cannot run on the shards it is given, and would gather them, raises `StrictModeError`.

    `moves` refuses implicit moves as well, before anything is communicated: `moves="parameters"` those of parameters,
    `moves=1_000_000` or `moves="1MB"` those for which each rank would send more bytes than that (by the ring model).
    What is asked for (`redistribute`, `full_tensor`) is never refused, nor are the gradients of what was allowed.
    Limits of `with` blocks around hold as well; `strict(False)` lifts them.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x, y = (sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(dim)]) for dim in (0, 1))
    >>> with sw.strict(moves=0):
    ...     x * y
    Traceback (most recent call last):
    shardwise.errors.StrictModeError: strict mode: ...
    """
    around = _limits.get() if enabled else None
    token = _strict.set(enabled)
    try:
        with limited(around if moves is None else _joined(around, _parsed(moves))):
            yield
    finally:
        _strict.reset(token)


@contextmanager
def limited(limits: Limits | None) -> Iterator[None]:
    """Inside, these limits are in force, and no others."""
    token = _limits.set(limits)
    if limits is not None:
        watchers.append(limits)
    try:
        yield
    finally:
        if limits is not None:
            watchers.remove(limits)
        _limits.reset(token)


@contextmanager
def checked(check: Callable[[Any, Any], None]) -> Iterator[None]:
    """Inside, implicit moves for which `check` raises are refused as well."""
    with limited(_joined(_limits.get(), Limits(check=check))):
        yield


def _parsed(moves: str | int) -> Limits:
    if moves == "parameters":
        return Limits(parameters=True)
    if isinstance(moves, str) and (limit := bytes_said(moves)) is not None:
        return Limits(bytes=limit)
    if isinstance(moves, int) and not isinstance(moves, bool) and moves >= 0:
        return Limits(bytes=moves)
    raise ValueError(
        f'strict takes moves="parameters" or a number of bytes, such as 1_000_000 or "64MB"; got {moves!r}'
    )


def _joined(a: Limits | None, b: Limits) -> Limits:
    if a is None:
        return b
    bytes = min((x.bytes for x in (a, b) if x.bytes is not None), default=None)
    return Limits(a.parameters or b.parameters, bytes, b.check or a.check)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors that meet DTensors are taken as replicated: every rank must hold the same values."""
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a backward pass calls, on whatever thread, with plain tensors taken as they are taken now."""
    if not replicates_implicitly():
        return function

    def later(*args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return function(*args, **kwargs)

    return later


class ThinkingMode(TorchDispatchMode):
    """A dispatch mode under which a call is only thought about. To keep torch.compile out of it, torch would import all
    of torch._dynamo, which takes seconds; torch.compile never gets here (`dispatch.interop.compiled`)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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


def limits() -> Limits | None:
    return _limits.get()


def replicates_implicitly() -> bool:
    return _implicit.get()
