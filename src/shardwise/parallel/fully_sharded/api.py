"""`fully_shard`: checked on all ranks, then done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm import AnyMesh, as_mesh
from shardwise.errors import PlacementError, ReplicaError
from shardwise.layout import Shard, entered_mesh
from shardwise.local import check_strided
from shardwise.parallel.agreement import agreed
from shardwise.parallel.fully_sharded.group import Entry, Group, Options, Place
from shardwise.parallel.fully_sharded.hooks import Hooks, hooks_of
from shardwise.parallel.fully_sharded.layouts import (
    MANAGED,
    DataParallel,
    DataParallelMeshDims,
    layouts_of,
    sharded,
)
from shardwise.parallel.fully_sharded.module import fsdp_class
from shardwise.parallel.fully_sharded.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, policy_of
from shardwise.parallel.loaded_state import take_any_state
from shardwise.tensor import DTensor

_TAKEN = "_fully_sharded_elsewhere"
_M = TypeVar("_M", nn.Module, list[nn.Module])
_Found = tuple[tuple[nn.Module, ...], list[nn.Module], list[Entry], Options, OffloadPolicy]
_FULL_PRECISION, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: _M,
    *,
    mesh: AnyMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> _M:
    """Shard a module's parameters, with their gradients and the optimizer's state, over data parallel ranks.

    Parameters become DTensors that rest as shards (of dim 0, or as `shard_placement_fn` says). Those that no call on a
    module inside has taken form a group: it is gathered by one collective before the module's forward, freed after it
    (`reshard_after_forward`; by default, but for the outermost module), gathered again for the backward pass, and its
    gradients are reduce-scattered by one. So call it on blocks first, then on the model. Several modules in a list form
    one group. On a mesh of two axes, shards are replicated along the first; `dp_mesh_dims` names them on a larger one.

    Where the inputs of a forward are DTensors, split over the mesh, the loss is that of the whole batch, and gradients
    are summed. Where they are plain tensors, each rank has its own batch and loss, and gradients are averaged.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("dp",))
    >>> model = sw.parallel.fully_shard(torch.nn.Linear(4, 2), mesh=mesh)
    >>> batch = sw.distribute_tensor(torch.ones(6, 4), mesh, [sw.Shard(0)])
    >>> model(batch).sum().backward()
    >>> model.weight.placements, model.weight.grad.placements
    ((Shard(dim=0),), (Shard(dim=0),))
    """
    data: DataParallel = _data_parallel(mesh, dp_mesh_dims)

    def find() -> _Found:
        options, offload = _options(mp_policy, reshard_after_forward), _offload(offload_policy)
        return *_entries_of(module, data, shard_placement_fn, ignored_params), options, offload

    modules, managed, entries, options, offload = agreed(
        data.mesh,
        find,
        _facts,
        ReplicaError(f"fully_shard: another rank of {data.mesh} was refused its module"),
        ReplicaError(
            f"fully_shard: the ranks of {data.mesh} have different modules or options: names, shapes, dtypes, what is "
            f"trained, placements of parameters, and policies must be the same on all of them"
        ),
    )
    for entry in entries:  # nothing was changed so far, and from here on nothing fails
        _replace(entry, offload)
    Hooks(Group(modules, entries, data, options), _buffers(managed, data))
    for owner in managed:
        owner.__dict__[MANAGED] = data.mesh
    take_any_state(managed)
    for one in modules:
        one.__class__ = fsdp_class(one.__class__)
    return module


def _data_parallel(mesh: AnyMesh | None, dims: DataParallelMeshDims | None) -> DataParallel:
    around: Any = mesh if mesh is not None else _default_mesh()
    return DataParallel.on(around if dims is None else as_mesh(around).origin[dims.names])


def _buffers(modules: Iterable[nn.Module], data: DataParallel) -> list[Place]:
    """Where buffers are kept: on the device of the mesh, as parameters are."""
    places = [(owner, name) for owner in modules for name in owner._buffers]
    for owner, name in places:
        buffer = owner._buffers[name]
        if buffer is not None and not buffer.is_meta:
            owner._buffers[name] = buffer.to(data.mesh.device_type)
    return places


def _options(mp_policy: Any, reshard_after_forward: Any) -> Options:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported: it is True, False or None. Shards of "
            f"smaller groups of ranks are had by a mesh of two axes, ('replicate', 'shard')"
        )
    return Options(policy_of(mp_policy, MixedPrecisionPolicy), reshard_after_forward=reshard_after_forward)


def _offload(policy: Any) -> OffloadPolicy:
    return policy_of(policy, CPUOffloadPolicy, OffloadPolicy)


def _facts(found: _Found) -> object:
    """What must be the same on all ranks."""
    _, _, entries, *options = found
    params = [(e.name, e.param.shape, e.param.dtype, e.param.requires_grad, e.layouts.resting.splits) for e in entries]
    return params, options


def _entries_of(
    module: Any,
    data: DataParallel,
    place: Callable[[Any], Shard | None] | None,
    ignored_params: set[nn.Parameter] | None,
) -> tuple[tuple[nn.Module, ...], list[nn.Module], list[Entry]]:
    """The modules given, those whose parameters they manage, and these parameters; or what is wrong with them."""
    modules = _modules(module)
    managed, ignored = _managed(modules), set(map(id, ignored_params or ()))
    entries = []
    for param, (name, where) in _places(modules, managed).items():
        if id(param) not in ignored:
            _check(param, name)
            placement = (place and place(param)) or Shard(0)
            entries.append(Entry(name, where, layouts_of(param, data, placement, name), param))
    return modules, managed, entries


def _default_mesh() -> AnyMesh | None:
    """All ranks, where there is no mesh around."""
    if entered_mesh() is not None or not dist.is_initialized() or dist.device_mesh._mesh_resources.mesh_stack:
        return None
    device = torch.accelerator.current_accelerator()
    return dist.init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _modules(module: Any) -> tuple[nn.Module, ...]:
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(f"fully_shard takes a torch.nn.Module, or a list of them, not a {type(one).__name__}")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)) and type(one).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard: a {type(one).__name__} has no forward to gather for; call it on its modules"
            )
        if hooks_of(one) is not None:
            raise RuntimeError(f"fully_shard was already called on this {type(one).__name__}")
    if not modules or len(set(modules)) < len(modules):
        raise ValueError("fully_shard takes at least one module, and each of them once")
    return modules


def _managed(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules whose parameters are this call's: not those inside of modules that had one before."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found and hooks_of(module) is None:
            found[module] = None
            for child in module.children():
                visit(child)

    for module in modules:
        visit(module)
    return list(found)


def _places(roots: Sequence[nn.Module], managed: Iterable[nn.Module]) -> dict[Tensor, tuple[str, list[Place]]]:
    """The parameters of modules: what each is called, from the class of the module given on, and where it is kept."""
    paths = {m: (type(root).__name__, *filter(None, (path,))) for root in roots for path, m in root.named_modules()}
    found: dict[Tensor, tuple[str, list[Place]]] = {}
    for module in managed:
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, (".".join((*paths[module], name)), []))[1].append((module, name))
    return found


def _check(param: Any, name: str) -> None:
    check_strided(param)
    if param.__dict__.get(_TAKEN):
        raise PlacementError(
            f"fully_shard: {name} is tied to a parameter that another call has sharded: give both modules to one call, "
            f"fully_shard([a, b])"
        )


def _replace(entry: Entry, offload: OffloadPolicy) -> None:
    """Put the shards in the place of a parameter. What else holds it can find out."""
    param = entry.param
    with torch.no_grad():
        shards: Tensor = sharded(param, entry.layouts)
        if isinstance(offload, CPUOffloadPolicy):
            shards = shards.cpu()
            shards = shards.pin_memory() if offload.pin_memory and torch.accelerator.is_available() else shards
    made: Any = nn.Parameter(shards, requires_grad=param.requires_grad)
    made.__dict__.update({k: v for k, v in param.__dict__.items() if k not in DTensor.__annotations__})
    param.__dict__[_TAKEN] = True
    entry.param = made
    entry.show(made)
