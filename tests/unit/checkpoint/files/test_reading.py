"""Regions of files, read into any memory: what arrives, and how many bytes are read for it."""

from __future__ import annotations

import ctypes
import errno
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.files import reading, writing
from shardwise.checkpoint.files.reader import Opened, Reader
from shardwise.checkpoint.files.reading import Region, contiguous_region, read
from shardwise.checkpoint.files.writing import make_file, open_to_write
from shardwise.errors import CheckpointFileError, DamagedFileError
from shardwise.local import part

AHEAD = 3
"""Bytes before the tensor: nothing need be aligned in a file."""


def stored(x: Tensor, folder: Path) -> tuple[Path, Region]:
    (file := folder / "x").write_bytes(b"abc" + bytes(x.reshape(-1).view(torch.uint8).tolist()))
    return file, contiguous_region(AHEAD, x.shape, x.dtype)


def target(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous, transposed, or a part of something larger."""
    match chance.randrange(3):
        case 0:
            return torch.empty(shape, dtype=dtype)
        case 1:
            return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    return part(torch.empty([size + 2 for size in shape], dtype=dtype), [1] * len(shape), shape)


@pytest.mark.parametrize("buffer", [1, 40, 3000, 2**20])
def test_any_part_in_any_order_into_any_memory(buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BUFFER", buffer)
    chance, x = random.Random(buffer), torch.randn(11, 1, 8, 9)
    file, whole = stored(x, tmp_path)
    with Reader(file) as reader:
        for _ in range(80):
            starts = [chance.randrange(size) for size in x.shape]
            sizes = [chance.randint(0, size - start) for size, start in zip(x.shape, starts, strict=True)]
            order, box = chance.sample(range(4), 4), whole.box(starts, sizes)
            region = Region(
                box.begin, *(tuple(some[dim] for dim in order) for some in (box.sizes, box.strides)), x.dtype
            )
            into = target(chance, region.sizes, chance.choice((torch.float32, torch.float64, torch.bfloat16)))
            before = reader.num_read
            read(reader, region, into)
            expected = part(x, starts, sizes).permute(order)
            assert torch.equal(into, expected.to(into.dtype))
            assert reader.num_read - before <= 1.05 * expected.numel() * 4


def test_small_gaps_are_read_over_and_large_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(2000.0).view(20, 100)
    file, whole = stored(x, tmp_path)
    calls: list[int] = []
    original = Reader.read_into
    monkeypatch.setattr(
        Reader, "read_into", lambda self, memory, *a, **k: calls.append(len(memory)) or original(self, memory, *a, **k)
    )
    with Reader(file) as reader:
        for width, expected in ((100, [8000]), (97, [19 * 400 + 97 * 4]), (50, [200] * 20)):
            into = torch.empty(20, width)
            read(reader, whole.box((0, 0), (20, width)), into)
            assert torch.equal(into, x[:, :width]) and calls == expected
            calls.clear()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.float8_e4m3fn, torch.int64, torch.uint16])
def test_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randint(0, 2, (4, 6)).to(dtype)
    file, whole = stored(x, tmp_path)
    with Reader(file) as reader:
        for starts, sizes in (((0, 0), (4, 6)), ((1, 2), (2, 3))):
            into = torch.empty(sizes, dtype=dtype)
            read(reader, whole.box(starts, sizes), into)
            assert torch.equal(into.view(torch.uint8), part(x, starts, sizes).contiguous().view(torch.uint8))


def test_any_byte_but_zero_is_true(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc\0\1\2\xff")
    into = torch.empty(4, dtype=torch.bool)
    with Reader(tmp_path / "x") as reader:
        read(reader, contiguous_region(AHEAD, (4,), torch.bool), into)
    assert into.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_repeated_elements_are_read_once(tmp_path: Path) -> None:
    x = torch.arange(5.0)
    file, whole = stored(x, tmp_path)
    with Reader(file) as reader:
        into = torch.empty(3, 5)
        read(reader, Region(whole.begin, (3, 5), (0, 1), x.dtype), into)
        assert torch.equal(into, x.expand(3, 5)) and reader.num_read == 20


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    file, whole = stored(torch.arange(6.0), tmp_path)
    with Reader(file) as reader:
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(DamagedFileError, match=r"x, at byte 3, key 'w': the file ends 5 bytes early") as error:
            read(reader, whole, torch.empty(6), key="w")
    assert (error.value.key, error.value.offset) == ("w", 3)


# Writing


@pytest.mark.parametrize("buffer", [1, 40, 2**20])
def test_any_part_is_written_from_any_memory(buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "BUFFER", buffer)
    chance, x = random.Random(buffer), torch.randn(7, 5, 6)
    file, whole = tmp_path / "y", contiguous_region(AHEAD, x.shape, x.dtype)
    make_file(file, AHEAD + 4 * x.numel())
    with open_to_write(file) as writer:
        for row in range(7):
            for starts, sizes in (((row, 0, 0), (1, 5, 2)), ((row, 0, 2), (1, 5, 4))):
                into = target(chance, sizes, x.dtype)
                into.copy_(part(x, starts, sizes))
                again = writer.write_tensor(whole.box(starts, sizes), into)
                assert again == writer.write_tensor(whole.box(starts, sizes), part(x, starts, sizes).contiguous())
    assert file.read_bytes() == bytes(3) + bytes(x.view(-1).view(torch.uint8).tolist())


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match=r"cannot write .*nowhere/x: No such file or directory"):
        make_file(tmp_path / "nowhere" / "x")
    make_file(tmp_path / "x")
    with pytest.raises(CheckpointFileError, match="File exists"):
        make_file(tmp_path / "x")


@pytest.mark.parametrize(
    ("says", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EOPNOTSUPP, False), (None, False)]
)
def test_room_for_a_file(says: int | None, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a disk that is full one hears at once; one that cannot reserve room has it as it is written to."""
    asked: list[int] = []

    def fallocate(file: int, mode: int, offset: ctypes.c_int64, size: ctypes.c_int64) -> int:
        asked.append(size.value)
        ctypes.set_errno(says or 0)
        return -1

    monkeypatch.setattr(writing, "_fallocate", None if says is None else fallocate)
    if is_full:
        with pytest.raises(CheckpointFileError, match=r"cannot write .*x: ") as error:
            writing.make_file(tmp_path / "x", 5000)
        assert error.value.errno == says
    else:
        writing.make_file(tmp_path / "x", 5000)
        assert (tmp_path / "x").read_bytes() == bytes(5000)
    assert asked == ([] if says is None else [5000])


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opened, "AT_ONCE", 2)
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else None
    before = len(list(folder.iterdir())) if folder else 0
    with Opened() as files:
        for number in (0, 1, 2, 3, 0, 3):
            (tmp_path / str(number)).write_bytes(bytes([number] * 5))
            assert files[tmp_path / str(number)].read(1, 2) == bytes([number] * 2)
            assert folder is None or len(list(folder.iterdir())) <= before + 2
        assert files.num_read == 12
    assert folder is None or len(list(folder.iterdir())) == before
