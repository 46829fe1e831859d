"""Shards without data, of programs that are captured: torch's fake tensors, which a class of ours hides.

To C++ such a tensor is still one that only Python can compute with, and it asks the class that the tensor has now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MODE, _DEVICE, _DEVICE_2_11 = "fake_mode", "_fake_device", "fake_device"
"""What torch keeps on its fake tensors."""


def is_faked(x: Tensor) -> bool:
    return _MODE in x.__dict__


def device_of(x: Tensor) -> torch.device:
    """The device of a shard; of one without data, that which it would be on."""
    found: torch.device | None = x.__dict__.get(_DEVICE, x.__dict__.get(_DEVICE_2_11))
    return x.device if found is None else found


def plain_alias(x: Tensor) -> Tensor:
    """The same memory, and the same place in the graph, as a tensor of no class of ours."""
    return torch.ops.aten.alias.default(x) if is_faked(x) else x.as_subclass(Tensor)


def as_fakes(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)`, in which shards without data are seen as the fake tensors that they are."""
    from torch._subclasses.fake_tensor import FakeTensor  # which plain programs do without

    hidden = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and is_faked(x)]
    hidden = [x for x in hidden if x.__class__ is not FakeTensor]
    classes = [x.__class__ for x in hidden]
    try:
        for x in hidden:
            x.__class__ = FakeTensor
        return function(*args, **kwargs)
    finally:
        for x, cls in zip(hidden, classes, strict=True):
            x.__class__ = cls


def on_faked(cls: type, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """`__torch_dispatch__` of the classes that hide them."""
    return as_fakes(func, args, kwargs or {})
