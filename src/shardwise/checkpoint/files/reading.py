"""Parts of stored tensors, read into memory: only what is wanted, and in place where that is possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.files.memory import BUFFER, bytes_of, shows_memory, span
from shardwise.checkpoint.files.reader import Reader

SLACK = 1.04
"""How many bytes may be read for each that is wanted: gaps that are small are read over."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements in a file: where the first one begins, in bytes, and in elements how many there are and how far apart,
    per dim. Any view of a stored tensor is one: a part, a transpose, one of the parts of a fused weight."""

    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What is wanted."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def box(self, starts: Sequence[int], sizes: Sequence[int]) -> Region:
        """A part of it."""
        ahead = sum(start * stride for start, stride in zip(starts, self.strides, strict=True))
        return Region(self.begin + ahead * self.dtype.itemsize, tuple(sizes), self.strides, self.dtype)

    def without_first(self) -> Region:
        """Without its first dim, of which it has one index."""
        return Region(self.begin, self.sizes[1:], self.strides[1:], self.dtype)


MOST_DIMS = 64
"""What numpy has; torch's own kernels have no more."""


def is_possible(shape: Sequence[int]) -> bool:
    """Whether a tensor may have this shape: how far its elements are apart is counted in 64 bits, even of one without
    elements."""
    return len(shape) <= MOST_DIMS and min(shape, default=0) >= 0 and math.prod(max(size, 1) for size in shape) < 2**63


def are_sizes(found: Any, kind: type[list] | type[tuple] = list) -> bool:
    """Whether something that was read is a list of sizes."""
    return isinstance(found, kind) and all(type(size) is int and 0 <= size < 2**63 for size in found)


def contiguous_region(begin: int, sizes: Sequence[int], dtype: torch.dtype) -> Region:
    """All of a tensor that is stored in row-major order."""
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return Region(begin, tuple(sizes), tuple(strides), dtype)


def read(file: Reader, region: Region, target: Tensor, *, key: str | None = None) -> None:
    """Fill a plain tensor with a region of its shape, converted to its dtype."""
    if math.prod(region.sizes) == 0:
        return
    order = sorted(range(len(region.sizes)), key=lambda dim: -region.strides[dim])
    order = [dim for dim in order if region.sizes[dim] > 1]
    sizes, strides = [[what[dim] for dim in order] for what in (region.sizes, region.strides)]
    reading = _Reading(file, key, region.dtype)
    with torch.no_grad():
        narrow = target[tuple(slice(None) if size > 1 else 0 for size in region.sizes)]
        reading.fill(region.begin, sizes, strides, narrow.permute([sorted(order).index(dim) for dim in order]))


@dataclass(slots=True)
class _Reading:
    """Dims come in the order of the file: the last ones are closest together."""

    file: Reader
    key: str | None
    dtype: torch.dtype

    def fill(self, begin: int, sizes: list[int], strides: list[int], target: Tensor) -> None:
        """Piece by piece, if it cannot be read in place and is more than a buffer holds."""
        if not sizes:
            target = target.view(())
        at = _dense_from(sizes, strides)
        if self._has_the_same_order(sizes[at:], strides[at:], target, at):
            self._read_in_place(begin, sizes, strides, target, at)
        elif (needed := self._staged_bytes(sizes, strides, at)) <= BUFFER or not sizes:
            self._staged(begin, sizes, strides, target, at)
        elif (rows := BUFFER * sizes[0] // needed) > 0:
            for start in range(0, sizes[0], rows):
                count = min(rows, sizes[0] - start)
                ahead = begin + start * strides[0] * self.dtype.itemsize
                self.fill(ahead, [count, *sizes[1:]], strides, target.narrow(0, start, count))
        else:
            for row in range(sizes[0]):
                self.fill(begin + row * strides[0] * self.dtype.itemsize, sizes[1:], strides[1:], target[row])

    def _has_the_same_order(self, sizes: list[int], strides: list[int], target: Tensor, at: int) -> bool:
        """Whether what is read at once lies in memory as it does in the file."""
        if target.device.type != "cpu" or target.dtype != self.dtype or self.dtype == torch.bool:
            return False
        if not shows_memory(target):
            return False
        rows = list(itertools.accumulate([1, *reversed(sizes[1:])], lambda a, b: a * b))[::-1] if sizes else []
        return strides == rows and list(target.stride())[at:] == rows

    def _read_in_place(self, begin: int, sizes: list[int], strides: list[int], target: Tensor, at: int) -> None:
        memory, itemsize = bytes_of(target), self.dtype.itemsize
        run = math.prod(sizes[at:]) * itemsize
        for there, here in zip(steps(sizes[:at], strides), steps(sizes[:at], target.stride()), strict=True):
            start = here * itemsize
            self.file.read_into(memory[start : start + run], begin + there * itemsize, key=self.key)

    def _staged_bytes(self, sizes: list[int], strides: list[int], at: int) -> int:
        return math.prod(sizes[:at]) * span(sizes[at:], strides[at:]) * self.dtype.itemsize

    def _staged(self, begin: int, sizes: list[int], strides: list[int], target: Tensor, at: int) -> None:
        """By way of a buffer, in which the stretches that are read at once follow one another."""
        itemsize, width = self.dtype.itemsize, span(sizes[at:], strides[at:])
        count, run = math.prod(sizes[:at]) * width * itemsize, width * itemsize
        scratch = self.file.scratch(count)
        memory, buffer = memoryview(scratch), torch.frombuffer(scratch, dtype=torch.uint8, count=count)
        for number, there in enumerate(steps(sizes[:at], strides)):
            self.file.read_into(memory[number * run : (number + 1) * run], begin + there * itemsize, key=self.key)
        outer = [math.prod(sizes[dim + 1 : at]) * width for dim in range(at)]
        found = buffer if self.dtype == torch.bool else buffer.view(self.dtype)
        found = found.as_strided(sizes, [*outer, *strides[at:]])
        target.copy_(found.ne(0) if self.dtype == torch.bool else found)  # any byte but zero is true


def _dense_from(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The first dim from which on all is read at once, gaps included."""
    at, width, wanted = len(sizes), 1, 1
    for dim in reversed(range(len(sizes))):
        width += (sizes[dim] - 1) * strides[dim]
        wanted *= sizes[dim]
        if width > SLACK * wanted:
            break
        at = dim
    return at


def steps(sizes: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """How far each index is from the first, in row-major order."""
    if not sizes:
        return iter((0,))
    steps = [range(0, size * stride, stride) for size, stride in zip(sizes, strides)]
    return map(sum, itertools.product(*steps)) if len(steps) > 1 else iter(steps[0])
