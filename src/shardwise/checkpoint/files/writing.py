"""Tensors written into files at given places, and on the way their checksums."""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from shardwise.checkpoint.files.checksums import Checksum
from shardwise.checkpoint.files.memory import BUFFER, bytes_of, in_rows, shows_memory
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.files.reading import Region, steps


class Writer:
    """A file that is there already, open to be written at given places. What is written is on the disk when it is
    closed without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(f"write {path}"):
            self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, memory: memoryview | bytes, offset: int) -> None:
        left = memoryview(memory)
        with explained(f"write {self.path}"):
            while len(left):
                count = os.pwrite(self._file, left, offset)
                left, offset = left[count:], offset + count

    def write_tensor(self, region: Region, x: Tensor, begin: int = 0) -> int:
        """Write a tensor where a region of its shape lies. What is returned is the checksum of its bytes in row-major
        order, which begins with a number."""
        checksum = Checksum(begin)
        self._write(region, x, checksum)
        return checksum.value()

    def _write(self, region: Region, x: Tensor, checksum: Checksum) -> None:
        if not x.numel():
            return
        if x.device.type == "cpu" and x.is_contiguous() and shows_memory(x):
            self._write_memory(region, x, checksum)
            return
        if x.numel() * x.element_size() <= BUFFER:
            self._write_memory(region, in_rows(x).cpu(), checksum)
            return
        rows = max(1, BUFFER * len(x) // (x.numel() * x.element_size()))
        rest = (0,) * (x.dim() - 1)
        for start in range(0, len(x), rows):
            some = x[start : start + rows]
            part = region.box((start, *rest), tuple(some.shape))
            self._write(part.without_first() if rows == 1 else part, some[0] if rows == 1 else some, checksum)

    def _write_memory(self, region: Region, x: Tensor, checksum: Checksum) -> None:
        memory, itemsize, at = bytes_of(x), x.element_size(), len(region.sizes)
        while at and region.strides[at - 1] == math.prod(region.sizes[at:]):
            at -= 1
        run = math.prod(region.sizes[at:]) * itemsize
        for number, there in enumerate(steps(region.sizes[:at], region.strides)):
            self.write(memory[number * run : (number + 1) * run], region.begin + there * itemsize)
        checksum.add(memory)

    def close(self) -> None:
        os.close(self._file)

    def flush(self) -> None:
        """Have all that was written on the disk."""
        with explained(f"write {self.path}"):
            os.fsync(self._file)


@contextmanager
def open_to_write(path: Path) -> Iterator[Writer]:
    """What was written is on the disk when the block ends."""
    writer = Writer(path)
    try:
        yield writer
        writer.flush()
    finally:
        writer.close()


def make_file(path: Path, size: int = 0) -> None:
    """A new file of some size, which nothing was written to yet. Most disks say here if they have no room for it."""
    with explained(f"write {path}"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(file, size)
            _reserve(file, size)
        finally:
            os.close(file)


_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
"""Linux has it. `os.posix_fallocate` writes zeros, block by block, where a file system cannot reserve room."""


def _reserve(file: int, size: int) -> None:
    """Have the disk keep room for a file: several ranks write to one that has it half as fast again. If it cannot, it
    finds room as it is written to."""
    if size and _fallocate is not None and _fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def write_file(path: Path, text: bytes) -> None:
    """A new file with some content."""
    make_file(path)
    with open_to_write(path) as file:
        file.write(text, 0)


def flush_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    with explained(f"write {path}"):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
