"""What `torch.save` wrote: a zip archive of a pickle, which is read with the few names that make tensors, and of the
bytes of tensors, each record with a checksum. Nothing here runs code that a file names."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.files.memory import BUFFER
from shardwise.checkpoint.files.reader import Reader
from shardwise.errors import CheckpointError, DamagedFileError

Keys = tuple[str | int, ...]
"""Where in nested dicts and lists a value is."""


class Section(io.RawIOBase):
    """A part of a file, read as a file of its own."""

    def __init__(self, file: Reader, offset: int = 0, length: int | None = None) -> None:
        self._file, self._offset = file, offset
        self._length = file.size - offset if length is None else length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence], 0)
        return self._at

    def read(self, count: int = -1, /) -> bytes:
        left = max(self._length - self._at, 0)
        found = self._file.read(self._offset + self._at, left if count < 0 else min(count, left))
        self._at += len(found)
        return found

    def readinto(self, buffer: Any, /) -> int:
        found = self.read(memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(found)] = found
        return len(found)


_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError, RuntimeError)
"""What is raised by archives that are none, or are damaged, or encrypted."""


class Record(NamedTuple):
    """A part of an archive: where it begins, and how many bytes it holds."""

    name: str
    offset: int
    num_bytes: int


class Saved(NamedTuple):
    """A value that torch.save wrote into a part of a file; None: all of it."""

    file: Reader
    offset: int = 0
    length: int | None = None
    key: str | None = None

    def load(self) -> Any:
        """The value, if it is made of tensors, numbers, text, and lists and dicts of these."""
        try:
            if not self.offset and self.length is None:  # the memory of tensors is read when it is looked at
                return torch.load(self.file.path, map_location="cpu", weights_only=True, mmap=True)
            return torch.load(self._open(), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if "Unsupported" not in str(error) and "GLOBAL" not in str(error):
                raise self._damaged(error) from error
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{self._place()} holds more than tensors, numbers, text, and lists and dicts of these, and is not "
                f"loaded: that would run code which the file names{f', {named[1]}' if named else ''}"
            ) from None  # torch would advise to run it
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # torch raises what happens to come up
            raise self._damaged(error) from error

    def records(self) -> list[Record]:
        """What the archive has."""
        try:
            with zipfile.ZipFile(self._open()) as archive:
                return [Record(one.filename, one.header_offset, one.file_size) for one in archive.infolist()]
        except CheckpointError:
            raise
        except _NO_ARCHIVE as error:
            raise self._damaged(error) from error

    def check(self, *records: Record, key: str | None = None) -> None:
        """Compare records with their checksums; all of them, if none is named. `key` is what lies in them."""
        offset = self.offset
        try:
            with zipfile.ZipFile(self._open()) as archive:
                for name, begin in [one[:2] for one in records] or [(name, 0) for name in archive.namelist()]:
                    offset = self.offset + begin
                    with archive.open(name) as record:
                        while record.read(BUFFER):
                            pass
        except CheckpointError:
            raise
        except _NO_ARCHIVE as error:
            if "CRC" not in str(error):
                raise self._damaged(error) from error
            raise DamagedFileError(
                f"the data have changed since they were written: {name} has another checksum",
                self.file.path,
                key=key or self.key,
                offset=offset,
            ) from error

    def _open(self) -> io.BufferedReader:
        return io.BufferedReader(Section(self.file, self.offset, self.length))

    def _damaged(self, error: Exception) -> DamagedFileError:
        what = f"torch.save wrote no such thing: {_first_line(error)}"
        return DamagedFileError(what, self.file.path, key=self.key, offset=self.offset)

    def _place(self) -> str:
        return f"{self.file.path}" if self.key is None else f"{self.file.path}, key {self.key!r},"


def _first_line(error: Exception) -> str:
    """What is wrong, without torch's advice to load the file in another way."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error) or type(error).__name__
    return text.splitlines()[0]


# Nested values


def leaves(value: Any, keys: Keys = (), *, tensor: type = Tensor) -> Iterator[tuple[Keys, Any]]:
    """What is in nested dicts, and in lists that have tensors or dicts, each with where it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*keys, key if isinstance(key, (str, int)) else str(key)), tensor=tensor)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (tensor, Mapping)) for item in value):
        for at, item in enumerate(value):
            yield from leaves(item, (*keys, at), tensor=tensor)
    else:
        yield keys, value


def key_of(keys: Keys) -> str:
    """As torch.distributed.checkpoint names what is in nested dicts."""
    return ".".join(map(str, keys)) or "value"


def nested(values: Mapping[Keys, Any]) -> Any:
    """Dicts, and lists where all keys are numbers in a row, of values by where they are.

    >>> nested({("a", "b"): 1, ("c", 0): 2, ("c", 1): 3})
    {'a': {'b': 1}, 'c': [2, 3]}
    """
    if () in values:
        return values[()]
    parts: dict[str | int, dict[Keys, Any]] = {}
    for (first, *rest), value in values.items():
        parts.setdefault(first, {})[tuple(rest)] = value
    made = {name: nested(part) for name, part in parts.items()}
    return list(made.values()) if list(made) == list(range(len(made))) and made else made
