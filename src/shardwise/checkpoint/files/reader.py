"""Files that are read at given places, and counted; and what the operating system says when it cannot."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from shardwise.errors import CheckpointFileError, DamagedFileError


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """What the operating system refuses inside, in words that say what was being done."""
    try:
        yield
    except CheckpointFileError:
        raise
    except OSError as error:
        raise CheckpointFileError(error.errno, f"cannot {doing}: {error.strerror or error}") from error


def is_plain_name(name: object) -> bool:
    """Whether it is a file's in the same folder: no way to another, and nothing that no file can be called."""
    return isinstance(name, str) and name.isprintable() and PurePosixPath(name).name == name != ".."


class Reader:
    """An open file. `num_read` counts the bytes read so far.

    It is read by `preadv` and not mapped: of a file that is cut off meanwhile, or whose disk fails, a mapping would
    kill the process.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_read = 0
        self._scratch = bytearray()
        with explained(f"read {self.path}"):
            if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for somebody to write to it
                raise DamagedFileError("this is not a file", self.path)
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._file).st_size

    def read_into(self, memory: memoryview, offset: int, *, key: str | None = None) -> None:
        """Fill memory with the bytes from an offset on, which are there unless the file was changed meanwhile."""
        done = 0
        while done < len(memory):
            with explained(f"read {self.path}"):
                count = os.preadv(self._file, [memory[done:]], offset + done)
            if not count:
                raise DamagedFileError(
                    f"the file ends {len(memory) - done} bytes early", self.path, key=key, offset=offset
                )
            done += count
        self.num_read += done

    def read(self, offset: int, count: int) -> bytes:
        found = bytearray(count)
        self.read_into(memoryview(found), offset)
        return bytes(found)

    def scratch(self, count: int) -> bytearray:
        """Memory to read into for a moment: the same every time, so it is in the caches."""
        if len(self._scratch) < count:
            self._scratch = bytearray(count)
        return self._scratch

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Opened:
    """Files that are opened when they are first needed, and closed together; or earlier, if others are needed: a step
    of many ranks has more files than a process may have open."""

    AT_ONCE = 64

    def __init__(self) -> None:
        self._readers: OrderedDict[Path, Reader] = OrderedDict()
        self._closed = 0

    def __getitem__(self, path: Path) -> Reader:
        reader = self._readers.get(path)
        if reader is None:
            while len(self._readers) >= self.AT_ONCE:
                self._close(next(iter(self._readers)))
            reader = self._readers[path] = Reader(path)
        self._readers.move_to_end(path)
        return reader

    @property
    def num_read(self) -> int:
        """The bytes read of all of them."""
        return self._closed + sum(reader.num_read for reader in self._readers.values())

    def _close(self, path: Path) -> None:
        reader = self._readers.pop(path)
        self._closed += reader.num_read
        reader.close()

    def close(self) -> None:
        for path in list(self._readers):
            self._close(path)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
