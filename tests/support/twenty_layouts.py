"""Twenty ways for a tensor of three dims to lie on a mesh of two axes: whole, uneven, empty, nested in either order, in
pieces of any size."""

from __future__ import annotations

import math
import random
from typing import Any

from layouts import random_pieces

import shardwise as sw
from shardwise.checkpoint.pieces import pieces
from shardwise.layout import Layout

SHAPE = (5, 7, 3)

WAYS: list[dict[int, tuple[int, ...]]] = [
    *({}, {0: (0,)}, {0: (1,)}, {1: (0,)}, {1: (1,)}, {2: (0,)}, {2: (1,)}),
    *({0: (0, 1)}, {0: (1, 0)}, {1: (0, 1)}, {1: (1, 0)}, {2: (0, 1)}),
    *({0: (0,), 1: (1,)}, {0: (1,), 1: (0,)}, {0: (0,), 2: (1,)}, {1: (1,), 2: (0,)}),
]
RAGGED: list[dict[int, tuple[int, ...]]] = [{0: (1,)}, {0: (1, 0)}, {1: (0, 1)}, {1: (0,), 2: (1,)}]
"""Axes, by number, that split each dim: those of RAGGED into pieces of random sizes, some of them empty."""

MESHES: dict[int, Any] = {
    ranks: sw.simulate(shape, ("a", "b"))
    for ranks, shape in ((1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (2, 2)), (8, (2, 4)))
}


def twenty_layouts(mesh: Any) -> list[Layout]:
    chance = random.Random(mesh.size())
    found = []
    for way in (*WAYS, *RAGGED):
        splits = tuple(way.get(dim, ()) for dim in range(len(SHAPE)))
        counts = [math.prod(mesh.shape[axis] for axis in axes) for axes in splits]
        ragged = len(found) >= len(WAYS)
        cuts = zip(SHAPE, splits, counts, strict=True)
        sizes = [random_pieces(chance, size, count) if ragged and axes else None for size, axes, count in cuts]
        found.append(Layout(mesh, SHAPE, splits, sizes=sizes))
    return found


def distinct_layouts() -> dict[str, Layout]:
    """On one, two, three, four and eight ranks, without those that cut into the same pieces, as all do on one rank."""
    found: dict[tuple, tuple[str, Layout]] = {}
    for ranks, mesh in MESHES.items():
        for layout in twenty_layouts(mesh):
            found.setdefault((mesh, pieces(layout)), (f"{ranks} ranks: {layout}", layout))
    return dict(found.values())
