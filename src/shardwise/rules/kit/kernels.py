"""Kernels for a device: what runs on shards there in the place of a function, with its arguments and its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

kernels: dict[tuple[Any, str], Callable[..., Any]] = {}
"""By function and type of device. Plans ask when they are made, so that calls do not. A function is one that users
call, where nothing inside of it has to move; or what a rule runs on shards instead; or a step of that."""

steps: list[Callable[..., Any]] = []
"""The steps of distributed programs that a kernel may be offered for."""


def step(function: _F) -> _F:
    """A step of a program that asks for its kernel by `kernel_for`."""
    steps.append(function)
    return function


def kernel_for(function: _F, device: str) -> _F:
    """What runs on shards of a device for a function: its kernel, or the function itself."""
    return kernels.get((function, device), function)  # type: ignore[return-value]
