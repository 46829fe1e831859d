"""What goes into and out of modules that have a style: plain tensors, as parts of DTensors, and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwise.comm import Ranked, as_mesh, noters
from shardwise.errors import MeshError
from shardwise.layout import Placement, Shard
from shardwise.local import single
from shardwise.parallel.fully_sharded.layouts import MANAGED
from shardwise.parallel.parts import brought_in
from shardwise.redistribute import recall, remember, windows
from shardwise.tensor import DTensor

_latest: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def shared(x: Tensor, mesh: Any, path: str, *way: Any) -> DTensor:
    """What was last brought in on a mesh, if that is the same tensor: queries, keys and values are computed from one,
    which is gathered once, and whose gradient is reduced once."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return brought(x, mesh, path, *way)
    known, facts = _latest.get(mesh), (x._version, *way)
    if known is not None:
        if known[0]() is x and known[1] == facts and (found := recall(known[2], mesh)) is not None:
            return cast(DTensor, found)
        windows.get(mesh, {}).pop(known[2], None)  # it may have a whole graph
    made = brought(x, mesh, path, *way)
    _latest[mesh] = weakref.ref(x), facts, remember(made, mesh)
    return made


def brought(
    x: Tensor,
    mesh: Any,
    path: str,
    taken: tuple[Placement, ...],
    wanted: tuple[Placement, ...] | None,
    shape: Sequence[int] | None = None,
) -> DTensor:
    """A tensor in the layout that is wanted; a plain one is a part of a tensor in the layout `taken`."""
    found = x if isinstance(x, DTensor) else brought_in(named(path), x, mesh, taken, shape)
    mesh = as_mesh(mesh)
    if wanted is None or found.placements == normal(wanted, found.ndim):
        return found
    around = found._layout.mesh
    if around is mesh:
        return found.redistribute(placements=wanted)
    if not mesh.is_within(around):
        raise MeshError(
            f"{named(path)}: its style brings tensors to {wanted} on {mesh}, and was given one on {around}, "
            f"{found.layout_on_mesh}; lay it out on a mesh with the axes of both, or give plain tensors"
        )
    placements = list(found.placements)  # along other axes, those of data parallelism say, it stays as it is
    for name, placement in zip(mesh.names, normal(wanted, found.ndim), strict=True):
        placements[around.axis(name)] = placement
    if tuple(placements) == found.placements:
        return found  # which may remember where it was gathered from
    return found.redistribute(placements=placements)


def to_local(x: DTensor, module: nn.Module) -> Tensor:
    """This rank's part, plain. In the simulator, what all ranks have alike is one plain tensor, whose gradient counts
    once, as on each real rank; anything else is a `Ranked` tensor, and all is where each rank has its own batch."""
    local = x.to_local()
    if type(local) is not Ranked or not x._layout.replicated or MANAGED in module.__dict__:
        return local
    with torch._C.DisableTorchFunctionSubclass():  # along axes that the mesh leaves out, they may differ
        whole = len(x._layout.mesh.held) == x._layout.mesh.size()
        alike = whole or (noters[-1].is_alike_beside(x._layout.mesh) if noters else _are_equal(local))
    return single(local) if alike else local


def _are_equal(local: Ranked) -> bool:
    return all(torch.equal(local, y) for y in local._peers)


@lru_cache(maxsize=1024)
def normal(placements: tuple[Placement, ...], num_dims: int) -> tuple[Placement, ...]:
    """Placements with their dims counted from the front, as a tensor's own are."""
    return tuple(Shard(p.dim % num_dims) if isinstance(p, Shard) and num_dims else p for p in placements)


def named(path: str) -> str:
    return f"module {path!r}" if path else "the module"
