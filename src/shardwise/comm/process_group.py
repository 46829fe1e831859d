"""The port of real ranks: torch.distributed process groups over a torch `DeviceMesh`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import record
from shardwise.comm.port import Axes, Chunks, Shards
from shardwise.errors import MeshError
from shardwise.layout import Mesh

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _all_reduce_options(op: str) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = _REDUCE[op]
    return options


def _reduce_scatter_options(op: str) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = _REDUCE[op]
    return options


_ALL_REDUCE_OPTIONS = {op: _all_reduce_options(op) for op in _REDUCE}
_REDUCE_SCATTER_OPTIONS = {op: _reduce_scatter_options(op) for op in _REDUCE}


class _Group:
    """A process group and the order in which its ranks number the members we mean."""

    __slots__ = ("order", "process_group", "ranks", "size")

    def __init__(self, process_group: Any, ranks: list[int]) -> None:
        self.process_group = process_group
        self.size = len(ranks)
        self.ranks = ranks  # global ranks, in the row-major order of the axes
        by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)  # torch numbers a group's members by global rank
        self.order = None if by_rank == list(range(len(ranks))) else by_rank

    def to_group(self, items: Sequence[Any]) -> Sequence[Any]:
        return items if self.order is None else [items[i] for i in self.order]

    def from_group(self, items: Sequence[Any]) -> list[Any]:
        if self.order is None:
            return list(items)
        placed: list[Any] = [None] * self.size
        for position, index in enumerate(self.order):
            placed[index] = items[position]
        return placed


class ProcessGroupPort:
    """One process, one rank. Groups over several axes are made when first needed, by their members alone."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {device_mesh}, so it holds no shards there")
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.ranks: Tensor = device_mesh.mesh
        self._groups: dict[Axes, _Group] = {}

    def group(self, mesh: Mesh, axes: Axes) -> _Group:
        roots = tuple(mesh.root_axes[axis] for axis in axes)
        found = self._groups.get(roots)
        return found if found is not None else self._make_group(roots)

    def _make_group(self, roots: Axes) -> _Group:
        index: list[Any] = list(self.coordinate)
        members = []
        for position in product(*(range(self.ranks.shape[axis]) for axis in roots)):
            for axis, at in zip(roots, position, strict=True):
                index[axis] = at
            members.append(int(self.ranks[tuple(index)]))
        if len(roots) == 1:
            process_group = self.device_mesh.get_group(roots[0])
        elif len(members) == dist.get_world_size():
            process_group = dist.group.WORLD
        else:
            process_group = dist.new_group(members, use_local_synchronization=True)
        self._groups[roots] = _Group(process_group, members)
        return self._groups[roots]

    def all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        (x,) = shards
        out = x.clone(memory_format=torch.contiguous_format)
        if record.listeners:
            record.note("all_reduce", mesh, axes, out)
        wire = out.view(torch.uint8) if out.dtype == torch.bool else out
        options = _ALL_REDUCE_OPTIONS["max" if op == "sum" and wire is not out else op]
        self.group(mesh, axes).process_group.allreduce([_real(wire)], options).wait()
        return [out]

    def all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        (x,) = shards
        group = self.group(mesh, axes)
        numels = [math.prod(shape) for shape in shapes[0]]
        room = max(numels)
        flat = _padded(x.reshape(-1), room)
        if record.listeners:
            record.note("all_gather", mesh, axes, flat)
        out = flat.new_empty(group.size * room)
        group.process_group._allgather_base(_real(out), _real(flat)).wait()
        rows = group.from_group(out.view(group.size, room).unbind(0))
        return [[row[:n].view(shape) for row, n, shape in zip(rows, numels, shapes[0], strict=True)]]

    def reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        (mine,) = chunks
        if record.listeners:
            record.note("reduce_scatter", mesh, axes, list(mine))
        group = self.group(mesh, axes)
        room = max(chunk.numel() for chunk in mine)
        wire = torch.cat([_padded(chunk.reshape(-1), room) for chunk in group.to_group(mine)])
        out = wire.new_empty(room)
        group.process_group._reduce_scatter_base(_real(out), _real(wire), _REDUCE_SCATTER_OPTIONS[op]).wait()
        target = mine[group.ranks.index(dist.get_rank())]
        return [out[: target.numel()].view(target.shape)]

    def all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        (mine,) = chunks
        if record.listeners:
            record.note("all_to_all", mesh, axes, list(mine))
        group = self.group(mesh, axes)
        outgoing = group.to_group(mine)
        incoming = group.to_group(shapes[0])
        unit = 2 if outgoing[0].is_complex() else 1
        send, receive = [c.numel() * unit for c in outgoing], [math.prod(shape) * unit for shape in incoming]
        wire = _real(torch.cat([chunk.reshape(-1) for chunk in outgoing])).reshape(-1)
        out = wire.new_empty(sum(receive))
        group.process_group.alltoall_base(out, wire, receive, send).wait()
        if unit == 2:
            out = torch.view_as_complex(out.view(-1, 2))
        pieces = out.split([math.prod(shape) for shape in incoming])
        return [group.from_group([piece.view(shape) for piece, shape in zip(pieces, incoming, strict=True)])]

    def broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        (x,) = shards
        if record.listeners:
            record.note("broadcast", mesh, axes, x)
        group = self.group(mesh, axes)
        out = x.clone(memory_format=torch.contiguous_format)
        options = BroadcastOptions()
        options.rootRank = source if group.order is None else group.order.index(source)
        group.process_group.broadcast([_real(out)], options).wait()
        return [out]

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return mesh_of, (mesh.origin,)


_meshes: dict[tuple, Mesh] = {}


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Our mesh for torch's; equal device meshes over the same process groups share one."""
    groups = device_mesh.get_all_groups()
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
    key = (tuple(device_mesh.mesh.shape), tuple(device_mesh.mesh.flatten().tolist()), names, tuple(map(id, groups)))
    mesh = _meshes.get(key)
    if mesh is None:
        port = ProcessGroupPort(device_mesh)
        mesh = _meshes[key] = Mesh(
            port,
            names=tuple(names),
            shape=tuple(device_mesh.mesh.shape),
            root_axes=tuple(range(device_mesh.ndim)),
            held=(port.coordinate,),
            device_type=device_mesh.device_type,
            origin=device_mesh,
        )
    return mesh


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _padded(flat: Tensor, room: int) -> Tensor:
    short = room - flat.numel()
    return torch.nn.functional.pad(flat, (0, short)) if short else flat.contiguous()
