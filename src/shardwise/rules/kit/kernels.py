"""Kernels for a device: what runs on shards there in the place of a function, with its arguments and its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])

kernels: dict[tuple[Any, str], Callable[..., Any]] = {}
"""By function and type of device. Plans ask when they are made, so that calls do not. A function is one that users
call, where nothing inside of it has to move; or what a rule runs on shards instead; or a step of that."""

steps: list[Callable[..., Any]] = []
"""The steps of distributed programs that a kernel may be offered for."""

passes: dict[Any, Pass] = {}
"""Steps by the ops that stand for them."""

_providers: dict[str, Callable[[], None]] = {}
_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_num_modes = torch._C._len_torch_dispatch_stack
_library = torch.library.Library("shardwise", "FRAGMENT")


def provides(device: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that offers kernels for a device, called when the first is asked for there: what they are written in
    is not imported before."""

    def provide(function: Callable[[], None]) -> Callable[[], None]:
        _providers[device] = function
        return function

    return provide


def has_kernel(function: Any, device: str) -> bool:
    if device in _providers:
        _providers.pop(device)()
    return (function, device) in kernels


def is_traced() -> bool:
    """Whether torch's tracer looks on, for a graph of its own ops."""
    return _mode(_PROXY) is not None


def step(function: _F) -> _F:
    """A step of a program that asks for its kernel by `kernel_for`."""
    steps.append(function)
    return function


def kernel_for(function: _F, device: str) -> _F:
    """What runs on shards of a device for a function: its kernel, or the function itself."""
    return kernels[function, device] if has_kernel(function, device) else function  # type: ignore[return-value]


class Pass:
    """A step that is given one rank's shards, and gives tensors that are none of them. Where there is a kernel for the
    device of its first argument that runs, as one op, so that a tracer knows what it does to tensors. It is one op also
    in a program that is captured, whose tensors have no data: how it goes about them is not part of the program."""

    def __init__(self, function: Callable[..., Any], schema: str) -> None:
        update_wrapper(self, function)
        self.function, self.name = function, function.__name__
        _library.define(self.name + schema)
        _library.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        self._op = getattr(torch.ops.shardwise, self.name).default
        passes[self._op] = self

    def __call__(self, *args: Any) -> Any:
        x = args[0]
        if x.__class__ is Tensor and not _num_modes():  # nobody looks on
            device = x.device.type
            return (kernels[self, device] if has_kernel(self, device) else self.function)(*args)
        is_op = has_kernel(self, x.device.type) or ("fake_mode" in x.__dict__ and not is_traced())
        return self._op(*args) if is_op else self.function(*args)

    def _kernel(self, *args: Any) -> Any:
        device = args[0].device.type
        return (kernels[self, device] if has_kernel(self, device) else self.function)(*args)


def one_pass(schema: str) -> Callable[[Callable[..., Any]], Pass]:
    """A function as a `Pass`. The schema says its parameters and results: `"(Tensor x, int dim) -> Tensor"`."""

    def make(function: Callable[..., Any]) -> Pass:
        return step(Pass(function, schema))

    return make
