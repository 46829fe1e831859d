"""Writes to shards of which some ranks hold nothing.

Torch refuses to write to elements that share memory, with each other or with some that are read, but not to write
nothing there. A rank whose shard is empty would go on alone: so it asks torch what it says to the others, on a few
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.copied_views import storage_of
from shardwise.dispatch.guarded import Guard
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.rules.kit.registry import is_empty_expanded
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass
_size = torch._C.TensorBase.size
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


class WritesToEmpty(Guard):
    """Writes to shards of which some are empty."""

    __slots__ = ("function", "positions")

    def __init__(self, function: Callable, positions: Sequence[int]) -> None:
        self.function, self.positions = function, positions

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = flat_tensors((args, kwargs))
        written = [tensors[position] for position in self.positions]
        if any(map(is_empty_expanded, written)):
            self._try(args, kwargs, _small)
        for x in written:
            if any(_overlap(x, y) for y in tensors):
                self._try(args, kwargs, _Overlapping(x))

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = flat_tensors((args, kwargs))
        for x in (tensors[position] for position in self.positions):
            if is_empty_expanded(x):
                _refuse_gradients(x)
        return out

    def _try(self, args: tuple, kwargs: dict[str, Any], stand_in: Callable[[Tensor], Tensor]) -> None:
        try:
            self.function(*map_tensors(args, stand_in), **map_tensors(kwargs, stand_in))
        except RuntimeError as error:
            if "single memory location" in str(error):
                raise
        except Exception:  # it has something against small ones, which says nothing
            return


# Elements that share their memory with each other


def _refuse_gradients(x: Tensor) -> None:
    """A backward pass through a write to elements that share memory is such a write itself, which torch refuses, even
    where it only warned of the first."""
    with _disabled():
        node = x._base.grad_fn if x._base is not None else None
        if node is not None:
            node.register_prehook(_refuse)


def _refuse(grads: Any) -> None:
    torch.zeros(()).expand(2).copy_(torch.zeros(2))


def _small(x: Tensor) -> Tensor:
    """A plain tensor with at most two indices of each dim, some of which share their memory where those of `x` do."""
    with _disabled():
        shape = x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)
        own = [min(size, 2 if step else 1) for size, step in zip(shape, x.stride(), strict=True)]
        return torch.zeros(own, dtype=x.dtype).expand([min(size, 2) for size in shape])


# Elements that share it with those of another argument


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two empty shards would share a part of their memory if they held one index where they hold none; of those
    that lie with gaps torch does not find out."""
    with _disabled():
        if x is y or 0 not in _size(x) or 0 not in _size(y) or storage_of(x) != storage_of(y):
            return False
        if not (_lies_densely(x) and _lies_densely(y)):
            return False
        (begin, end), (other_begin, other_end) = _span(x), _span(y)
    return begin < other_end and other_begin < end and (begin, end) != (other_begin, other_end)


def _span(x: Tensor) -> tuple[int, int]:
    begin = int(x.storage_offset())
    return begin, begin + torch.Size(max(n, 1) for n in _size(x)).numel()


def _lies_densely(x: Tensor) -> bool:
    sizes = [max(n, 1) for n in _size(x)]
    return _is_dense(torch.empty_strided(sizes, x.stride(), device="meta"))


class _Overlapping:
    """Stand-ins: two elements for what is written to, two for what overlaps it, of which they share one, and one for
    everything else."""

    def __init__(self, written: Tensor) -> None:
        self.written = written
        self.memory = torch.zeros(3, dtype=written.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        with _disabled():
            shape = [1] * x.dim()
            if x is self.written:
                return self.memory[1:].view(*shape[1:], 2)
            if _overlap(self.written, x):
                return self.memory[:2].view(*shape[1:], 2)
            return torch.zeros(shape, dtype=x.dtype)
