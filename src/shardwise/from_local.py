"""The layout of shards that the ranks bring themselves, and whether they agree where they must.

With `run_check` every rank first learns what all of them hold; what is wrong with it is then wrong on all ranks alike.
Where shards come in every step, ranks only `compare` theirs: one small reduction, and they learn more if they differ.
On accelerators they do not: these would first have to finish all that they were given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm import running_mesh, shards_of
from shardwise.comm.agreement import compared, digest
from shardwise.errors import PlacementError, ReplicaError, ShardShapeError
from shardwise.layout import Layout, Mesh, Placements, Replicate
from shardwise.words import counted, dtype_name

_disabled = torch._C.DisableTorchFunctionSubclass
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)

Coordinate = tuple[int, ...]
Shape = tuple[int, ...]


def layout_of_shards(
    local: Tensor,
    mesh: Mesh,
    placements: Placements | None,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    compare: bool = False,
) -> Layout:
    """The layout in which `local` holds the shards, or an error that says why there is none."""
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    with _disabled():
        shards = shards_of(local)
        coordinates: Sequence[Coordinate] = mesh.held
        shapes: Sequence[Shape] = [tuple(shard.shape) for shard in shards]
        _check_kinds(mesh, coordinates, [(shard.dim(), shard.dtype) for shard in shards])
        look = run_check and mesh.device_type != "meta"
        if (look or (compare and _differ(shards[0], mesh, placements, shape))) and len(mesh.held) < mesh.size():
            coordinates, shapes = _of_all_ranks(shards[0], mesh)
        layout = _infer_layout(Layout.of(mesh, shapes[0], placements), coordinates, shapes, shape)
        _check_shapes(layout, coordinates, shapes)
        if look:
            _check_replicas(shards, layout)
    return layout


def check_alike(x: Tensor, mesh: Mesh) -> None:
    """Raise, on all ranks alike, unless each of them has a tensor of the same shape and dtype. What is one tensor in
    the simulator is the same for all of its ranks."""
    if len(shards_of(x)) == len(mesh.held):
        layout_of_shards(x, mesh, None, run_check=False, shape=None, compare=True)


def _differ(shard: Tensor, mesh: Mesh, placements: Placements, shape: Sequence[int] | None) -> bool:
    """Whether ranks bring shards of other shapes than the others, or, of a given shape, some that do not fit it."""
    if mesh.device_type != "cpu":
        return False
    found = tuple(shard.shape)
    if shape is not None:
        wanted = Layout.of(mesh, shape, placements).local_shape(mesh.held[0])
        found = (*shape, found == wanted)
    return compared(mesh, digest((found, shard.dtype)))[0]


def gradient_layout(layout: Layout, placements: Placements) -> Layout:
    """The layout of gradients with these placements, of the same shapes as the shards."""
    given = Layout.of(layout.mesh, layout.shape, placements)
    if given.held_shapes != layout.held_shapes:
        raise PlacementError(f"from_local: gradients as {given} have other shapes than shards of {layout}")
    return given


def check_strides(layout: Layout, found: Sequence[int], said: Sequence[int]) -> None:
    """Of dims with one index no stride is wrong."""
    if len(said) != len(found) or any(a != b and n > 1 for a, b, n in zip(found, said, layout.shape, strict=True)):
        raise ShardShapeError(
            f"stride={list(said)} does not fit the shards: of the global tensor, {layout}, they make {list(found)}"
        )


def laid_out(shards: Sequence[Tensor], layout: Layout) -> Sequence[Tensor]:
    """The shards as they are brought, unless they are too thin to show the global strides: then as fresh ones."""
    if not layout.thinness:
        return shards
    return [x if x.stride() == torch.empty(x.shape, device="meta").stride() else _fresh(x) for x in shards]


def _fresh(x: Tensor) -> Tensor:
    """A copy with the strides of a new tensor. (`contiguous` leaves strides that do not matter to it.)"""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _of_all_ranks(shard: Tensor, mesh: Mesh) -> tuple[Sequence[Coordinate], Sequence[Shape]]:
    """Where ranks are, and the shapes of what they bring. They are asked now, also while a program is captured."""
    mesh = running_mesh(mesh)
    coordinates = list(product(*(range(extent) for extent in mesh.shape)))
    with _disable_current_modes():
        _check_kinds(mesh, coordinates, _gather_kinds(shard, mesh))
        return coordinates, _gather_shapes(shard, mesh)


def _gather_kinds(shard: Tensor, mesh: Mesh) -> list[tuple[int, torch.dtype]]:
    """Every rank's number of dims and dtype: two numbers, whatever the ranks have."""
    mine = torch.tensor([shard.dim(), _DTYPES.index(shard.dtype)], device=mesh.device_type)
    return [(num_dims, _DTYPES[code]) for num_dims, code in _gather(mine, mesh)]


def _gather_shapes(shard: Tensor, mesh: Mesh) -> list[Shape]:
    """Every rank's shape, once they are known to be equally long."""
    if not shard.dim():
        return [()] * mesh.size()
    mine = torch.tensor(tuple(shard.shape), dtype=torch.int64, device=mesh.device_type)
    return [tuple(row) for row in _gather(mine, mesh)]


def _gather(mine: Tensor, mesh: Mesh) -> list[list[int]]:
    rows = mesh.port.all_gather([mine], mesh, tuple(range(mesh.ndim)), [[tuple(mine.shape)] * mesh.size()])[0]
    return torch.stack(rows).tolist()


def _check_kinds(mesh: Mesh, coordinates: Sequence[Coordinate], kinds: Sequence[tuple[int, torch.dtype]]) -> None:
    for coordinate, kind in zip(coordinates, kinds, strict=True):
        if kind != kinds[0]:
            raise ShardShapeError(
                f"shards have one dtype and number of dims on all ranks, but the one at "
                f"{_place(mesh, coordinates[0])} is {_kind(*kinds[0])} and the one at {_place(mesh, coordinate)} is "
                f"{_kind(*kind)}"
            )


def _kind(num_dims: int, dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} with {counted(num_dims, 'dim')}"


def _place(mesh: Mesh, coordinate: Coordinate) -> str:
    return ", ".join(f"{name}={at}" for name, at in zip(mesh.names, coordinate, strict=True))


def _infer_layout(
    probe: Layout, coordinates: Sequence[Coordinate], shapes: Sequence[Shape], shape: Sequence[int] | None
) -> Layout:
    """The layout whose shards have these shapes. Where only one rank's is known, the others are taken to be alike."""
    mesh = probe.mesh
    sizes: list[tuple[int, ...] | None] = []
    whole: list[int] = []
    for dim, axes in enumerate(probe.splits):
        num_pieces = math.prod(mesh.shape[axis] for axis in axes)
        known = {probe.piece_index(dim, at): found[dim] for at, found in zip(coordinates, shapes, strict=True)}
        if axes and len(known) == num_pieces:
            sizes.append(tuple(known[index] for index in range(num_pieces)))
            whole.append(sum(known.values()))
        else:
            sizes.append(None)
            whole.append(shapes[0][dim] * num_pieces)
    if shape is None or list(shape) == whole:
        return Layout(mesh, whole, probe.splits, probe.pending, sizes)
    if len(shape) != len(whole):
        raise ShardShapeError(f"shape={list(shape)} has {len(shape)} dims, the shard has {len(whole)}")
    return Layout(mesh, shape, probe.splits, probe.pending)


def _check_shapes(layout: Layout, coordinates: Sequence[Coordinate], shapes: Sequence[Shape]) -> None:
    for coordinate, found in zip(coordinates, shapes, strict=True):
        if found != layout.local_shape(coordinate):
            raise ShardShapeError(
                f"the shard at {_place(layout.mesh, coordinate)} has shape {list(found)}, but {layout} wants "
                f"{list(layout.local_shape(coordinate))} there"
            )


def _check_replicas(shards: Sequence[Tensor], layout: Layout) -> None:
    """Ranks that hold the same piece must hold the same values. All ranks find out, and raise, together."""
    mesh = layout.mesh
    for axis in range(mesh.ndim):
        if layout.axis_dims[axis] is None and layout.pending[axis] is None:
            with torch.no_grad():
                first = mesh.port.broadcast([x.detach() for x in shards], mesh, (axis,), 0)
                same = [_same(a, b).to(torch.int32) for a, b in zip(first, shards, strict=True)]
                agree = mesh.port.all_reduce(same, mesh, tuple(range(mesh.ndim)), "min")
            if not all(bool(flag) for flag in agree):
                raise ReplicaError(
                    f"from_local: {layout} says that the ranks along {mesh.names[axis]!r} hold the same values, but "
                    f"they differ; use Shard or Partial there, or make them equal first"
                )


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors hold the same values, NaNs in the same places included."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return ((a == b) | ((a != a) & (b != b))).all()
