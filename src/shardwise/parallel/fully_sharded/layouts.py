"""How one parameter is laid out: sharded while it rests, and gathered while its module runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from shardwise.comm import AnyMesh, as_mesh
from shardwise.errors import MeshError, PlacementError
from shardwise.layout import Layout, Mesh, Placement, Shard
from shardwise.local import spread
from shardwise.redistribute import Move, Typed, plan_moves, run_path
from shardwise.tensor import DTensor, localise, wrap

MANAGED = "_rests_on"
"""Under this name a module whose own parameters are sharded keeps the mesh that they are sharded on."""


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh are those of data parallelism: one that shards, and one that replicates the shards."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        each = [(x,) if isinstance(x, str) else x or () for x in (self.replicate, self.shard)]
        if len(each[1]) != 1 or len(each[0]) > 1:
            raise MeshError(
                f"fully_shard shards along one axis, and replicates along one or none, not {self}. Parameters that are "
                f"only replicated need no call; several axes that shard are one axis of a mesh made so"
            )
        return (*each[0], *each[1])


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The mesh that parameters are sharded on: along its last axis. The first of two axes replicates the shards."""

    mesh: Mesh

    @staticmethod
    def on(mesh: AnyMesh | None) -> DataParallel:
        found = as_mesh(mesh)
        if found.ndim > 2:
            raise MeshError(
                f"fully_shard takes a mesh of one axis, or of two: replicas of shards, and shards; {found} has "
                f"{found.ndim}. Name the axes of data parallelism, as mesh['dp'] or mesh['replicate', 'shard'] does"
            )
        return DataParallel(found)

    @property
    def shard_axis(self) -> int:
        return self.mesh.ndim - 1

    @property
    def num_shards(self) -> int:
        return self.mesh.shape[-1]


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of one parameter: `resting` shards; `whole`, replicated by the axes of data parallelism. `gather` is the move
    along the axis that shards it."""

    data: DataParallel
    resting: Layout
    whole: Layout
    gather: Move

    def shown(self, mesh: Mesh | None) -> Layout | None:
        """The layout of the gathered parameter beside a batch on a mesh. Where each rank has its own batch, it is a
        DTensor on the axes of other parallelism alone; None where there are none."""
        return _shown(self.whole, self.data.mesh, mesh)


@lru_cache(maxsize=4096)
def _shown(whole: Layout, data: Mesh, mesh: Mesh | None) -> Layout | None:
    names = {*whole.mesh.names} - {*data.names} if mesh is None else {*whole.mesh.names, *mesh.names}
    return whole.on(_submesh(data.root, names)) if names else None


def _submesh(root: Mesh, names: set[str]) -> Mesh:
    return root[tuple(name for name in root.names if name in names)]


def layouts_of(param: Tensor, data: DataParallel, placement: Shard, name: str) -> Layouts:
    """The layouts of a parameter to be sharded: plain, or a DTensor on other axes of the same mesh."""
    whole = _whole(param, data, name)
    dim = placement.dim
    if not -len(whole.shape) <= dim < len(whole.shape):
        raise PlacementError(
            f"fully_shard: {placement} names dim {dim} of {name}, which has the shape {list(whole.shape)}"
            + ("; a parameter of no dims has nothing to shard: give it the shape [1]" if not whole.shape else "")
        )
    splits = list(whole.splits)
    splits[dim] = (*splits[dim], whole.mesh.axis(data.mesh.names[-1]))
    return layouts_at_rest(whole.with_(splits=splits), data, name)


def layouts_at_rest(resting: Layout, data: DataParallel, name: str) -> Layouts:
    """The layouts of a parameter whose shards rest so."""
    mesh, names = resting.mesh, data.mesh.names
    axes = tuple(mesh.axis(axis) for axis in names) if set(names) <= set(mesh.names) else ()
    if not any(axes and cut[-1:] == axes[-1:] for cut in resting.splits) or resting.has_pending:
        raise PlacementError(
            f"fully_shard: {name} was sharded on {names[-1]!r}, and is now {resting}: {names[-1]!r} must be the last "
            f"axis that splits one of its dims"
        )
    whole = resting.with_(splits=[tuple(axis for axis in cut if axis != axes[-1]) for cut in resting.splits])
    return Layouts(data, resting, whole, Move(Typed(resting), Typed(whole, frozenset(axes)), axes[-1:]))


def is_at_rest(module: nn.Module, param: Tensor, mesh: Mesh) -> bool:
    """Whether a parameter of a module consists of `fully_shard`'s shards, which other parallelism may split further."""
    return MANAGED in module.__dict__ and isinstance(param, DTensor) and not {*mesh.names} & {*param._layout.mesh.names}


def split_outside(param: DTensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """Shards at rest, split by axes of other parallelism as well. These come first: what is gathered is then a shard
    of theirs."""
    joint = _submesh(mesh.root, {*mesh.names, *param._layout.mesh.names})
    source = param._layout.on(joint)
    outer = Layout.of(mesh, param.shape, placements).on(joint)
    target = source.with_(splits=[(*a, *b) for a, b in zip(outer.splits, source.splits, strict=True)])
    moves = plan_moves(source, target)
    with torch.no_grad():
        moved = run_path(localise(param.detach()), moves)
        return wrap(moved.clone() if all(move.shares_memory for move in moves) else moved, target)


def _whole(param: Tensor, data: DataParallel, name: str) -> Layout:
    if not isinstance(param, DTensor):
        return Layout(data.mesh, param.shape)
    layout = param._layout
    root = data.mesh.root
    if layout.mesh.root is not root:
        raise MeshError(
            f"fully_shard: {name} is on {layout.mesh}, which is not part of the same mesh as {data.mesh}: make one "
            f"mesh with all axes, and give each call its part of it"
        )
    mesh = _submesh(root, {*layout.mesh.names, *data.mesh.names})
    whole = layout.on(mesh)
    taken = [axis for axis in data.mesh.names if whole.axis_dims[mesh.axis(axis)] is not None]
    if taken or whole.has_pending or any(whole.sizes):
        raise PlacementError(
            f"fully_shard: {name} is {layout}; it must be replicated on {', '.join(map(repr, data.mesh.names))}, with "
            f"nothing pending and no explicit sizes; redistribute it first, or leave it to fully_shard altogether"
        )
    return whole


def sharded(param: Tensor, layouts: Layouts) -> DTensor:
    """The shards of a parameter that every rank has: cut, with nothing communicated."""
    mesh = layouts.whole.mesh
    local = localise(param) if isinstance(param, DTensor) else spread(_on_device(param, mesh), mesh)
    moves = plan_moves(layouts.whole, layouts.resting)
    moved = run_path(local.detach(), moves)
    if all(move.shares_memory for move in moves):
        moved = moved.clone()
    return wrap(moved, layouts.resting)


def _on_device(param: Tensor, mesh: Mesh) -> Tensor:
    plain = param.detach()
    return (plain if plain.is_meta else plain.to(mesh.device_type)).contiguous()
