"""How the whole of a DTensor would lie in memory on one device, as its shards show it."""

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


def lies_plainly(x: Tensor) -> bool:
    """Whether the shards lie in memory as fresh tensors do, so that the whole does."""
    if "_strides" in x.__dict__:
        return False
    with _disabled():
        shards = (x, *x.__dict__.get("_peers", ()))
        return all(_lies_plainly(_size(shard), shard.stride()) for shard in shards)


def _lies_plainly(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Of what is empty no strides tell anything."""
    return 0 in sizes or fresh_strides(sizes) == steps


def fresh_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    step, found = 1, []
    for size in reversed(sizes):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def whole_strides(x: Any) -> tuple[int, ...]:
    """The strides of the tensor on one device."""
    if "_strides" in x.__dict__:
        return x._strides
    with _disabled():
        return strides_shown(x._layout.shape, _size(x), x.stride())


def whole_lies_plainly(x: Tensor) -> bool:
    """Whether the tensor on one device lies in memory as a fresh one does. The step along a dim of one index is never
    taken."""
    shape, steps = (x._layout.shape, whole_strides(x)) if isinstance(x, DTensor) else (x.shape, x.stride())
    return all(a == b or size == 1 for a, b, size in zip(steps, fresh_strides(shape), shape, strict=True))


def strides_shown(shape: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape, as a shard shows them: from the innermost dim outwards, each dim steps
    over as many pieces of the next inner one as it does in the shard. Of dims with equal strides, one with a single
    index is within the other. An empty shard shows nothing: then the whole lies plainly, or is a `Part` that knows."""
    if 0 in sizes:
        return fresh_strides(shape)
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


def on_one_device(x: Any) -> Tensor:
    """A meta tensor that lies as the whole would."""
    shape = x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)
    with _disabled():
        strides = whole_strides(x) if isinstance(x, DTensor) else x.stride()
        return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")


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
