"""Checksums: of the same bytes they are the same however these come, and of others they are others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shardwise.checkpoint.files.checksums import BLOCK, WORDS, Checksum

ROW = 8 * WORDS
SIZE = 2 * BLOCK + 5 * ROW + 11


def checksum(*parts: bytes | bytearray | memoryview, begin: int = 0) -> int:
    found = Checksum(begin)
    for part in parts:
        found.add(memoryview(part))
    return found.value()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, BLOCK - 1, BLOCK, BLOCK + 1, SIZE])
def test_parts_make_no_difference(data: bytes, size: int) -> None:
    chance, memory = random.Random(size), memoryview(bytearray(data[:size]))
    for _ in range(5):
        at = sorted(chance.choices(range(size + 1), k=4))
        ends = zip([0, *at], [*at, size], strict=True)
        assert checksum(*(memory[start:stop] for start, stop in ends)) == checksum(memory)


def test_they_begin_with_a_number(data: bytes) -> None:
    assert len({checksum(data[:size], begin=begin) for size in (0, 8, ROW) for begin in range(3)}) == 9


def swapped(data: bytearray, a: int, b: int, size: int) -> None:
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def flipped(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(SIZE)] ^= 1 << chance.randrange(8)


def of_words(data: bytearray, chance: random.Random) -> None:
    swapped(data, *(8 * x for x in chance.sample(range(SIZE // 8), 2)), 8)


def of_words_in_a_column(data: bytearray, chance: random.Random) -> None:
    column = 8 * chance.randrange(WORDS)
    swapped(data, *(column + ROW * x for x in chance.sample(range(SIZE // ROW), 2)), 8)


def of_rows(data: bytearray, chance: random.Random) -> None:
    swapped(data, *(ROW * x for x in chance.sample(range(SIZE // ROW), 2)), ROW)


def of_blocks(data: bytearray, chance: random.Random) -> None:
    swapped(data, 0, BLOCK, BLOCK)


def lost(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(SIZE - 4096)
    data[at : at + 4096] = bytes(4096)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(SIZE) :]


def longer(data: bytearray, chance: random.Random) -> None:
    data += bytes(1 + chance.randrange(100))


@pytest.mark.parametrize("change", [flipped, of_words, of_words_in_a_column, of_rows, of_blocks, lost, cut, longer])
def test_changes_are_found(data: bytes, change: Callable[[bytearray, random.Random], None]) -> None:
    for seed in range(10):
        changed = bytearray(data)
        change(changed, random.Random(seed))
        assert changed != data
        assert checksum(changed) != checksum(bytearray(data))


def test_words_exchanged_in_two_blocks_so_that_all_sums_stay(data: bytes) -> None:
    """Of rows, and of columns over both."""
    before = bytearray(data)
    for block, (a, b) in ((0, (b"first wo", b"second w")), (BLOCK, (b"second w", b"first wo"))):
        before[block : block + 8], before[block + 8 : block + 16] = a, b
    after = bytearray(before)
    for block in (0, BLOCK):
        swapped(after, block, block + 8, 8)
    assert after != before and checksum(after) != checksum(before)
