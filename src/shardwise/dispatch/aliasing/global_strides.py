"""Global strides: those that the tensor would have on one device, inferred from its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ranked, shards_of
from shardwise.tensor import DTensor, kernels_see, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_size = torch._C.TensorBase.size
_clone = torch._C.TensorBase.clone


def shards_contiguous(x: Tensor) -> bool:
    """Whether all shards held here are contiguous, so that the tensor would be on one device."""
    if "_strides" in x.__dict__:
        return False
    with _disabled():
        return all(_is_contiguous(_size(shard), shard.stride()) for shard in shards_of(x))


def _is_contiguous(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Strides of what is empty say nothing."""
    return 0 in sizes or contiguous_strides(sizes) == steps


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    step, found = 1, []
    for size in reversed(sizes):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def global_strides(x: Any) -> tuple[int, ...]:
    """The strides of the tensor on one device."""
    if "_strides" in x.__dict__:
        return x._strides
    with _disabled():
        return inferred_strides(x._layout.shape, _size(x), x.stride())


def globally_contiguous(x: Tensor) -> bool:
    """Whether the tensor would be contiguous on one device. The stride of a dim with one index does not count."""
    shape, steps = (x._layout.shape, global_strides(x)) if isinstance(x, DTensor) else (x.shape, x.stride())
    return all(a == b or size == 1 for a, b, size in zip(steps, contiguous_strides(shape), shape, strict=True))


def inferred_strides(shape: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape, inferred from a shard's: from the innermost dim outwards, each dim steps
    over as many pieces of the next inner one as it does in the shard. Of dims with equal strides, one with a single
    index is the inner one. An empty shard says nothing: the tensor is contiguous, or a `KeepsStrides`."""
    if 0 in sizes:
        return contiguous_strides(shape)
    strides = [0] * len(shape)
    inner: int | None = None
    for dim in sorted((d for d in range(len(shape)) if steps[d]), key=lambda d: (steps[d], sizes[d] > 1, -d)):
        strides[dim] = steps[dim]
        if inner is not None:
            pieces, rest = divmod(steps[dim], steps[inner] * max(sizes[inner], 1))
            if rest:  # a part of a dim that is whole on every rank
                strides[dim] = steps[dim] * strides[inner] // steps[inner]
            else:
                strides[dim] = pieces * strides[inner] * shape[inner]
        if shape[dim] > 1:
            inner = dim
    return tuple(strides)


def shows(shard: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these global strides are inferred from a shard, where they say something."""
    with _disabled():
        found = inferred_strides(shape, _size(shard), shard.stride())
    return all(a == b or size == 1 for a, b, size in zip(found, strides, shape, strict=True))


META = torch.device("meta")


def on_one_device(x: Any, device: torch.device = META) -> Tensor:
    """A tensor of the global shape and strides, without data, or full of zeros."""
    shape = x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)
    with _disabled():
        strides = global_strides(x) if isinstance(x, DTensor) else x.stride()
        made = torch.empty_strided(shape, strides, dtype=x.dtype, device=device)
        return made if device is META else made.zero_()


def copied(x: DTensor, memory_format: torch.memory_format = torch.contiguous_format) -> DTensor:
    """A copy, shard by shard."""
    if "_peers" not in x.__dict__:
        made: Any = _on_shard(_clone, (), (kernels_see(x),), {"memory_format": memory_format})
        made.__class__ = DTensor
        made.__dict__["_layout"] = x._layout
        return made
    with _disabled():
        shards = [shard.clone(memory_format=memory_format) for shard in shards_of(x)]
    return wrap(ranked(shards), x._layout)
