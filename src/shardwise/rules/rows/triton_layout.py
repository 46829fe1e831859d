"""Where rows lie in memory, and how many of them, and of their elements, one Triton program looks at.

A program has a row, or some rows where these lie side by side in memory; a long row is shared by several programs where
there are few rows. Rows may have any strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))

WORD = 16
"""Bytes that a thread reads at once, the most that a GPU reads by one instruction."""

THREADS, WORDS = 128, 4
"""Of a program that goes through a row, and the words that each thread waits for together."""

WRITING_THREADS, WORDS_WRITTEN = 256, 8
"""Of a program that writes a tile as well, and the words that each thread has of it."""

SIDE_BY_SIDE, FEW = 32, 64
"""Rows, and classes, that a program looks at together where neighbours in memory are of different rows."""

MOST_ROWS = (1 << 28) - 1
"""Up to five numbers of each row are counted in 32 bits."""

ENOUGH = 512
"""So many programs keep a device busy. Where there are fewer rows, each is shared by several."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where rows are in some tensors, and how many rows and classes a program looks at together. It is the same object
    for tensors of the same dtypes, shapes and strides."""

    num_rows: int
    num_classes: int
    places: tuple[int, ...]
    """The sizes of the inner two of three batch dims; of each tensor the strides along these, and along the row."""
    rows: int
    lanes: int
    """Classes that a program going through rows looks at by one instruction."""
    num_warps: int
    shares: tuple[int, int]
    """Programs, if each goes through a share of some rows."""
    share: int
    """The classes of one."""
    classes: int
    """Of a tile."""
    tile_warps: int
    tiles: tuple[int, int]
    """Programs, if each writes one tile."""


def layout_of(dim: int, *tensors: Tensor) -> Layout | None:
    """None if it is left to torch: in double precision, if more than three numbers find a row, or of too many rows."""
    return _layout(dim, tensors[0].shape, tuple([(x.stride(), x.dtype) for x in tensors]))


@lru_cache(4096)
def _layout(dim: int, shape: torch.Size, tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> Layout | None:
    batch = [d for d in range(len(shape)) if d != dim]
    sizes, steps = [shape[d] for d in batch], [[stride[d] for d in batch] for stride, _ in tensors]
    at = 0
    while at + 1 < len(sizes):  # two dims that are one in all tensors
        if all(step[at] == step[at + 1] * sizes[at + 1] for step in steps):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
            steps = [[*step[:at], *step[at + 1 :]] for step in steps]
        else:
            at += 1
    if len(sizes) > 3 or math.prod(sizes) > MOST_ROWS or any(dtype == torch.float64 for _, dtype in tensors):
        return None
    missing = 3 - len(sizes)
    strides = [(*[0] * missing, *step, stride[dim]) for step, (stride, _) in zip(steps, tensors, strict=True)]
    sizes = [1] * missing + sizes
    longest = triton.next_power_of_2(max(shape[dim], 1))
    if all(stride[3] == 1 for stride in strides):
        rows, word = 1, WORD // max(dtype.itemsize for _, dtype in tensors)
        lanes = min(longest, THREADS * word)
        classes = min(longest, WRITING_THREADS * WORDS_WRITTEN * word)
        tile_warps = max(1, min(WRITING_THREADS, classes // word) // 32)
    else:
        rows, lanes = SIDE_BY_SIDE, min(longest, FEW)
        classes, tile_warps = lanes, 4
    places = (sizes[1], sizes[2], *(step for stride in strides for step in stride))
    num_warps = max(1, min(THREADS, rows * lanes) // 32)
    num_rows, num_classes, least = math.prod(sizes), shape[dim], WORDS * lanes
    blocks, parts = ceil_div(num_rows, rows), ceil_div(num_classes, least)
    share = ceil_div(parts, max(1, min(parts, ceil_div(ENOUGH, max(blocks, 1))))) * least
    shares, tiles = (blocks, max(1, ceil_div(num_classes, max(share, 1)))), (blocks, ceil_div(num_classes, classes))
    through = rows, lanes, num_warps, shares, share
    return Layout(num_rows, num_classes, places, *through, classes, tile_warps, tiles)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit
def beginning(row, size_1, size_2, step_0, step_1, step_2):
    """How far from the first element a row begins."""
    outer = row // size_2
    return (outer // size_1) * step_0 + (outer % size_1) * step_1 + (row % size_2) * step_2


@triton.jit
def places(begin, column, step, ROWS: tl.constexpr):
    """Where the columns of rows are. Those of a single row follow one another."""
    if ROWS == 1:
        return begin[:, None] + column[None, :]
    else:
        return begin[:, None] + column[None, :].to(tl.int64) * step


@triton.jit
def read(begin, column, step, exists, last, other, ROWS: tl.constexpr):
    is_there = exists[:, None] & (column < last)[None, :]
    return tl.load(places(begin, column, step, ROWS), mask=is_there, other=other).to(tl.float32)


@triton.jit
def exponential(x):
    return tl.exp2(x * LOG2_E)
