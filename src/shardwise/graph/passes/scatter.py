"""Sums of which each rank uses its own part: each gets only that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardwise.graph.draft.draft import Draft, contiguous
from shardwise.graph.draft.moves import coordinate, cut, is_part, is_slice, relative, shape
from shardwise.graph.draft.storages import Storages
from shardwise.graph.nodes import Collective, is_op
from shardwise.layout import Box, Layout
from shardwise.redistribute.kernels import members
from shardwise.words import counted

_aten = torch.ops.aten

SPLIT = "split"
"""What is noted at a collective whose result is split by another dim than it was: part of what ranks must agree on."""


def scatter(draft: Draft) -> list[str]:
    """`slice(op(all_reduce(x)))` → `op(reduce_scatter(x))`, where `op` treats every element alike.

    Sums of three or more real ranks may be rounded otherwise: who adds up first depends on the collective.
    """
    storages = draft.storages()
    found = [part for node in draft.collectives() if (part := _only_part(draft, storages, node)) is not None]
    for part in found:
        _scattered(draft, part)
    draft.sweep()
    return [f"{counted(len(found), 'sum')} scattered"] if found else []


@dataclass(frozen=True, slots=True)
class _Part:
    """A reduction of which only this rank's part is used: `ops` compute with the whole, `ends` are slices of it."""

    node: fx.Node
    layout: Layout
    dim: int
    box: Box
    ops: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]


def _only_part(draft: Draft, storages: Storages, node: fx.Node) -> _Part | None:
    collective, comm = node.target, node.meta.get("comm")
    if not isinstance(collective, Collective) or collective.kind != "all_reduce" or comm is None or comm.target is None:
        return None
    if shape(node) != comm.target.local_shape(coordinate(collective, draft)):
        return None
    reached = _reached(storages, node)
    if reached is None:
        return None
    ops, ends = reached
    boxes = {cut(end)[1] for end in ends}
    if len(boxes) != 1:
        return None
    box = boxes.pop()
    for dim in range(len(shape(node))):
        layout = _split(comm.target, dim, collective.axes)
        at = coordinate(collective, draft)
        if comm.target.sizes[dim] is None and is_part(box, relative(layout.box(at), comm.target.box(at))):
            return _Part(node, layout, dim, relative(layout.box(at), comm.target.box(at)), ops, ends)
    return None


def _split(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    splits = tuple((*own, *axes) if i == dim else own for i, own in enumerate(layout.splits))
    return layout.with_(splits=splits)


def _reached(storages: Storages, node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """The ops, element by element, and behind them the slices, that are all that a tensor is used for."""
    ops: list[fx.Node] = []
    ends: list[fx.Node] = []
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if storages.is_written(current) or storages.escapes(current):
            return None
        for user in current.users:
            if is_slice(user):
                ends += _last_slices(user)
            elif is_pointwise(user) and all(_fits(given, node) for given in user.all_input_nodes):
                if user not in ops:
                    ops.append(user)
                    waiting.append(user)
            else:
                return None
    return (tuple(sorted(ops, key=storages.position.__getitem__)), tuple(ends)) if ends else None


def _last_slices(node: fx.Node) -> list[fx.Node]:
    """Slices of slices: those that others use."""
    inner = [user for user in node.users if is_slice(user)]
    own = [node] if len(inner) < len(node.users) else []
    return own + [last for user in inner for last in _last_slices(user)]


def is_pointwise(node: fx.Node) -> bool:
    """Whether an op computes each element of its result of the elements in the same place, and nothing else."""
    op: Any = node.target
    if op is _aten._to_copy.default or op is _aten.clone.default:
        return not set(node.kwargs) & {"layout", "device", "pin_memory"}
    if not is_op(op) or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags


def _fits(given: fx.Node, node: fx.Node) -> bool:
    """Whether an argument can be cut like a tensor, or needs not be."""
    return shape(given) in ((), shape(node))


def _scattered(draft: Draft, part: _Part) -> None:
    node, collective, comm = part.node, part.node.target, part.node.meta["comm"]
    assert isinstance(collective, Collective)
    with draft.before(node):
        whole: Any = node.args[0]
        group = members(collective.mesh, collective.axes, coordinate(collective, draft))
        origin = comm.target.box(coordinate(collective, draft))
        chunks = [sliced(draft, whole, relative(part.layout.box(at), origin)) for at in group]
        own = draft.collective(
            replace(collective, kind="reduce_scatter"),
            chunks,
            like=node,
            comm=replace(comm, kind="reduce_scatter", target=part.layout, why=f"{comm.why}, of which each uses a part"),
        )
        own.meta["facts"] = contiguous(whole.meta["facts"], part.box[1])
        own.meta[SPLIT] = part.dim
    made = {node: own}
    for op in part.ops:
        made[op] = _on_part(draft, op, part, made)
    for end in part.ends:
        for copied in [user for user in end.users if user.target is _aten.clone.default]:
            if len(part.ends) == len(end.users) == 1:  # what was a part of something larger is a tensor of its own now
                draft.replace(copied, made[cut(end)[0]])
        draft.replace(end, made[cut(end)[0]])


def _on_part(draft: Draft, op: fx.Node, part: _Part, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same op of parts."""

    def own(given: fx.Node) -> fx.Node:
        if given in made:
            return made[given]
        return sliced(draft, given, part.box) if shape(given) == shape(part.node) else given

    with draft.before(op):
        args, kwargs = fx.map_arg((op.args, op.kwargs), own)
        return draft.call(op.target, *args, like=op, **kwargs)


def sliced(draft: Draft, node: fx.Node, box: Box) -> fx.Node:
    """A part of a tensor, as a view."""
    like = node
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if size != shape(node)[dim]:
            node = draft.call(_aten.slice.Tensor, node, dim, start, start + size, like=like)
    return node
