"""The memory of shards, as bytes to be read into and written from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.layout import Layout
from shardwise.layout.layout import Box
from shardwise.tensor import DTensor

_as_subclass = torch._C.TensorBase.as_subclass
_disabled = torch._C.DisableTorchFunctionSubclass

BUFFER = 4 * 2**20
"""How many bytes are in between at a time, where they cannot be read from the file in place."""


def bytes_of(x: Tensor) -> memoryview:
    """The memory that a CPU tensor spans, from its first element to its last: whoever uses it keeps the tensor. The
    tensor shows its memory as it is (`shows_memory`)."""
    assert x.device.type == "cpu" and shows_memory(x)
    count = span(x.shape, x.stride()) * x.element_size()
    if not count:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(x.data_ptr())).cast("B")


def shows_memory(x: Tensor) -> bool:
    """Not conjugated, or with the other sign: `x.conj()` is a view, of the memory of `x`."""
    return not x.is_conj() and not x.is_neg()


def in_rows(x: Tensor) -> Tensor:
    """The elements of a tensor in memory, in row-major order: the tensor itself, where they are."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements there are from the first to the last, those in between included."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def layout_of(x: Tensor) -> Layout | None:
    """None of a plain tensor."""
    return x._layout if isinstance(x, DTensor) else None


def held_shards(x: Tensor) -> list[tuple[Box, Tensor]]:
    """What the ranks held here have of a tensor: where it lies, and plain tensors that share its memory."""
    with torch.no_grad():
        if not isinstance(x, DTensor):
            whole = x.detach()
            return [(((0,) * whole.dim(), tuple(whole.shape)), whole)]
        local = x.detach().to_local()
        with _disabled():
            shards = [_as_subclass(shard, Tensor) for shard in shards_of(local)]
    return [(x._layout.box(coordinate), shard) for coordinate, shard in zip(x._layout.mesh.held, shards, strict=True)]
