"""The quickest callable for an aten op: the C++ binding of the same name, where it makes exactly the same call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.modes import ThinkingMode
from shardwise.rules import Call, Value


class _Seen(ThinkingMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, Call(func, args, kwargs or {}, (), ()).bound))
        return func(*args, **(kwargs or {}))


def fast_callable(call: Call) -> Any:
    """A binding in `torch` (or `torch.nn.functional`'s own) for the call's op, tried out on meta tensors, or the op."""
    if call.mutated:
        return call.op
    for namespace in (torch._C._VariableFunctions, torch._C._nn):
        binding = getattr(namespace, call.name, None)
        if binding is not None and _same(binding, call):
            return binding
    return call.op


def _same(binding: Any, call: Call) -> bool:
    args = [_metas(arg) for arg in call.args]
    kwargs = {name: _metas(arg) for name, arg in call.kwargs.items()}
    with _Seen() as seen:
        try:
            binding(*args, **kwargs)
        except (TypeError, RuntimeError, NotImplementedError, ValueError):
            return False
    if len(seen.calls) != 1 or seen.calls[0][0] is not call.op:
        return False
    wanted, made = call.bound, seen.calls[0][1]  # bindings have defaults of their own: the arguments must agree too
    return all(_plain(wanted[name]) == _plain(made[name]) for name in wanted)


def _plain(argument: Any) -> Any:
    """An argument with tensors and values left out of account."""
    if isinstance(argument, (Value, Tensor)):
        return None
    if isinstance(argument, (list, tuple)):
        return [_plain(item) for item in argument]
    return argument


def _metas(tree: Any) -> Any:
    if isinstance(tree, Value):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, (list, tuple)):
        return [_metas(item) for item in tree]
    return tree
