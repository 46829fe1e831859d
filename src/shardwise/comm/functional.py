"""The port that a tracer sees through: collectives are ops that return their results, of `torch.ops._c10d_functional`.

`make_fx` over a function of plain shards that makes DTensors of them, and returns plain shards, yields the program of
one rank: aten ops on shards, and the collectives in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardwise.comm.group import Group, Result
from shardwise.comm.port import Axes
from shardwise.comm.process_group import GroupPort, mesh_over
from shardwise.comm.wire import in_units, movable
from shardwise.errors import MeshError
from shardwise.layout import Mesh

_ops = torch.ops._c10d_functional


class FunctionalGroup(Group):
    """A group whose collectives write to nothing that they are given."""

    __slots__ = ()

    def own(self, x: Tensor) -> Tensor:
        return x.contiguous().resolve_conj().resolve_neg()

    def all_reduce(self, x: Tensor, op: str, awaited: bool) -> Result[Tensor]:
        return _result(_ops.all_reduce(x, op, self.name))

    def all_gather(self, x: Tensor, awaited: bool) -> Result[Tensor]:
        return _result(_ops.all_gather_into_tensor(movable(x), self.size, self.name), x.dtype)

    def reduce_scatter(self, x: Tensor, op: str, awaited: bool) -> Result[Tensor]:
        return _result(_ops.reduce_scatter_tensor(x, op, self.size, self.name))

    def all_to_all(self, x: Tensor, receive: list[int], send: list[int], awaited: bool) -> Result[Tensor]:
        sizes = in_units(receive, x), in_units(send, x)
        return _result(_ops.all_to_all_single(movable(x), *sizes, self.name), x.dtype)

    def broadcast(self, x: Tensor, source: int, awaited: bool) -> Result[Tensor]:
        shape = tuple(x.shape)
        sent = _result(_ops.broadcast(movable(x.view(-1)), self.number(source), self.name), x.dtype)
        return lambda: sent().view(shape)

    @property
    def name(self) -> str:
        return self.process_group.group_name


def _result(started: Tensor, dtype: torch.dtype | None = None) -> Result[Tensor]:
    def finish() -> Tensor:
        out = _ops.wait_tensor(started)
        return out if dtype is None or out.dtype == dtype else out.view(dtype)

    return finish


def _alias(x: Tensor, cls: type[Tensor]) -> Tensor:
    return torch.ops.aten.alias.default(x)


class FunctionalPort(GroupPort):
    """The ranks of process groups, communicating by ops. Aliases of shards are made by an op as well."""

    group_type = FunctionalGroup
    alias = staticmethod(_alias)

    def _make_group(self, roots: Axes) -> Group:
        with _disable_current_modes():  # ranks are numbers in a tensor, which is not part of what is traced
            return super()._make_group(roots)

    def rebuild_mesh(self, mesh: Mesh) -> tuple[Any, tuple]:
        return _rebuild, (self.device_mesh, mesh.names)


class _AsShards(TorchDispatchMode):
    """Shows tensors to the tracer, which is written in Python, as the plain shards that they are to C++."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import all of torch._dynamo to keep it out of here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        laid_out = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and "_layout" in x.__dict__]
        classes = [x.__class__ for x in laid_out]
        try:
            for x in laid_out:
                x.__class__ = Tensor
            return func(*args, **(kwargs or {}))
        finally:
            for x, cls in zip(laid_out, classes, strict=True):
                x.__class__ = cls


_meshes: dict[tuple[DeviceMesh, Any], Mesh] = {}


@contextmanager
def traceable(mesh: Mesh | DeviceMesh) -> Iterator[Mesh]:
    """Inside of a function that is traced: a mesh of the same ranks, on which all that is done to shards is ops.

        def step(x, weight):  # this rank's shards
            with traceable(device_mesh) as mesh:
                x, weight = DTensor.from_local(x, mesh, [Replicate()]), DTensor.from_local(weight, mesh, [Shard(1)])
                return (x @ weight).sum().full_tensor()

        program = make_fx(step)(x, weight)

    Its DTensors do not mix with those of the mesh itself, and those from outside of the function are not known to the
    tracer: what it is to see comes in as shards.
    """
    with _disable_current_modes():
        made = functional_mesh(mesh)
    with made, _AsShards():
        yield made


def functional_mesh(mesh: Mesh | DeviceMesh) -> Mesh:
    """The mesh of the same ranks on which collectives are ops."""
    device_mesh = mesh.origin if isinstance(mesh, Mesh) else mesh
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(f"only the program of a real rank can be traced, on a torch DeviceMesh; got {mesh}")
    key = device_mesh, dist.group.WORLD
    if key not in _meshes:
        _meshes[key] = mesh_over(FunctionalPort(device_mesh), None)
    return _meshes[key]


def _rebuild(device_mesh: DeviceMesh, names: tuple[str, ...]) -> Mesh:
    return functional_mesh(device_mesh)[names]
