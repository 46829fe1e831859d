"""What a move costs, in bytes-equivalents on the wire: the one price list of planner and dispatch."""

from __future__ import annotations

import math

from shardwise.comm.ring import ring_bytes
from shardwise.layout import Mesh

LATENCY = 50_000.0
"""Starting a collective costs as much as sending this many bytes."""

LOCAL = 1.0
"""A step without communication is not free, so that doing nothing is always cheaper."""

_BYTES = 4  # per element: layouts know no dtype, and only ratios matter


def wire_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends in one transition, by the ring algorithms, of a value that has `size` bytes where it
    is whole along the axes."""
    return 0.0 if kind in ("nothing", "slice", "mask", "pad") else ring_bytes(kind, size, ranks)


def transition_cost(kind: str, elements: float, ranks: int) -> float:
    """The price of one transition of a value that has `elements` elements where it is whole along the axes."""
    if ranks == 1 and kind != "nothing":
        return LOCAL
    size = elements * _BYTES
    match kind:
        case "nothing":
            return 0.0
        case "slice" | "mask" | "pad":
            return LOCAL + size * 1e-4
    return LATENCY + wire_bytes(kind, size, ranks)


def group_size(mesh: Mesh, axes: tuple[int, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
