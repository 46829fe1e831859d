"""How one tensor dimension is cut: the sizes and offsets of its pieces.

A dimension split by several axes is cut axis by axis, major first, each time as `torch.chunk` cuts:
pieces of ceil(size / n), the trailing ones smaller or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch


@lru_cache(maxsize=65536)
def chunk_sizes(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of all pieces of a dimension cut by axes of `counts` ranks, major first, in row-major order.

    >>> chunk_sizes(5, (2, 2)), chunk_sizes(2, (4,))
    ((2, 1, 1, 1), (1, 1, 0, 0))
    """
    if not counts:
        return (size,)
    count, inner = counts[0], counts[1:]
    step = -(-size // count)
    pieces: list[int] = []
    for index in range(count):
        piece = min(step, max(size - index * step, 0))
        pieces.extend(chunk_sizes(piece, inner))
    return tuple(pieces)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each piece starts.

    >>> offsets((2, 1, 1, 1))
    (0, 2, 3, 4)
    """
    return tuple(accumulate(sizes, initial=0))[:-1]


def intervals(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where each piece starts and stops.

    >>> intervals((2, 1, 1))
    ((0, 2), (2, 3), (3, 4))
    """
    return tuple((start, start + size) for start, size in zip(offsets(sizes), sizes, strict=True))


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """`torch.broadcast_shapes`, which would import sympy: a third of a second in the first call of a program.

    >>> broadcast_shape((3, 1), (4,), ())
    torch.Size([3, 4])
    """
    num_dims = max(map(len, shapes), default=0)
    columns = [*zip(*((1,) * (num_dims - len(shape)) + tuple(shape) for shape in shapes), strict=True)]
    found = [next((size for size in column if size != 1), 1) for column in columns]
    if any(size not in (1, common) for column, common in zip(columns, found, strict=True) for size in column):
        raise RuntimeError(f"shapes {', '.join(str(list(shape)) for shape in shapes)} cannot be broadcast together")
    return torch.Size(found)
