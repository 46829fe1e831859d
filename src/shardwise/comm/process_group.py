"""The port of real ranks: torch.distributed process groups over a torch `DeviceMesh`.

A shard may come as the DTensor that it is the storage of, whose `shape` and `numel` are global: sizes are read off
fresh tensors only.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import product
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there are groups: its functions keep the one that is the default at that time
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import record
from shardwise.comm.group import ALL_REDUCE, Group
from shardwise.comm.port import Axes, Chunks, Handle, Port, Shapes, Shards, communicating
from shardwise.comm.wire import KNOWN, is_reducible, lent, movable, padded, reducible, restored
from shardwise.errors import MeshError
from shardwise.layout import Mesh

_ports: WeakSet[ProcessGroupPort] = WeakSet()
_in_flight: WeakSet[Handle[Any]] = WeakSet()


@atexit.register
def _release_all() -> None:
    """Groups end while Python still runs: one of Gloo's threads that wants to let go of a tensor later than that, when
    there is no Python to do it, takes the process down. A mesh of torch's keeps groups that were destroyed, too."""
    wait_for_all()
    for port in list(_ports):
        port.release()
        if not dist.is_initialized() and isinstance(kept := vars(port.device_mesh).get("_pg_registry"), dict):
            kept.clear()
    _meshes.clear()


def wait_for_all() -> None:
    """Wait for every collective that is under way."""
    for handle in list(_in_flight):
        with suppress(Exception):  # whoever uses its result will hear of it
            handle.wait()


class ProcessGroupPort(Port):
    """One process, one rank. Groups over several axes are made when first needed, by their members alone."""

    overlaps = True

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {device_mesh}, so it holds no shards there")
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.ranks: Tensor = device_mesh.mesh
        self._groups: dict[tuple[Mesh, Axes], Group] = {}
        self._by_roots: dict[Axes, Group] = {}
        self._reductions: dict[tuple[Mesh, Axes, str], Any] = {}
        _ports.add(self)

    def release(self) -> None:
        """Let go of all groups."""
        self._groups.clear()
        self._by_roots.clear()
        self._reductions.clear()

    def group(self, mesh: Mesh, axes: Axes) -> Group:
        found = self._groups.get((mesh, axes))
        return found if found is not None else self._find_group(mesh, axes)

    def _find_group(self, mesh: Mesh, axes: Axes) -> Group:
        roots = tuple(mesh.root_axes[axis] for axis in axes)
        group = self._by_roots.get(roots) or self._make_group(roots)
        self._groups[mesh, axes] = group
        return group

    def _make_group(self, roots: Axes) -> Group:
        index: list[Any] = list(self.coordinate)
        members = []
        for position in product(*(range(self.ranks.shape[axis]) for axis in roots)):
            for axis, at in zip(roots, position, strict=True):
                index[axis] = at
            members.append(int(self.ranks[tuple(index)]))
        if len(roots) == 1:
            process_group: Any = self.device_mesh.get_group(roots[0])
        elif len(members) == dist.get_world_size():
            process_group = dist.group.WORLD
        else:
            process_group = dist.new_group(members, use_local_synchronization=True)
        self._by_roots[roots] = Group(process_group, members)
        return self._by_roots[roots]

    def reducer(self, mesh: Mesh, axes: Axes, op: str) -> Callable[[Tensor], None]:
        """`all_reduce` of contiguous tensors of our own, in place and unknown to autograd, with everything looked up
        beforehand."""
        axes = communicating(mesh, axes)
        known, key, options = self._reductions, (mesh, axes, op), ALL_REDUCE[op][True]
        direct = frozenset(dtype for dtype in KNOWN if is_reducible(dtype, op))

        def reduce(x: Tensor) -> None:
            if x.dtype not in direct:
                alias = x.detach()
                alias.copy_(self.all_reduce((alias,), mesh, axes, op)[0])
                return
            all_reduce = known.get(key)
            if all_reduce is None:  # groups are made by the first collective that needs them
                all_reduce = known[key] = self.group(mesh, axes).reducer(x.device)
            if record.listeners:
                record.note("all_reduce", mesh, axes, x)
            work = all_reduce([x], options)
            if work is not None:
                work.wait()

        return reduce if axes else lambda x: None

    def _all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str, awaited: bool) -> Handle[list[Tensor]]:
        (x,) = shards
        out = x.clone(memory_format=torch.contiguous_format)
        group, dtype = self.group(mesh, axes), out.dtype
        if op == "product" and out.is_complex():
            rows = _gather(group, out.view(-1), [tuple(out.shape)] * group.size, awaited)
            return _handle(lambda: [torch.stack(rows()).prod(0)], awaited)
        wire, op = reducible(out, op)
        wait = group.all_reduce(lent(wire), op, awaited)

        def finish() -> list[Tensor]:
            wait()
            return [lent(restored(wire, dtype))]

        return _handle(finish, awaited)

    def _all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes, awaited: bool
    ) -> Handle[list[list[Tensor]]]:
        (x,) = shards
        flat = x.reshape(-1)
        if not awaited and flat.untyped_storage()._cdata == x.untyped_storage()._cdata:
            flat = flat.clone()  # what it is gathered from may be written to meanwhile
        rows = _gather(self.group(mesh, axes), flat, shapes[0], awaited)
        return _handle(lambda: [rows()], awaited)

    def _reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str, awaited: bool) -> Handle[list[Tensor]]:
        (mine,) = chunks
        group = self.group(mesh, axes)
        target = mine[group.me]
        shape, dtype, numel = tuple(target.shape), target.dtype, target.numel()
        if op == "product" and target.is_complex():
            rows = _exchange(group, mine, [shape] * group.size, awaited)
            return _handle(lambda: [torch.stack(rows()).prod(0)], awaited)
        room = max(chunk.numel() for chunk in mine)
        wire, op = reducible(torch.cat([padded(chunk.reshape(-1), room) for chunk in group.to_group(mine)]), op)
        out = wire.new_empty((room, *wire.shape[1:]))
        wait = group.reduce_scatter(out, wire, op, awaited)

        def finish() -> list[Tensor]:
            wait()
            return [
                lent(restored(out, dtype)[:numel].view(shape))
            ]  # torch refuses writes to views that a function returns

        return _handle(finish, awaited)

    def _all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes, awaited: bool
    ) -> Handle[list[list[Tensor]]]:
        (mine,) = chunks
        rows = _exchange(self.group(mesh, axes), mine, shapes[0], awaited)
        return _handle(lambda: [rows()], awaited)

    def _broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int, awaited: bool) -> Handle[list[Tensor]]:
        (x,) = shards
        out = x.clone(memory_format=torch.contiguous_format)
        wait = self.group(mesh, axes).broadcast(lent(movable(out.view(-1))), source, awaited)

        def finish() -> list[Tensor]:
            wait()
            return [out]

        return _handle(finish, awaited)

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return mesh_of, (mesh.origin,)


_meshes: dict[tuple[DeviceMesh, Any], Mesh] = {}


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Our mesh for torch's. Device meshes that torch calls equal share one, as long as torch.distributed is up."""
    key = device_mesh, dist.group.WORLD
    mesh = _meshes.get(key)
    if mesh is None:
        port = ProcessGroupPort(device_mesh)
        mesh = _meshes[key] = Mesh(
            port,
            names=device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim)),
            shape=tuple(device_mesh.mesh.shape),
            root_axes=tuple(range(device_mesh.ndim)),
            held=(port.coordinate,),
            device_type=device_mesh.device_type,
            origin=device_mesh,
        )
    return mesh


# Collectives of shards that are uneven, in any order of the members: started, and then waited for


def _handle(finish: Callable[[], Any], awaited: bool) -> Handle[Any]:
    handle = Handle(finish)
    if not awaited:
        _in_flight.add(handle)
        _watch_the_end()
    return handle


def _watch_the_end() -> None:
    """From now on groups are not destroyed before what is under way in them has arrived."""
    theirs = distributed_c10d.destroy_process_group
    if theirs in _watched:
        return

    @wraps(theirs)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        wait_for_all()
        return theirs(*args, **kwargs)

    _watched.append(destroy_process_group)
    for home in (distributed_c10d, dist):
        vars(home)["destroy_process_group"] = destroy_process_group


_watched: list[Callable[..., Any]] = []


def _gather(group: Group, flat: Tensor, shapes: Sequence[tuple], awaited: bool) -> Callable[[], list[Tensor]]:
    """Every member's tensor. The largest sets the room that each gets, so all members must know all shapes."""
    numels = [math.prod(shape) for shape in shapes]
    room = max(numels)
    flat = padded(flat, room)
    out = flat.new_empty(group.size * room)
    wait = group.all_gather(movable(out), movable(flat), awaited)

    def finish() -> list[Tensor]:
        wait()
        rows = group.from_group(out.view(group.size, room).unbind(0))
        return [row[:n].view(shape) for row, n, shape in zip(rows, numels, shapes, strict=True)]

    return finish


def _exchange(
    group: Group, chunks: Sequence[Tensor], shapes: Sequence[tuple], awaited: bool
) -> Callable[[], list[Tensor]]:
    """The chunk that each member has for us; `shapes` are theirs."""
    outgoing, incoming = group.to_group(chunks), group.to_group(shapes)
    numels = [math.prod(shape) for shape in incoming]
    flat = torch.cat([chunk.reshape(-1) for chunk in outgoing])
    out = flat.new_empty(sum(numels))
    wire, landing = movable(flat), movable(out)
    unit = 1 if wire is flat else flat.element_size()
    send, receive = [chunk.numel() * unit for chunk in outgoing], [n * unit for n in numels]
    wait = group.all_to_all(landing, wire, receive, send, awaited)

    def finish() -> list[Tensor]:
        wait()
        return group.from_group([piece.view(shape) for piece, shape in zip(out.split(numels), incoming, strict=True)])

    return finish
