"""Kernels for a device: what runs on shards there in the place of a function, with its arguments and its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

kernels: dict[tuple[Any, str], Callable[..., Any]] = {}
"""By function and type of device. Plans ask when they are made, so that calls do not. A function is one that users
call, where nothing inside of it has to move; or what a rule runs on shards instead; or a step of that."""

steps: list[Callable[..., Any]] = []
"""The steps of distributed programs that a kernel may be offered for."""

_library = torch.library.Library("shardwise", "FRAGMENT")


def step(function: _F) -> _F:
    """A step of a program that asks for its kernel by `kernel_for`."""
    steps.append(function)
    return function


def kernel_for(function: _F, device: str) -> _F:
    """What runs on shards of a device for a function: its kernel, or the function itself."""
    return kernels.get((function, device), function)  # type: ignore[return-value]


class Pass:
    """A step that is given one rank's shards, and gives tensors that are none of them. Where there is a kernel for the
    device of its first argument that runs, as one op, so that a tracer knows what it does to tensors."""

    def __init__(self, function: Callable[..., Any], schema: str) -> None:
        update_wrapper(self, function)
        self.function = function
        name = function.__name__
        _library.define(name + schema)
        _library.impl(name, self._kernel, "CompositeExplicitAutograd")
        self._op = getattr(torch.ops.shardwise, name).default

    def __call__(self, *args: Any) -> Any:
        is_offered = (self, args[0].device.type) in kernels
        return self._op(*args) if is_offered else self.function(*args)

    def _kernel(self, *args: Any) -> Any:
        return kernels.get((self, args[0].device.type), self.function)(*args)


def one_pass(schema: str) -> Callable[[Callable[..., Any]], Pass]:
    """A function as a `Pass`. The schema says its parameters and results: `"(Tensor x, int dim) -> Tensor"`."""

    def make(function: Callable[..., Any]) -> Pass:
        return step(Pass(function, schema))

    return make
