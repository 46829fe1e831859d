"""Modules whose parameters and buffers are DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise.comm import AnyMesh, as_mesh
from shardwise.errors import PlanError, ReplicaError
from shardwise.layout import Mesh, Placement, Replicate
from shardwise.local import check_strided
from shardwise.parallel.agreement import agreed
from shardwise.parallel.fully_sharded.layouts import is_at_rest, split_outside
from shardwise.parallel.loaded_state import take_any_state
from shardwise.parallel.parts import compare_calls
from shardwise.tensor import DTensor, distribute_tensor, localise, wrap


def distribute_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors on a mesh.

    `partition_fn(name, submodule, mesh)` distributes what it wants of each submodule; the rest is replicated, and what
    is a DTensor on some of the mesh's axes already is replicated along the others. What
    several modules share stays one parameter or buffer: what `partition_fn` makes of it first counts for all of them.
    `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after the module's forward.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> sw.distribute_module(torch.nn.Linear(4, 2), mesh).weight.placements
    (Replicate(),)
    """
    mesh = as_mesh(device_mesh)
    device_mesh = mesh.origin if device_mesh is None else device_mesh

    def find() -> tuple[_OfModule, _OfModule]:
        _check_new(module)
        return _of_module("input_fn", input_fn), _of_module("output_fn", output_fn)

    before, after = agreed(
        mesh,
        find,
        lambda _: tensors_of(module),
        ReplicaError(f"distribute_module: another rank of {mesh} was refused its module"),
        ReplicaError(
            f"distribute_module: the ranks of {mesh} have different modules: names, shapes, dtypes and what is trained "
            f"must be the same on all of them"
        ),
    )
    with tied(module):
        for name, submodule in tuple(module.named_modules()):
            if partition_fn is not None:
                partition_fn(name, submodule, device_mesh)
    place_rest(module, device_mesh)
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            submodule.flatten_parameters = _stay_apart  # type: ignore[method-assign]
    compare_calls(module, mesh, when_trained=True)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, device_mesh), prepend=True)
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, device_mesh))
    take_any_state(module.modules())
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _stay_apart() -> None:
    """The weights of a recurrent layer are not moved together for cuDNN, which would ask for their addresses."""


def _check_new(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"distribute_module takes a torch.nn.Module, not a {type(module).__name__}")
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module was already applied to this module; its hooks would run twice")
    check_dense(module)


def check_dense(module: nn.Module) -> None:
    """Raise if the module has what cannot be made a DTensor."""
    for x in homes_of(module):
        check_strided(x)


def tensors_of(module: nn.Module) -> list[tuple]:
    """What ranks compare of a module."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors]


_OfModule = Callable[[nn.Module, Any, Any], Any] | None


def _of_module(name: str, function: Callable[..., Any] | None) -> _OfModule:
    """A function of the module, its inputs or outputs, and the mesh; older programs leave the module out."""
    if function is None:
        return None
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        pass
    else:
        return function
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        takes = inspect.signature(function)
        raise ValueError(f"{name} takes a module, its {name[:-3]}s and the mesh; this one takes {takes}") from None
    return lambda module, values, mesh: function(values, mesh)


Place = tuple[nn.Module, str]
"""Where a parameter or a buffer is kept: a module, and the name there."""


def homes_of(module: nn.Module) -> dict[Tensor, list[Place]]:
    """Where each parameter and buffer is kept: in several places if it is tied."""
    found: dict[Tensor, list[Place]] = {}
    for submodule in module.modules():
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if isinstance(tensor, Tensor):
                found.setdefault(tensor, []).append((submodule, name))
    return found


def _kept(module: nn.Module, name: str) -> Any:
    return module._parameters.get(name, module._buffers.get(name))


def keep(tensor: Tensor, places: list[Place]) -> None:
    for module, name in places:
        if _kept(module, name) is not tensor:
            setattr(module, name, tensor)  # recurrent layers keep lists of their weights, and listen


@contextmanager
def tied(module: nn.Module) -> Iterator[None]:
    """What is one tensor before is one tensor after: the first DTensor made of it, or else the first that replaced it.
    What was taken out of its module stays out."""
    before = homes_of(module)
    yield
    for tensor, places in before.items():
        present = [place for place in places if isinstance(_kept(*place), Tensor)]
        made = [x for place in present if (x := _kept(*place)) is not tensor]
        if made:
            keep(next((x for x in made if isinstance(x, DTensor)), made[0]), present)


def check_no_parametrizations(path: str, style: str, module: nn.Module, names: Collection[str] | None) -> None:
    """A style that shards parameters by their names, or all there are, misses those that are computed from others."""
    parametrized: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
    found = [*parametrized]
    found += [name for name in names or () if isinstance(module.__dict__.get(name), Tensor)]  # by utils.weight_norm
    for name in found if names is None else set(names).intersection(found):
        raise PlanError(
            f"{path}: its {name} is parametrized, so {style} would leave it unsharded; parallelize the module first, "
            f"and parametrize it then"
        )


def place_rest(
    module: nn.Module,
    device_mesh: AnyMesh,
    where: Mapping[str, Sequence[Placement]] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Turn what is still plain in a module into DTensors: its own, by name, as `where` says; the rest is replicated."""
    whole: Sequence[Placement] = [Replicate()] * device_mesh.ndim
    for tensor, places in homes_of(module).items():
        found = [where[name] for owner, name in places if where and owner is module and name in where]
        place(tensor, places, device_mesh, found[0] if found else whole, src_data_rank)


def place(
    tensor: Tensor,
    places: list[Place],
    device_mesh: AnyMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None,
) -> None:
    """Keep a DTensor in the places of a parameter or buffer, unless one is there; one at rest is split further."""
    mesh, is_parameter = as_mesh(device_mesh), isinstance(tensor, nn.Parameter)
    if not isinstance(tensor, DTensor):
        plain = tensor.detach() if is_parameter else tensor
        made: Any = distribute_tensor(plain, device_mesh, placements, src_data_rank=src_data_rank)
    elif is_at_rest(places[0][0], tensor, mesh):
        made = split_outside(tensor, mesh, placements)
    elif mesh is not tensor._layout.mesh and tensor._layout.mesh.is_within(mesh):
        made = _lifted(tensor, mesh)
    else:
        return
    keep(nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made, places)


def _lifted(x: DTensor, mesh: Mesh) -> DTensor:
    """The same shards on a mesh of more axes, along which every rank has them: replicated."""
    with torch.no_grad():
        return wrap(localise(x).detach(), x._layout.on(mesh))
