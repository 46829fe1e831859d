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
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import record
from shardwise.comm.group import ALL_REDUCE, Group, Result
from shardwise.comm.new_groups import new_group
from shardwise.comm.port import Axes, Chunks, Handle, Port, Shapes, Shards, communicating
from shardwise.comm.told_later import carried, settle_all, windows
from shardwise.comm.wire import KNOWN, Parts, adjacent, lent, padded, reducible, reducible_dtypes, restored
from shardwise.errors import MeshError
from shardwise.layout import Mesh

_default, distributed_c10d.GroupMember.WORLD = distributed_c10d.GroupMember.WORLD, None
try:
    import torch.distributed.nn  # its functions would keep what is the default group now, beyond its end
finally:
    distributed_c10d.GroupMember.WORLD = _default
    del _default

_ports: WeakSet[GroupPort] = WeakSet()
_in_flight: WeakSet[Handle[Any]] = WeakSet()


@atexit.register
def _release_all() -> None:
    """Release groups while Python still runs: a thread of Gloo's that drops the last reference to a tensor after that
    crashes the process. torch's meshes keep groups that were destroyed, too."""
    wait_for_all()
    for port in list(_ports):
        port.release()
        if not dist.is_initialized() and isinstance(kept := vars(port.device_mesh).get("_pg_registry"), dict):
            kept.clear()
    _meshes.clear()


def wait_for_all() -> None:
    """Wait for every collective that is under way."""
    for handle in list(_in_flight):
        with suppress(Exception):  # whoever uses its result will get the error
            handle.wait()


def wait_for_at_the_end(handle: Handle[Any]) -> None:
    """Have groups wait for something else as well before they are destroyed."""
    _in_flight.add(handle)
    _watch_the_end()


class GroupPort(Port):
    """One process, one rank. Groups over several axes are made when first needed, by their members alone."""

    group_type = Group

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {device_mesh}, so it holds no shards there")
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.ranks: Tensor = device_mesh.mesh
        self._groups: dict[tuple[Mesh, Axes], Group] = {}
        self._by_roots: dict[Axes, Group] = {}
        _ports.add(self)

    def release(self) -> None:
        """Let go of all groups."""
        self._groups.clear()
        self._by_roots.clear()

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
            process_group = new_group(members)
        self._by_roots[roots] = self.group_type(process_group, members)
        return self._by_roots[roots]

    def stack(self, shards: Shards, mesh: Mesh, axes: Axes) -> list[Tensor]:
        (x,), axes = shards, communicating(mesh, axes)
        group = self.group(mesh, axes) if axes else None
        if group is None or group.order is not None:
            return super().stack(shards, mesh, axes)
        if windows:
            settle_all()
        if record.listeners:
            record.note("all_gather", mesh, axes, [x])
        return [group.all_gather(x.reshape(-1), True)().view(group.size, *x.shape)]

    def _begin(self, run: Callable[..., Any], *given: Any, awaited: bool = False, **options: bool) -> Handle[Any]:
        if windows:
            settle_all()
        handle = Handle(run(*given, awaited, **options))
        if not awaited:
            _in_flight.add(handle)
            _watch_the_end()
        return handle

    # Each of these starts a collective, and returns what waits for it and gives the result

    def _all_reduce(
        self, shards: Shards, mesh: Mesh, axes: Axes, op: str, awaited: bool, owned: bool = False
    ) -> Result[list[Tensor]]:
        group = self.group(mesh, axes)
        own = shards[0] if owned else group.own(shards[0])
        dtype = own.dtype
        if op == "product" and own.is_complex():
            rows = _gather(group, own.view(-1), [tuple(own.shape)] * group.size, awaited)
            return lambda: [torch.stack(rows()).prod(0)]
        reduced = group.all_reduce(*reducible(own, op), awaited)
        return lambda: [lent(restored(reduced(), dtype))]

    def _all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Shapes, awaited: bool
    ) -> Result[list[list[Tensor]]]:
        (x,) = shards
        flat = x.reshape(-1)
        if self.overlaps and not awaited and flat.untyped_storage()._cdata == x.untyped_storage()._cdata:
            flat = flat.clone()  # what it is gathered from may be written to meanwhile
        rows = _gather(self.group(mesh, axes), flat, shapes[0], awaited)
        return lambda: [rows()]

    def _reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str, awaited: bool) -> Result[list[Tensor]]:
        (mine,) = chunks
        group = self.group(mesh, axes)
        target = mine[group.me]
        shape, dtype, numel = tuple(target.shape), target.dtype, target.numel()
        if op == "product" and target.is_complex():
            rows = _exchange(group, mine, [shape] * group.size, awaited)
            return lambda: [torch.stack(rows()).prod(0)]
        room = max(chunk.numel() for chunk in mine)
        wire = self._joined(mine, room, group, awaited)
        reduced = group.reduce_scatter(*reducible(wire, op), awaited)
        # torch refuses writes to views that a function returns
        return lambda: [lent(restored(reduced(), dtype)[:numel].view(shape))]

    def _joined(self, mine: Sequence[Tensor], room: int, group: Group, awaited: bool) -> Tensor:
        """The chunks of all members as a backend takes them: as they lie, if that is one behind the other and nobody
        may write to them meanwhile."""
        if group.order is None:
            if isinstance(mine, Tensor):
                return mine.view(-1)
            if (awaited or not self.overlaps) and all(chunk.numel() == room for chunk in mine):
                whole = adjacent(mine)
                if whole is not None:
                    return whole
        return torch.cat([padded(chunk.reshape(-1), room) for chunk in group.to_group(mine)])

    def _all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Shapes, awaited: bool
    ) -> Result[list[list[Tensor]]]:
        (mine,) = chunks
        rows = _exchange(self.group(mesh, axes), mine, shapes[0], awaited)
        return lambda: [rows()]

    def _broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int, awaited: bool) -> Result[list[Tensor]]:
        group = self.group(mesh, axes)
        sent = group.broadcast(group.own(shards[0]), source, awaited)
        return lambda: [sent()]


class ProcessGroupPort(GroupPort):
    """Collectives as the groups have them."""

    overlaps = True

    def __init__(self, device_mesh: DeviceMesh) -> None:
        super().__init__(device_mesh)
        self._reductions: dict[object, Any] = {}

    def release(self) -> None:
        super().release()
        self._reductions.clear()

    def reducer(self, mesh: Mesh, axes: Axes, op: str, *, keep_nans: bool = True) -> Callable[[Tensor], None]:
        """`all_reduce` of contiguous tensors of our own, in place and unknown to autograd, with everything looked up
        beforehand."""
        axes = communicating(mesh, axes)
        known, key, options = self._reductions, object(), ALL_REDUCE[op][True]
        direct = reducible_dtypes(op) if keep_nans else KNOWN

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
            if windows and carried(x, mesh, axes, op):
                return
            work = all_reduce([x], options)
            if work is not None:
                work.wait()

        return reduce if axes else lambda x: None

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return mesh_of, (mesh.origin,)


_meshes: dict[tuple[DeviceMesh, DeviceMesh, Any], Mesh] = {}


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Our mesh for torch's. Device meshes that torch calls equal share one, as long as torch.distributed is up, if they
    are parts of equal ones: torch calls a part of a grid equal to a mesh of the same ranks that is part of nothing."""
    key = device_mesh, device_mesh._get_root_mesh(), dist.group.WORLD
    mesh = _meshes.get(key)
    if mesh is None:
        root = _root_of(device_mesh)
        if root is None:
            mesh = mesh_over(ProcessGroupPort(device_mesh), device_mesh)
        else:
            mesh = mesh_of(root)[device_mesh.mesh_dim_names or ()]
        _meshes[key] = mesh
    return mesh


def _root_of(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that another was taken from by names of its axes. What was flattened has axes of its own."""
    root, names = device_mesh._get_root_mesh(), device_mesh.mesh_dim_names
    if root == device_mesh or not names or root.get_coordinate() is None:
        return None
    return root if names == tuple(name for name in root.mesh_dim_names or () if name in names) else None


def mesh_over(port: GroupPort, origin: DeviceMesh | None) -> Mesh:
    """The mesh whose ranks communicate through a port."""
    theirs = port.device_mesh
    _check_device(theirs.device_type)
    return Mesh(
        port,
        names=theirs.mesh_dim_names or tuple(f"axis{i}" for i in range(theirs.ndim)),
        shape=tuple(theirs.mesh.shape),
        root_axes=tuple(range(theirs.ndim)),
        held=(port.coordinate,),
        device_type=theirs.device_type,
        origin=origin,
    )


def _check_device(kind: str) -> None:
    """Raise where torch would, at the first tensor, name only what it lacks."""
    module = getattr(torch, kind, None)
    if kind != "meta" and hasattr(module, "is_available") and not module.is_available():  # type: ignore[union-attr]
        raise MeshError(
            f'the mesh is on "{kind}", and torch finds none here; on Gloo, init_device_mesh("cpu", ...) runs'
        )


# Collectives of shards that are uneven, in any order of the members: started, and then waited for


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


def _gather(group: Group, flat: Tensor, shapes: Sequence[tuple], awaited: bool) -> Result[list[Tensor]]:
    """Every member's tensor. The largest sets the room that each gets, so all members must know all shapes."""
    numels = [math.prod(shape) for shape in shapes]
    room = max(numels)
    is_dense = group.order is None and min(numels) == room
    gathered = group.all_gather(padded(flat, room), awaited)

    def finish() -> list[Tensor]:
        landing = gathered()
        rows = group.from_group(landing.view(group.size, room).unbind(0))
        parts = (row[:n].view(shape) for row, n, shape in zip(rows, numels, shapes, strict=True))
        return Parts(parts, landing if is_dense else None)

    return finish


def _exchange(group: Group, chunks: Sequence[Tensor], shapes: Sequence[tuple], awaited: bool) -> Result[list[Tensor]]:
    """The chunk that each member has for us; `shapes` are theirs."""
    outgoing, incoming = group.to_group(chunks), group.to_group(shapes)
    numels = [math.prod(shape) for shape in incoming]
    flat = torch.cat([chunk.reshape(-1) for chunk in outgoing])
    received = group.all_to_all(flat, numels, [chunk.numel() for chunk in outgoing], awaited)

    def finish() -> list[Tensor]:
        landing = received()
        pieces = [piece.view(shape) for piece, shape in zip(landing.split(numels), incoming, strict=True)]
        return Parts(group.from_group(pieces), landing if group.order is None else None)

    return finish
