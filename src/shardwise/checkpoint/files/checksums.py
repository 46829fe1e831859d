"""Checksums of what is written: CRC-32 of the bytes of each box, in row-major order.

It finds what disks, networks and cut-off writes do to data: any change of up to 32 bits in a row, and of others all but
one in four billion. It is no protection against whoever changes data on purpose.
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
from shardwise.checkpoint.files.reading import Region, read
from shardwise.errors import DamagedFileError
from shardwise.layout import Box

CHECKSUMS = "shardwise.crc32"
"""Under this name the metadata of a safetensors file have the checksums of its tensors, as JSON."""


AT_ONCE = 2**21
"""How many bytes are read at a time to be summed: so many stay in the caches meanwhile."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A box of a tensor and its checksum."""

    box: Box
    crc: int


def seed(key: str, dtype: str, shape: Sequence[int]) -> int:
    """What the checksums of a tensor's data begin with, so that they hold for what is said of it as well."""
    return zlib.crc32(repr((key, dtype, tuple(shape))).encode())


def as_text(sums: Mapping[str, Sequence[Summed]]) -> str:
    """For the metadata of a file. It is as long whatever the checksums are."""
    said = {key: [[*map(list, one.box), f"{one.crc:08x}"] for one in boxes] for key, boxes in sums.items()}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def from_text(text: str) -> dict[str, list[Summed]]:
    """ValueError if it is no such text."""
    try:
        said: Any = json.loads(text)
        return {key: [_summed(*one) for one in boxes] for key, boxes in said.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checksums cannot be read: {error}") from error


def _summed(starts: list[int], sizes: list[int], crc: str) -> Summed:
    return Summed((tuple(map(int, starts)), tuple(map(int, sizes))), int(crc, 16))


def check(file: Reader, region: Region, crc: int, *, key: str, begin: int) -> None:
    """Read a region, and raise if its checksum, which begins with a number, is another."""
    found = begin
    block = torch.empty(min(AT_ONCE, region.num_bytes), dtype=torch.uint8)
    for part in _in_order(_as_bytes(region)):
        memory = block[: part.num_bytes].view(part.sizes)
        read(file, part, memory, key=key)
        found = zlib.crc32(bytes_of(memory), found)
    if found != crc:
        raise DamagedFileError(
            f"the data have changed since they were written: their checksum is {found:08x}, and was {crc:08x}",
            file.path,
            key=key,
            offset=region.begin,
        )


def _as_bytes(region: Region) -> Region:
    itemsize = region.dtype.itemsize
    strides = (*(stride * itemsize for stride in region.strides), 1)
    return Region(region.begin, (*region.sizes, itemsize), strides, torch.uint8)


def _in_order(region: Region) -> Iterator[Region]:
    """A region in parts that are read at once."""
    if region.num_bytes <= AT_ONCE:
        yield region
        return
    count, rest = region.sizes[0], region.sizes[1:]
    rows = AT_ONCE * count // region.num_bytes
    zeros = (0,) * len(rest)
    for start in range(0, count, max(rows, 1)):
        part = region.box((start, *zeros), (min(max(rows, 1), count - start), *rest))
        yield from [part] if rows else _in_order(part.without_first())
