"""Modules whose parameters and buffers are DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.comm import as_mesh
from shardwise.layout import Replicate
from shardwise.tensor import DTensor, distribute_tensor


def distribute_module(
    module: nn.Module,
    device_mesh: Any,
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
    as_mesh(device_mesh)
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module was already applied to this module; its hooks would run twice")
    replicas: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, device_mesh)
        _replicate_rest(submodule, device_mesh, replicas)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, device_mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate_rest(module: nn.Module, device_mesh: Any, replicas: dict[int, nn.Parameter]) -> None:
    placements = [Replicate()] * device_mesh.ndim
    for key, param in module._parameters.items():
        if param is not None and not isinstance(param, DTensor):
            if id(param) not in replicas:
                made = distribute_tensor(param.detach(), device_mesh, placements)
                replicas[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
            module.register_parameter(key, replicas[id(param)])
    for key, buffer in module._buffers.items():
        if isinstance(buffer, Tensor) and not isinstance(buffer, DTensor):
            module._buffers[key] = distribute_tensor(buffer, device_mesh, placements)
