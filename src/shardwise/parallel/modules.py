"""Modules whose parameters and buffers are DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.comm import as_mesh
from shardwise.layout import Replicate
from shardwise.tensor import DTensor, distribute_tensor


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors on a mesh.

    `partition_fn(name, submodule, mesh)` distributes what it wants of each submodule; the rest is replicated.
    `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after the module's forward.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> sw.distribute_module(torch.nn.Linear(4, 2), mesh).weight.placements
    (Replicate(),)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"distribute_module takes a torch.nn.Module, not a {type(module).__name__}")
    mesh = as_mesh(device_mesh)
    device_mesh = mesh.origin if device_mesh is None else device_mesh
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module was already applied to this module; its hooks would run twice")
    before, after = _of_module("input_fn", input_fn), _of_module("output_fn", output_fn)
    replicas: dict[Tensor, Any] = {}  # a parameter or buffer that two modules share stays one
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, device_mesh)
        _replicate_rest(submodule, device_mesh, replicas)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, device_mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, device_mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _of_module(name: str, function: Callable[..., Any] | None) -> Callable[[nn.Module, Any, Any], Any] | None:
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


def _replicate_rest(module: nn.Module, device_mesh: Any, replicas: dict[Tensor, Any]) -> None:
    placements = [Replicate()] * device_mesh.ndim
    for key, param in module._parameters.items():
        if param is not None and not isinstance(param, DTensor):
            if param not in replicas:
                made = distribute_tensor(param.detach(), device_mesh, placements)
                replicas[param] = nn.Parameter(made, requires_grad=param.requires_grad)
            module.register_parameter(key, replicas[param])
    for key, buffer in module._buffers.items():
        if isinstance(buffer, Tensor) and not isinstance(buffer, DTensor):
            if buffer not in replicas:
                replicas[buffer] = distribute_tensor(buffer, device_mesh, placements)
            module._buffers[key] = replicas[buffer]
