"""Moves, found again in a graph: what a collective moves, out of what it is cut, and what it is put together to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwise.comm.record import Comm
from shardwise.graph.draft.draft import Draft, elements
from shardwise.graph.nodes import Collective, collective_of
from shardwise.layout import Box, Layout
from shardwise.redistribute.kernels import members

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective that brings a value from one layout into another: the tensor that it begins with, and the one that
    it comes to."""

    node: fx.Node
    collective: Collective
    comm: Comm
    source: Layout
    target: Layout
    before: fx.Node
    after: fx.Node


def moves(draft: Draft) -> list[Moved]:
    """The moves of a part whose ends are plain to see, in their order."""
    found = (_moved(draft, node) for node in draft.collectives())
    return [move for move in found if move is not None]


def _moved(draft: Draft, node: fx.Node) -> Moved | None:
    comm: Comm | None = node.meta.get("comm")
    collective = collective_of(node)
    if comm is None or comm.source is None or comm.target is None or not isinstance(node.target, Collective):
        return None
    assert collective is not None
    before, after = _before(node), _after(node)
    if before is None or after is None:
        return None
    at = coordinate(collective, draft)
    fits = shape(before) == comm.source.local_shape(at) and shape(after) == comm.target.local_shape(at)
    return Moved(node, collective, comm, comm.source, comm.target, before, after) if fits else None


def _before(node: fx.Node) -> fx.Node | None:
    """What a collective is given, or what the chunks that it is given are cut out of."""
    brought: Any = node.args[0]
    if isinstance(brought, fx.Node):
        return brought if isinstance(node.target, Collective) and node.target.kind != "reduce_scatter" else None
    cut_from = {cut(chunk)[0] for chunk in brought}
    return cut_from.pop() if len(cut_from) == 1 else None


def _after(node: fx.Node) -> fx.Node | None:
    """What a collective gives, or what all the pieces that it gives are joined to, in their order."""
    if "facts" in node.meta:
        return node
    pieces = dict(elements(node))
    users = {user for piece in pieces.values() for user in piece.users}
    if len(users) != 1 or len(pieces) != len(node.users):
        return None
    (joined,) = users
    in_order = [pieces[number] for number in sorted(pieces)]
    return joined if joined.target is _aten.cat.default and list(joined.args[0]) == in_order else None  # type: ignore[arg-type]


def coordinate(collective: Collective, draft: Draft) -> tuple[int, ...]:
    """Where the rank is, on the mesh of a collective."""
    return collective.mesh.held[draft.held]


def member(collective: Collective, draft: Draft) -> int:
    """Which member of its group the rank is."""
    at = coordinate(collective, draft)
    return members(collective.mesh, collective.axes, at).index(tuple(at))


def shape(node: fx.Node) -> tuple[int, ...]:
    facts = node.meta.get("facts")
    return () if facts is None else facts.shape


def cut(node: fx.Node) -> tuple[fx.Node, Box]:
    """What a node is a slice of, and the part that it is: start and size for each dim. Of itself, if it is no slice."""
    sizes, starts = shape(node), [0] * len(shape(node))
    while is_slice(node):
        source: Any = node.args[0]
        dim, start, _ = _bounds(node)
        starts[dim] += start
        node = source
    return node, (tuple(starts), sizes)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def is_slice(node: fx.Node) -> bool:
    """Whether a node is a part of a dim without gaps, with limits that are known."""
    if node.target is not _aten.slice.Tensor or _argument(node, 4, "step", 1) != 1:
        return False
    return not any(isinstance(x, fx.Node) for x in (*node.args[1:], *node.kwargs.values()))


def _bounds(node: fx.Node) -> tuple[int, int, int]:
    """The dim of a slice, its start and its end."""
    source: Any = node.args[0]
    dim = _argument(node, 1, "dim", 0) % max(len(shape(source)), 1)
    size = shape(source)[dim]
    start, stop, _ = slice(_argument(node, 2, "start", None), _argument(node, 3, "end", None)).indices(size)
    return dim, start, max(stop, start)


def relative(inner: Box, outer: Box) -> Box:
    """Where a box lies within another. One without anything in it lies at the start, as it is cut there."""
    starts = tuple(a - b if size else 0 for a, b, size in zip(inner[0], outer[0], inner[1], strict=True))
    return starts, inner[1]


def is_part(found: Box, wanted: Box) -> bool:
    """Whether a slice is a part that is wanted; where that is empty, whether it is as empty."""
    return found == wanted or (0 in wanted[1] and found[1] == wanted[1])


def joined_pieces(node: fx.Node) -> tuple[Sequence[fx.Node], int] | None:
    """The pieces that a node joins, and along which dim."""
    if node.target is not _aten.cat.default:
        return None
    pieces: Any = node.args[0]
    return pieces, _argument(node, 1, "dim", 0) % max(len(shape(node)), 1)
