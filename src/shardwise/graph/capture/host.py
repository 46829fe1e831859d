"""Tensors of one number that the host knows while a program is captured: counts, and what is computed of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.graph.capture.numbers import is_ours

_no_functions = torch._C.DisableTorchFunction
_VALUE = "_host"
"""Under this name a tensor without data has its value, on the host."""


class Host:
    """What is known is known of memory: who writes to a view writes to all that lies there."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []  # so that their memory stays theirs
        self._fixed: set[int] = set()
        self._forgotten: set[int] = set()

    def know(self, x: Tensor, value: Tensor, *, is_fixed: bool = False) -> None:
        """That a tensor has a value; if `is_fixed`, the same in every run."""
        x.__dict__[_VALUE] = value
        self._values.append(value)
        if is_fixed:
            self._fixed.add(_memory(value))

    def value_of(self, x: Tensor) -> Tensor | None:
        value: Tensor | None = x.__dict__.get(_VALUE)
        return None if value is None or _memory(value) in self._forgotten else value

    def forget(self, x: Tensor) -> None:
        x.__dict__.pop(_VALUE, None)

    def is_fixed(self, x: Tensor) -> bool:
        return _memory(x.__dict__[_VALUE]) in self._fixed

    def compute(self, func: Any, given: Sequence[Any], spec: Any, out: Any, written: Collection[Tensor]) -> bool:
        """Do what an op does to numbers, if it is given nothing else; `written` are those that it writes to. Whether it
        was done."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        known = {id(x): value for x in tensors if (value := self.value_of(x)) is not None}
        written_to = {_memory(known[id(x)]) for x in written if id(x) in known}
        if not tensors or len(known) < len({id(x) for x in tensors}):
            self._forgotten |= written_to
            return False
        is_fixed = all(map(self.is_fixed, tensors)) and not any(map(is_ours, given))
        args, kwargs = tree_unflatten([known.get(id(x), x.node.value if is_ours(x) else x) for x in given], spec)
        with _disable_current_modes(), _no_functions(), torch.no_grad():
            computed = func(*args, **kwargs)
        for x, value in zip(tree_flatten(out)[0], tree_flatten(computed)[0], strict=True):
            if isinstance(x, FakeTensor) and value.numel() == 1:
                self.know(x, value, is_fixed=is_fixed)
        if not is_fixed:
            self._fixed -= written_to
        return True


def _memory(value: Tensor) -> int:
    with _disable_current_modes(), _no_functions():
        return value.untyped_storage().data_ptr()
