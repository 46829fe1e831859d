"""Which part of a tensor lies where, as a table of its dims."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypeVar

from shardwise.debug.table import Table, draw, plain
from shardwise.layout import Layout
from shardwise.tensor import DTensor

MOST_ROWS, MOST_COLUMNS = 12, 6
"""Of parts along a dim that are shown: of more, the first and the last."""

_T = TypeVar("_T")


class Part(NamedTuple):
    """A part along a dim, and by axis where it lies."""

    span: str
    places: dict[int, int]


LEFT_OUT = Part("…", {})


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which part of a tensor lies where, on the first rank of its mesh: a row for each part along one dim, and a
    column for each along another. With `use_rich`, in rich's lines, where it is installed.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2, 2, 2), ("pp", "dp", "tp"))
    >>> x = sw.distribute_tensor(torch.ones(5, 8), mesh, [sw.Replicate(), sw.Shard(0), sw.Shard(1)])
    >>> visualize_sharding(x)
    [5,8] S(0)@dp S(1)@tp; the same along pp
    dim 0 ↓ 1 →  0:4        4:8
    0:3          dp=0 tp=0  dp=0 tp=1
    3:5          dp=1 tp=0  dp=1 tp=1
    <BLANKLINE>
    """
    layout = dtensor.layout_on_mesh
    if any(layout.mesh.held[0]):
        return
    width = shutil.get_terminal_size((120, 24)).columns
    table = table_of(layout)
    text = draw([table], width, color=sys.stdout.isatty()) if use_rich else plain(table, width)
    print("\n".join([header, text] if header else [text]))


def table_of(layout: Layout) -> Table:
    """Two dims, those that are split first; where it has not two, or more are split, a row for each part."""
    split = [dim for dim, axes in enumerate(layout.splits) if axes]
    rest = [dim for dim in range(len(layout.shape)) if dim not in split]
    shown = sorted((split + rest)[: max(len(split), 2)])
    parts = [_parts(layout, dim) for dim in shown]
    if len(shown) != 2:
        boxes = _some(list(product(*parts)), MOST_ROWS, (LEFT_OUT,) * len(parts))
        rows = [(*(part.span for part in box), _where(layout, box)) for box in boxes]
        return Table(_title(layout), (*(f"dim {dim}" for dim in shown), "where"), rows, len(shown) + 1)
    down, across = _some(parts[0], MOST_ROWS, LEFT_OUT), _some(parts[1], MOST_COLUMNS, LEFT_OUT)
    rows = [(part.span, *(_where(layout, (part, other)) for other in across)) for part in down]
    columns = (f"dim {shown[0]} ↓ {shown[1]} →", *(part.span for part in across))
    return Table(_title(layout), columns, rows, len(columns))


def _parts(layout: Layout, dim: int) -> list[Part]:
    axes = layout.splits[dim]
    places = product(*(range(layout.mesh.shape[axis]) for axis in axes))
    return [
        Part(f"{begin}:{end}", dict(zip(axes, place, strict=True)))
        for (begin, end), place in zip(layout.intervals(dim), places, strict=True)
    ]


def _some(items: Sequence[_T], most: int, left_out: _T) -> list[_T]:
    return [*items[: most - 2], left_out, items[-1]] if len(items) > most else list(items)


def _where(layout: Layout, parts: Sequence[Part]) -> str:
    if LEFT_OUT in parts:
        return LEFT_OUT.span
    at = sorted((axis, place) for part in parts for axis, place in part.places.items())
    return " ".join(f"{layout.mesh.names[axis]}={place}" for axis, place in at) or "everywhere"


def _title(layout: Layout) -> str:
    names = layout.mesh.names
    same = [names[axis] for axis in range(layout.mesh.ndim) if layout.along(axis) is None]
    terms = [f"{p.reduce_op} along {names[axis]}" for axis, p in enumerate(layout.pending) if p]
    said = [f"the same along {' and '.join(same)}"] if same else []
    said += [f"pending: {', '.join(terms)}"] if terms else []
    return "; ".join([str(layout), *said])
