"""Checksums of what is written: one for the bytes of each box, in row-major order.

The bytes are taken as 64-bit words, in rows of 64 KB, and 32 rows as a block. Of each block there are the sums of its
rows, which go into a CRC-32 one after the other, and the sums of its columns, which are added to those of the blocks
before times an odd number; these end what the CRC is of. So every word counts by where it is, at the speed of memory: a
CRC-32 of all bytes takes as long as to read them four times.

It finds what disks, networks and cut-off writes do to data, all but one change in four billion. It is no protection
against whoever changes data on purpose.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.files.memory import bytes_of
from shardwise.checkpoint.files.reader import Reader
from shardwise.checkpoint.files.reading import Region, are_sizes, contiguous_region, read
from shardwise.errors import DamagedFileError
from shardwise.layout import Box

CHECKSUMS = "shardwise.checksums"
"""Under this name the metadata of a safetensors file have the checksums of its tensors, as JSON."""

WORDS = 2**13
"""In a row."""

BLOCK = 2**21
"""The bytes of a block, which are read at once to be summed: so many stay in the caches meanwhile."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64


class Checksum:
    """That of bytes which come one after the other. It begins with a number.

    >>> whole, parts = Checksum(1), Checksum(1)
    >>> whole.add(memoryview(b"some bytes"))
    >>> for part in (b"some ", b"", b"bytes"):
    ...     parts.add(memoryview(part))
    >>> whole.value() == parts.value() == 0xC8C34BEC
    True
    """

    __slots__ = ("_block", "_count", "_crc", "_sums")

    def __init__(self, begin: int = 0) -> None:
        self._crc, self._count = begin, 0
        self._sums = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
        self._block = bytearray()

    def add(self, memory: memoryview) -> None:
        self._count += len(memory)
        if self._block:
            room = BLOCK - len(self._block)
            self._block += memory[:room]
            memory = memory[room:]
            if len(self._block) == BLOCK:
                self._add_block(memoryview(self._block))
                self._block = bytearray()
        whole = len(memory) // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            self._add_block(memory[start : start + BLOCK])
        self._block += memory[whole:]

    def _add_block(self, memory: memoryview) -> None:
        rows = torch.frombuffer(memory, dtype=torch.int64).view(-1, WORDS)
        of_rows = rows.sum(1)
        self._crc = zlib.crc32(bytes_of(of_rows), self._crc)
        self._sums.mul_(_FACTOR).add_(rows.sum(0))

    def value(self) -> int:
        """The last row is filled up with zeros: how many bytes there were counts as well."""
        row = WORDS * self._sums.itemsize
        if self._block:
            self._add_block(memoryview(self._block.ljust(-(-len(self._block) // row) * row, b"\0")))
            self._block = bytearray()
        return zlib.crc32(self._count.to_bytes(8, "little"), zlib.crc32(bytes_of(self._sums), self._crc))


@dataclass(frozen=True, slots=True)
class Summed:
    """A box of a tensor and its checksum."""

    box: Box
    checksum: int


def seed(key: str, dtype: str, shape: Sequence[int]) -> int:
    """What the checksums of a tensor's data begin with, so that they hold for what is said of it as well."""
    return zlib.crc32(repr((key, dtype, tuple(shape))).encode())


def as_text(sums: Mapping[str, Sequence[Summed]]) -> str:
    """For the metadata of a file. It is as long whatever the checksums are."""
    said = {key: [[*map(list, one.box), f"{one.checksum:08x}"] for one in boxes] for key, boxes in sums.items()}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def from_text(text: str) -> dict[str, list[Summed]]:
    """ValueError if it is no such text."""
    try:
        said: Any = json.loads(text)
        return {key: [_summed(*one) for one in boxes] for key, boxes in said.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checksums cannot be read: {error}") from error


def _summed(starts: list[int], sizes: list[int], checksum: str) -> Summed:
    if not are_sizes(starts) or not are_sizes(sizes):
        raise ValueError(f"{starts} and {sizes} are no box")
    return Summed((tuple(starts), tuple(sizes)), int(checksum, 16))


def check(file: Reader, region: Region, wanted: int, *, key: str, begin: int) -> None:
    """Read a region, and raise if its checksum, which begins with a number, is another."""
    found = Checksum(begin)
    block = torch.empty(min(BLOCK, region.num_bytes), dtype=torch.uint8, device="cpu")
    for part in _in_order(_as_bytes(region)):
        memory = block[: part.num_bytes].view(part.sizes)
        read(file, part, memory, key=key)
        found.add(bytes_of(memory))
    if (value := found.value()) != wanted:
        raise DamagedFileError(
            f"the data have changed since they were written: their checksum is {value:08x}, and was {wanted:08x}",
            file.path,
            key=key,
            offset=region.begin,
        )


def _as_bytes(region: Region) -> Region:
    """The bytes of a region: in one row, if they are."""
    itemsize = region.dtype.itemsize
    if region.strides == contiguous_region(0, region.sizes, region.dtype).strides:
        return Region(region.begin, (region.num_bytes,), (1,), torch.uint8)
    strides = (*(stride * itemsize for stride in region.strides), 1)
    return Region(region.begin, (*region.sizes, itemsize), strides, torch.uint8)


def _in_order(region: Region) -> Iterator[Region]:
    """A region in parts that are read at once."""
    if region.num_bytes <= BLOCK:
        yield region
        return
    count, rest = region.sizes[0], region.sizes[1:]
    rows = BLOCK * count // region.num_bytes
    zeros = (0,) * len(rest)
    for start in range(0, count, max(rows, 1)):
        part = region.box((start, *zeros), (min(max(rows, 1), count - start), *rest))
        yield from [part] if rows else _in_order(part.without_first())
