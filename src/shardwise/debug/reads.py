"""Looking for calls in which C++ reads this rank's shard for the whole tensor, because torch asks nobody there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.comm.cause import name_of
from shardwise.dispatch.call import dispatch
from shardwise.dispatch.interop.mixing import COLLECTIVES, refuse_collective
from shardwise.dispatch.planning.fallback import describe
from shardwise.errors import ShardMemoryError
from shardwise.tensor import DTensor


class watch_reads(TorchFunctionMode):
    """Inside, a call that has silently read this rank's shard of a DTensor for the whole raises `ShardMemoryError`.

    Torch asks `DTensor` about its arguments, but not about every number and every tensor to copy (README's Limits name
    them). To find these, each call is looked at, which costs some microseconds: for tests and debugging.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> d = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    >>> with sw.debug.watch_reads():
    ...     torch.full((2,), d.sum())
    Traceback (most recent call last):
    shardwise.errors.ShardMemoryError: torch.full([2], f32[] P(sum)@tp) ...
    """

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = not torch._C._is_torch_function_enabled() or any(issubclass(cls, DTensor) for cls in types)
        if not asked and any(map(_is_part, (*args, *kwargs.values()))):
            if getattr(func, "__module__", None) in COLLECTIVES:
                refuse_collective()
            return _unasked(func, args, kwargs)
        return func(*args, **kwargs)


def _is_part(x: Any) -> bool:
    """Whether this rank's shard of a tensor is not all of it."""
    return isinstance(x, DTensor) and not x._layout.replicated


def _unasked(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call that torch asked nobody about. It may still ask its argument for a number, and reads that rightly then."""
    before, asked = sys.getprofile(), []
    sys.setprofile(lambda frame, event, _: asked.append(event) if frame.f_code is dispatch.__code__ else None)
    try:
        out = func(*args, **kwargs)
    finally:
        sys.setprofile(before)
    if not asked and not isinstance(out, DTensor):  # which would be the argument itself
        raise ShardMemoryError(
            f"{describe(name_of(func), args, kwargs)} has read this rank's shard for the whole tensor, since torch "
            f"asks nobody there; give it d.full_tensor(), or a number as d.item()"
        )
    return out
