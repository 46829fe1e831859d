"""Ways to `dispatch` that do not lead through C++: torch's argument parser would only send the calls back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dispatch.call import dispatch
from shardwise.tensor import DTensor

_enabled = torch._C._is_torch_function_enabled
_in_a_mode = torch._C._is_torch_function_mode_enabled
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


def _straight(function: Callable) -> Callable:
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


for _name, _function in _OPERATORS.items():
    setattr(DTensor, _name, _operator(_function))
for _name in _METHODS:
    setattr(DTensor, _name, _straight(getattr(Tensor, _name)))


# Functions of torch's that are written in Python: their own way to `dispatch` looks at each argument once more.

_ask: Any = torch.overrides.handle_torch_function
_ORDINARY = frozenset({DTensor, Tensor, nn.Parameter, type(None)})


@functools.wraps(_ask)
def _asked(function: Callable, relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not _in_a_mode():
        for x in relevant:
            if x.__class__ not in _ORDINARY:
                break
        else:  # some are DTensors, or nobody would ask
            return dispatch(DTensor, function, (), args, kwargs)
    return _ask(function, relevant, *args, **kwargs)


for _module in (nn.functional, torch.functional, torch._tensor):
    vars(_module)["handle_torch_function"] = _asked
