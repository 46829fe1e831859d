"""`local_map`: a function of plain tensors, written for one rank, as a function of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.comm import AnyMesh
from shardwise.errors import PlacementError
from shardwise.layout import Layout, Placement, Placements
from shardwise.tensor import DTensor

PerValue = Sequence[Placements | None] | None
"""Placements for each of the flattened values; None for what is no DTensor."""


def local_map(
    func: Callable | None = None,
    out_placements: Placements | PerValue = None,
    in_placements: PerValue = None,
    in_grad_placements: PerValue = None,
    device_mesh: AnyMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable:
    """A function that is given DTensors, runs `func` on their shards, and makes DTensors of what that returns.

    `out_placements` are those of the results: the placements of the one result, or a tuple of these, one for each, None
    for what is no tensor. `in_placements`, one for each argument, are checked; arguments in other placements are moved
    with `redistribute_inputs`, and refused without. `in_grad_placements` are those of the arguments' gradients, where
    they are not the arguments': a replicated one that ranks use for different things has a `Partial` one. Plain tensors
    are passed on, and with no DTensor among its arguments the function is `func`. Results are on `device_mesh`, or on
    the mesh of the first DTensor. Without `func`, it is a decorator.

    >>> import torch, shardwise as sw
    >>> from shardwise.experimental import local_map
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> rows, columns = [sw.Shard(0)], [sw.Shard(1)]
    >>> product = local_map(torch.mm, out_placements=[sw.Partial()], in_placements=(columns, rows))
    >>> a, b = (sw.distribute_tensor(torch.ones(4, 4), mesh, where) for where in (columns, rows))
    >>> product(a, b).full_tensor().unique()
    tensor([4.])
    """
    if func is None:
        options = (out_placements, in_placements, in_grad_placements, device_mesh)
        return lambda function: local_map(function, *options, redistribute_inputs=redistribute_inputs)

    @functools.wraps(func)
    def on_dtensors(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten(args)
        given = [x for x in flat if isinstance(x, DTensor)]
        wanted, gradients = (_one_each(p, flat, n) for p, n in ((in_placements, "in"), (in_grad_placements, "in_grad")))
        local = [_local(x, p, g, redistribute_inputs) for x, p, g in zip(flat, wanted, gradients, strict=True)]
        out = func(*pytree.tree_unflatten(local, spec), **kwargs)
        if not given:
            return out
        mesh = given[0].device_mesh if device_mesh is None else device_mesh
        return _distributed(out, mesh, out_placements, uneven=any(_is_uneven(x.layout_on_mesh) for x in given))

    return on_dtensors


def _one_each(placements: PerValue, flat: list[Any], name: str) -> Sequence[Any]:
    if placements is None:
        return [None] * len(flat)
    if len(placements) != len(flat):
        raise PlacementError(f"local_map: {name}_placements has {len(placements)} entries for {len(flat)} arguments")
    for i, (value, wanted) in enumerate(zip(flat, placements, strict=True)):
        if isinstance(value, DTensor) and wanted is None:
            raise PlacementError(f"local_map: argument {i} is a DTensor, and {name}_placements has None for it")
        if not isinstance(value, Tensor) and wanted is not None:
            kind = type(value).__name__
            raise PlacementError(
                f"local_map: argument {i} is a {kind}, no tensor: {name}_placements must have None for it"
            )
    return placements


def _local(x: Any, wanted: Any, gradient: Any, redistribute: bool) -> Any:
    if not isinstance(x, DTensor):
        return x
    if wanted is not None:
        layout = Layout.of(x.layout_on_mesh.mesh, x.shape, wanted)
        if layout.placements != x.placements:
            if not redistribute:
                raise PlacementError(
                    f"local_map: an argument is {x.layout_on_mesh}, and in_placements asks for {layout}; move it "
                    f"with redistribute(), or say redistribute_inputs=True"
                )
            x = x.redistribute(placements=wanted)
    return x.to_local(grad_placements=gradient)


def _distributed(out: Any, mesh: Any, placements: Any, *, uneven: bool) -> Any:
    flat, spec = pytree.tree_flatten(out)
    alone = not isinstance(placements, tuple) or (placements and all(isinstance(p, Placement) for p in placements))
    each = (placements,) if alone else placements
    if len(each) != len(flat):
        raise PlacementError(f"local_map: out_placements has {len(each)} entries for {len(flat)} results")
    return pytree.tree_unflatten([_made(x, mesh, p, uneven) for x, p in zip(flat, each, strict=True)], spec)


def _made(x: Any, mesh: Any, placements: Any, uneven: bool) -> Any:
    if isinstance(x, DTensor):
        raise PlacementError(
            f"local_map: the function returned a DTensor, {x.layout_on_mesh}; it returns plain tensors"
        )
    if isinstance(x, Tensor):
        return DTensor.from_local(x, mesh, placements, run_check=uneven)  # then ranks tell each other their sizes
    if placements is not None:
        raise PlacementError(
            f"local_map: a result is a {type(x).__name__}, no tensor: out_placements must have None for it"
        )
    return x


def _is_uneven(layout: Layout) -> bool:
    """Whether ranks hold pieces of different sizes."""
    pieces = [layout.pieces(dim) for dim in range(len(layout.shape))]
    return any(len(set(sizes)) > 1 for sizes in pieces)
