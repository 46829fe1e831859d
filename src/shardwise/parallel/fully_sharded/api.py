"""`fully_shard`, and the methods that it gives to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm import AnyMesh
from shardwise.errors import PlacementError, ReplicaError
from shardwise.layout import Shard, entered_mesh
from shardwise.parallel.agreement import agreed
from shardwise.parallel.fully_sharded.group import Entry, Group, Options, Place
from shardwise.parallel.fully_sharded.hooks import HOOKS, Hooks, hooks_of
from shardwise.parallel.fully_sharded.layouts import MANAGED, DataParallel, layouts_of, sharded
from shardwise.parallel.fully_sharded.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.loaded_state import take_any_state
from shardwise.tensor import DTensor

_TAKEN = "_fully_sharded_elsewhere"
_M = TypeVar("_M", nn.Module, list[nn.Module])
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
) -> _M:
    """Shard a module's parameters, with their gradients and the optimizer's state, over data parallel ranks.

    Parameters become DTensors that rest as shards (of dim 0, or as `shard_placement_fn` says). Those that no call on a
    module inside has taken form a group: it is gathered by one collective before the module's forward, freed after it
    (`reshard_after_forward`; by default, but for the outermost module), gathered again for the backward pass, and its
    gradients are reduce-scattered by one. So call it on blocks first, then on the model. Several modules in a list form
    one group. On a mesh of two axes, shards are replicated along the first.

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
    data = DataParallel.on(mesh if mesh is not None else _default_mesh())
    modules, managed, entries = agreed(
        data.mesh,
        lambda: _entries_of(module, data, reshard_after_forward, shard_placement_fn, ignored_params),
        lambda found: [(e.name, e.param.shape, e.param.dtype, e.layouts.resting.splits) for e in found[2]],
        ReplicaError(f"fully_shard: another rank of {data.mesh} was refused its module"),
        ReplicaError(
            f"fully_shard: the ranks of {data.mesh} have different modules: names, shapes, dtypes and placements of "
            f"parameters must be the same on all of them"
        ),
    )
    for entry in entries:  # nothing was changed so far, and from here on nothing fails
        _replace(entry, offload_policy)
    options = Options(mp_policy, reshard_after_forward=reshard_after_forward)
    buffers = [(owner, name) for owner in managed for name in owner._buffers]
    for owner, name in buffers:
        buffer = owner._buffers[name]
        if buffer is not None and not buffer.is_meta:  # as parameters are
            owner._buffers[name] = buffer.to(data.mesh.device_type)
    Hooks(Group(modules, entries, data, options), buffers)
    for owner in managed:
        owner.__dict__[MANAGED] = data.mesh
    take_any_state(managed)
    for one in modules:
        one.__class__ = _fsdp_class(one.__class__)
    return module


def _entries_of(
    module: Any,
    data: DataParallel,
    reshard_after_forward: Any,
    place: Callable[[Any], Shard | None] | None,
    ignored_params: set[nn.Parameter] | None,
) -> tuple[tuple[nn.Module, ...], list[nn.Module], list[Entry]]:
    """The modules given, those whose parameters they manage, and these parameters; or what is wrong with them."""
    modules = _modules(module)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported: it is True, False or None. Shards of "
            f"smaller groups of ranks are had by a mesh of two axes, ('replicate', 'shard')"
        )
    managed, ignored = _managed(modules), set(map(id, ignored_params or ()))
    entries = []
    for param, (name, where) in _places(managed).items():
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


def _places(modules: Iterable[nn.Module]) -> dict[Tensor, tuple[str, list[Place]]]:
    found: dict[Tensor, tuple[str, list[Place]]] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, (f"{type(module).__name__}.{name}", []))[1].append((module, name))
    return found


def _check(param: Any, name: str) -> None:
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


class FSDPModule:
    """What a module is as well, once it is fully sharded. Methods are about this module's own group, unless they
    `recurse`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of such a class (a slice of an nn.Sequential) is one that was not sharded."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise NotImplementedError(
            "a fully sharded module is not copied; make another one in the same way, and load its state_dict(). So is "
            "a moving average kept: torch.optim.swa_utils.get_ema_multi_avg_fn() takes the parameters of both"
        )

    @property
    def _group(self) -> Group:
        return self.__dict__[HOOKS].group

    def _groups(self, recurse: bool) -> list[Group]:
        modules: Any = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        found = [hooks_of(module) for module in modules]
        return list(dict.fromkeys(hooks.group for hooks in found if hooks is not None))

    def _set(self, recurse: bool, **options: Any) -> None:
        for group in self._groups(recurse):
            for name, value in options.items():
                setattr(group.options, name, value)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters, and have it show them. With `async_op`, start to: what is returned waits."""
        self._group.start()
        handle = UnshardHandle(self.__dict__[HOOKS])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Have the module show its shards, and give back the memory of what was gathered."""
        self._group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes reduce gradients, or keep them, whole, for the first one that does."""
        self._set(recurse, sync=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients of shards are added up over replicas, or kept for the first pass that does."""
        self._set(recurse, all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether what was gathered is freed after the forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is True or False, not {reshard_after_forward!r}")
        self._set(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether what was gathered is freed after the backward pass. If not, the next forward has it already, unless
        the parameters were changed."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather while this one computes, instead of the one that came after it in the last pass."""
        self._set(False, forward_prefetch=[_group_of(module) for module in modules])

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather while this one's gradients are computed, instead of the one that ran before it."""
        self._set(False, backward_prefetch=[_group_of(module) for module in modules])

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What sums of gradients are divided by, instead of the number of ranks (of batches that are plain tensors)."""
        self._set(False, divide_factor=factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that this rank did not use have a gradient of zeros, as others may have used them."""
        self._set(recurse, reduce_unused=reduce_scatter_unused_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether gradients need the parameters themselves: not those of an embedding."""
        self._set(False, unshard_in_backward=unshard_in_backward)

    def reset_iter_state(self) -> None:
        """Forget a backward pass that failed. (The next forward does, too.)"""
        self.__dict__[HOOKS].schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """For programs written for torch: every backward pass here ends with all its gradients."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The shards, even if the module shows what was gathered: that is freed, as in torch."""
        self._group.reshard()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._group.reshard()  # or what is loaded would be lost with what was gathered
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for group in self._groups(recurse):
            group.reshard()
        return super()._apply(fn, recurse)  # type: ignore[misc]


class UnshardHandle:
    """Parameters that are being gathered."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Hooks | None = hooks

    def wait(self) -> None:
        """Have them, and have the module show them."""
        if self._hooks is not None:
            self._hooks.show_unsharded()
        self._hooks = None


def _group_of(module: Any) -> Group:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"expected a module that fully_shard was called on, got a {type(module).__name__}")
    return module._group


_classes: dict[type, type] = {}


def _fsdp_class(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes[cls]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a fully sharded module find its parameters gathered, as `forward` does."""
    hooks = hooks_of(module)
    if hooks is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = hooks.after_forward(module, args, output)
        return output

    setattr(module, method_name, gathered)
