"""The port of real ranks: torch.distributed process groups over a torch `DeviceMesh`.

A shard may come as the DTensor that it is the storage of, whose `shape` and `numel` are global: sizes are read off
fresh tensors only.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there are groups: its functions keep the one that is the default at that time
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
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


def _options(kind: type, **fields: Any) -> Any:
    """Options of a collective that we wait for at once: NCCL then runs it on the current stream, not beside it."""
    options = kind()
    options.asyncOp = False
    for name, value in fields.items():
        setattr(options, name, value)
    return options


_ALL_REDUCE = {op: _options(AllreduceOptions, reduceOp=reduce) for op, reduce in _REDUCE.items()}
_REDUCE_SCATTER = {op: _options(ReduceScatterOptions, reduceOp=reduce) for op, reduce in _REDUCE.items()}
_ALL_GATHER = _options(AllgatherOptions)
_ALL_TO_ALL = _options(AllToAllOptions)


def _wait(work: Any) -> None:
    """Wait for a collective. A backend that has waited already may return no work."""
    if work is not None:
        work.wait()


class _Group:
    """A process group and the order in which its ranks number the members we mean."""

    __slots__ = ("me", "order", "process_group", "size")

    def __init__(self, process_group: Any, ranks: list[int]) -> None:
        """`ranks` are the members' global ranks, in the row-major order of the axes."""
        self.process_group = process_group
        self.size = len(ranks)
        self.me = ranks.index(dist.get_rank())
        numbers = [dist.get_group_rank(process_group, rank) for rank in ranks]
        in_order = sorted(range(len(ranks)), key=numbers.__getitem__)
        self.order = None if in_order == list(range(len(ranks))) else in_order

    def to_group(self, items: Sequence[Any]) -> Sequence[Any]:
        return items if self.order is None else [items[i] for i in self.order]

    def from_group(self, items: Sequence[Any]) -> list[Any]:
        if self.order is None:
            return list(items)
        placed: list[Any] = [None] * self.size
        for position, index in enumerate(self.order):
            placed[index] = items[position]
        return placed

    def backend(self, device: torch.device) -> Any:
        """What carries tensors of a device: torch's dispatcher would look it up anew for each call."""
        find = getattr(self.process_group, "_get_backend", None)
        try:
            return find(device) if find is not None else self.process_group
        except (RuntimeError, TypeError):  # a process group of somebody's own, which has none
            return self.process_group

    def number(self, member: int) -> int:
        """The group's number of one of our members."""
        return member if self.order is None else self.order.index(member)


_ports: WeakSet[ProcessGroupPort] = WeakSet()


@atexit.register
def _release_all() -> None:
    """Groups end while Python still runs: one of Gloo's threads that wants to let go of a tensor later than that, when
    there is no Python to do it, takes the process down. A mesh of torch's keeps groups that were destroyed, too."""
    for port in list(_ports):
        port.release()
        if not dist.is_initialized() and isinstance(kept := vars(port.device_mesh).get("_pg_registry"), dict):
            kept.clear()
    _meshes.clear()


class ProcessGroupPort:
    """One process, one rank. Groups over several axes are made when first needed, by their members alone."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {device_mesh}, so it holds no shards there")
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.ranks: Tensor = device_mesh.mesh
        self._groups: dict[tuple[Mesh, Axes], _Group] = {}
        self._by_roots: dict[Axes, _Group] = {}
        self._reductions: dict[tuple[Mesh, Axes, str], Any] = {}
        _ports.add(self)

    def release(self) -> None:
        """Let go of all groups."""
        self._groups.clear()
        self._by_roots.clear()
        self._reductions.clear()

    def group(self, mesh: Mesh, axes: Axes) -> _Group:
        found = self._groups.get((mesh, axes))
        return found if found is not None else self._find_group(mesh, axes)

    def _find_group(self, mesh: Mesh, axes: Axes) -> _Group:
        roots = tuple(mesh.root_axes[axis] for axis in axes)
        group = self._by_roots.get(roots) or self._make_group(roots)
        self._groups[mesh, axes] = group
        return group

    def _make_group(self, roots: Axes) -> _Group:
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
        self._by_roots[roots] = _Group(process_group, members)
        return self._by_roots[roots]

    def all_reduce(self, shards: Shards, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        (x,) = shards
        out = x.clone(memory_format=torch.contiguous_format)
        if record.listeners:
            record.note("all_reduce", mesh, axes, out)
        group = self.group(mesh, axes)
        if _is_reducible(out.dtype, op):
            _wait(group.process_group.allreduce([_lent(out)], _ALL_REDUCE[op]))
            return [out]
        if op == "product" and out.is_complex():
            return [torch.stack(_gather(group, out.view(-1), [tuple(out.shape)] * group.size)).prod(0)]
        wire, op = _reducible(out, op)
        _wait(group.process_group.allreduce([_lent(wire)], _ALL_REDUCE[op]))
        return [_restored(wire, out.dtype)]

    def reducer(self, mesh: Mesh, axes: Axes, op: str) -> Callable[[Tensor], None]:
        """`all_reduce` of contiguous tensors of our own, in place and unknown to autograd, with everything looked up
        beforehand."""
        known, key, options = self._reductions, (mesh, axes, op), _ALL_REDUCE[op]

        def reduce(x: Tensor) -> None:
            if not _is_reducible(x.dtype, op):
                alias = x.detach()
                alias.copy_(self.all_reduce((alias,), mesh, axes, op)[0])
                return
            all_reduce = known.get(key)
            if all_reduce is None:  # groups are made by the first collective that needs them
                all_reduce = known[key] = self.group(mesh, axes).backend(x.device).allreduce
            if record.listeners:
                record.note("all_reduce", mesh, axes, x)
            work = all_reduce([x], options)
            if work is not None:
                work.wait()

        return reduce

    def all_gather(
        self, shards: Shards, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        (x,) = shards
        flat = x.reshape(-1)
        if record.listeners:
            record.note("all_gather", mesh, axes, flat)
        return [_gather(self.group(mesh, axes), flat, shapes[0])]

    def reduce_scatter(self, chunks: Chunks, mesh: Mesh, axes: Axes, op: str) -> list[Tensor]:
        (mine,) = chunks
        if record.listeners:
            record.note("reduce_scatter", mesh, axes, list(mine))
        group = self.group(mesh, axes)
        target = mine[group.me]
        if op == "product" and target.is_complex():
            return [torch.stack(_exchange(group, mine, [tuple(target.shape)] * group.size)).prod(0)]
        room = max(chunk.numel() for chunk in mine)
        wire, op = _reducible(torch.cat([_padded(chunk.reshape(-1), room) for chunk in group.to_group(mine)]), op)
        out = wire.new_empty((room, *wire.shape[1:]))
        _wait(group.process_group._reduce_scatter_base(out, wire, _REDUCE_SCATTER[op]))
        return [_restored(out, target.dtype)[: target.numel()].view(target.shape)]

    def all_to_all(
        self, chunks: Chunks, mesh: Mesh, axes: Axes, shapes: Sequence[Sequence[tuple]]
    ) -> list[list[Tensor]]:
        (mine,) = chunks
        if record.listeners:
            record.note("all_to_all", mesh, axes, list(mine))
        return [_exchange(self.group(mesh, axes), mine, shapes[0])]

    def broadcast(self, shards: Shards, mesh: Mesh, axes: Axes, source: int) -> list[Tensor]:
        (x,) = shards
        out = x.clone(memory_format=torch.contiguous_format)
        if record.listeners:
            record.note("broadcast", mesh, axes, out)
        group = self.group(mesh, axes)
        options = _options(BroadcastOptions, rootRank=group.number(source))
        _wait(group.process_group.broadcast([_lent(_movable(out.view(-1)))], options))
        return [out]

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


# Data on the wire. Shards may be uneven, strided, conjugated or of a dtype that a backend does not know.


def _gather(group: _Group, flat: Tensor, shapes: Sequence[tuple]) -> list[Tensor]:
    """Every member's tensor. The largest sets the room that each gets, so all members must know all shapes."""
    numels = [math.prod(shape) for shape in shapes]
    room = max(numels)
    flat = _padded(flat, room)
    out = flat.new_empty(group.size * room)
    _wait(group.process_group._allgather_base(_movable(out), _movable(flat), _ALL_GATHER))
    rows = group.from_group(out.view(group.size, room).unbind(0))
    return [row[:n].view(shape) for row, n, shape in zip(rows, numels, shapes, strict=True)]


def _exchange(group: _Group, chunks: Sequence[Tensor], shapes: Sequence[tuple]) -> list[Tensor]:
    """The chunk that each member has for us; `shapes` are theirs."""
    outgoing, incoming = group.to_group(chunks), group.to_group(shapes)
    numels = [math.prod(shape) for shape in incoming]
    flat = torch.cat([chunk.reshape(-1) for chunk in outgoing])
    out = flat.new_empty(sum(numels))
    wire, landing = _movable(flat), _movable(out)
    unit = 1 if wire is flat else flat.element_size()
    send, receive = [chunk.numel() * unit for chunk in outgoing], [n * unit for n in numels]
    _wait(group.process_group.alltoall_base(landing, wire, receive, send, _ALL_TO_ALL))
    return group.from_group([piece.view(shape) for piece, shape in zip(out.split(numels), incoming, strict=True)])


def _padded(flat: Tensor, room: int) -> Tensor:
    short = room - flat.numel()
    flat = torch.nn.functional.pad(flat, (0, short)) if short else flat.contiguous()
    return flat.resolve_conj().resolve_neg()


_KNOWN = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""The dtypes that every backend moves and reduces."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Small integers wrap around alike whether each addition is cut short or only the last."""


def _lent(out: Tensor) -> Tensor:
    """The same memory as another tensor, that does not refer to `out` as a view would.

    A backend's thread may hold what it was given a little longer than the collective lasts; a result should not live
    longer for that, nor its end differ between the ranks.
    """
    return out.data


def _movable(flat: Tensor) -> Tensor:
    """A contiguous flat tensor as any backend moves it: as bytes where the dtype may be unknown there. One of a single
    element is contiguous whatever its stride is, but has no bytes to be seen through that."""
    return flat if flat.dtype in _KNOWN else flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _is_reducible(dtype: torch.dtype, op: str) -> bool:
    """Whether every backend reduces a dtype as torch does. Extrema of floats are not: backends lose NaNs."""
    return dtype in _KNOWN and (op not in ("max", "min") or not dtype.is_floating_point)


def _reducible(fresh: Tensor, op: str) -> tuple[Tensor, str]:
    """A contiguous tensor of our own as any backend reduces it, and the operator that does to it what `op` means."""
    if _is_reducible(fresh.dtype, op):
        return fresh, op
    if fresh.dtype.is_floating_point:
        return _ordered(fresh, op), op
    if fresh.dtype == torch.bool:
        return fresh.view(torch.uint8), "max" if op == "sum" else op
    if fresh.is_complex():
        if op != "sum":
            raise TypeError(f"complex numbers have no {op}")
        return torch.view_as_real(fresh), op
    return fresh.to(_WIDER.get(fresh.dtype, fresh.dtype)), op


def _restored(wire: Tensor, dtype: torch.dtype) -> Tensor:
    if wire.dtype == dtype:
        return wire
    if dtype == torch.bool:
        return wire.view(torch.bool)
    if dtype.is_floating_point:
        return _flipped(wire).view(_FLOATS[wire.dtype]).to(dtype)
    return torch.view_as_complex(wire) if dtype.is_complex else wire.to(dtype)


# Floats as integers of the same order, in which a NaN is the end that wins


_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}


def _ordered(x: Tensor, op: str) -> Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    bits = torch.int64 if x.dtype == torch.float64 else torch.int32
    ends = torch.iinfo(bits)
    return torch.where(x.isnan(), ends.max if op == "max" else ends.min, _flipped(x.view(bits)))


def _flipped(bits: Tensor) -> Tensor:
    """The bits of a float as an integer of the same order, and back: negative floats grow downwards."""
    ends = torch.iinfo(bits.dtype)
    return torch.where(bits < 0, bits ^ ends.max, bits)
