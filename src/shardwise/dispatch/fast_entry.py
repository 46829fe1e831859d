"""Ways to `dispatch` that do not lead through C++: torch's argument parser would only send the calls back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.call import dispatch
from shardwise.tensor import DTensor

_enabled = torch._C._is_torch_function_enabled
_in_a_mode = torch._C._is_torch_function_mode_enabled
_on_shard = torch._C._disabled_torch_function_impl
_device: Any = torch._C.TensorBase.device.__get__
_OPERATORS: dict[str, Any] = {
    "__add__": Tensor.add,
    "__sub__": Tensor.sub,
    "__mul__": Tensor.mul,
    "__truediv__": Tensor.div,
    "__matmul__": Tensor.matmul,
    "__neg__": Tensor.neg,
}
_METHODS = (
    *("add", "sub", "mul", "div", "matmul", "neg", "square", "sum", "mean", "view", "reshape", "transpose", "permute"),
    *("softmax", "exp", "sigmoid", "tanh", "relu", "unsqueeze", "expand"),
)


def _dispatching(function: Callable) -> Callable:
    """A method that dispatches at once, and is torch's own where a DTensor is only its shard, or a mode looks on."""

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if _enabled() and not _in_a_mode():
            return dispatch(DTensor, function, (), args, kwargs)
        return function(*args, **kwargs)

    return method


def _operator(function: Callable) -> Callable:
    """Likewise an operator, which leaves what it does not know to the other operand."""

    @functools.wraps(function)
    def method(*args: Any) -> Any:
        try:
            if _enabled() and not _in_a_mode():
                return dispatch(DTensor, function, (), args)
            return function(*args)
        except TypeError:
            if isinstance(args[-1], (Tensor, Number)):
                raise
            return NotImplemented

    return method


def _conversion(function: Callable) -> Callable:
    """Likewise `to`; the device where a tensor is already, `clip_grad_norm_` asks of every gradient's norm."""
    convert = _dispatching(function)

    @functools.wraps(function)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if len(args) == 1 and not kwargs else None
        if asked.__class__ is torch.device and self.__class__ is DTensor and _enabled() and not _in_a_mode():
            if asked == _on_shard(_device, (), (self,), {}):
                return self
        return convert(self, *args, **kwargs)

    return method


DTensor.to = _conversion(Tensor.to)  # type: ignore[method-assign]

for _name, _function in _OPERATORS.items():
    setattr(DTensor, _name, _operator(_function))
for _name in _METHODS:
    setattr(DTensor, _name, _dispatching(getattr(Tensor, _name)))
