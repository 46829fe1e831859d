"""State that is loaded takes the layouts of what it is loaded into, whatever mesh or device it was saved on.

Of a plain tensor, which every rank has as a whole, each rank keeps its part. So a state dict of one device loads into a
module or an optimizer of DTensors, and nothing is communicated; neither is more than one tensor copied at a time.

torch offers a place before a module loads its own tensors, and one before an optimizer loads. A module is given it with
its first DTensor, an optimizer when it first steps on DTensors. What an optimizer loads before that is laid out by its
next step, which knows it by its new `state`: until then every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map_only

from shardwise.comm import local_tensor
from shardwise.layout import Layout
from shardwise.tensor import DTensor, as_layout, wrap

_disabled = torch._C.DisableTorchFunctionSubclass

# Modules


def take_any_state(modules: Iterable[nn.Module]) -> None:
    """Let modules that have DTensors load state of one device, or of other meshes, into them."""
    for module in modules:
        for name, x in _own(module).items():
            take_any_state_of(module, name, x)


def take_any_state_of(module: nn.Module, name: str, x: Any) -> None:
    """The same of a module that is given a tensor."""
    if not isinstance(x, DTensor):
        return
    hooks: Any = module._load_state_dict_pre_hooks.values()
    if all(getattr(hook, "hook", None) is not _lay_out_entries for hook in hooks):
        module.register_load_state_dict_pre_hook(_lay_out_entries)


def _own(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _lay_out_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Before a module loads its own tensors: those for its DTensors become DTensors of their layouts. Tensors of other
    shapes are left for torch to refuse, which names both shapes."""
    assign = metadata.get("assign_to_params_buffers", False)
    for name, param in _own(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(param, DTensor) and isinstance(value, Tensor) and value.shape == param.shape:
            state_dict[prefix + name] = _for_param(param, value, assign)


def _for_param(param: DTensor, value: Tensor, assign: bool) -> Tensor:
    layout = param._layout
    if isinstance(value, DTensor) and value._layout.mesh is layout.mesh:
        return value  # torch copies it, which redistributes, or assigns it
    device = layout.mesh.device_type if param.is_meta else param.device
    return part_of(whole_of(value), layout.without_pending, device=device if assign else None)


# Optimizers

_seen: WeakKeyDictionary[optim.Optimizer, Any] = WeakKeyDictionary()


def lay_out_loaded_state(optimizer: optim.Optimizer) -> None:
    """Before a step: state that is new since the last one is brought to where the parameters are."""
    if _seen.get(optimizer) is optimizer.state:
        return
    if optimizer not in _seen and any(isinstance(param, DTensor) for param in _params(optimizer)):
        optimizer.register_load_state_dict_pre_hook(_lay_out_saved)
    with torch.no_grad():
        for param, kept in optimizer.state.items():
            kept.update(_laid_out(param, kept))
    _seen[optimizer] = optimizer.state


def _lay_out_saved(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before an optimizer loads a state. (If it is not of as many parameters, torch refuses it.)"""
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    param_of = dict(zip(saved, _params(optimizer), strict=False))
    with torch.no_grad():
        state = {key: _laid_out(param_of.get(key), kept) for key, kept in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _laid_out(param: Any, kept: Any) -> Any:
    """What is kept for a parameter, at any depth, where that is."""
    is_ours = param.__class__ is DTensor and not param._layout.has_pending
    return tree_map_only(Tensor, partial(_for_state, param), kept) if is_ours else kept


def _params(optimizer: optim.Optimizer) -> Iterable[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _for_state(param: DTensor, value: Tensor) -> Tensor:
    """State in the layout of its parameter, if it has its shape; else whole on every rank of the parameter's mesh."""
    layout = param._layout
    if isinstance(value, DTensor) and value._layout.mesh is layout.mesh:
        return as_layout(value, layout, "state") if value.shape == param.shape else value
    if not value.dim() and not isinstance(value, DTensor):
        return value  # counts of steps are plain
    wanted = layout if value.shape == param.shape else Layout(layout.mesh, value.shape)
    return part_of(whole_of(value), wanted, device=value.device)


# Both


def whole_of(value: Any) -> Tensor:
    """A tensor as every rank has it: a DTensor, torch's own too, is gathered."""
    with torch.no_grad():
        if not hasattr(value, "full_tensor"):
            return value.detach()
        return value.detach().to(torch.device(value.device_mesh.device_type)).full_tensor()


def part_of(whole: Tensor, layout: Layout, *, device: Any = None) -> DTensor:
    """A DTensor of a plain tensor that every rank has: views of it or, on a device, shards with memory of their own."""
    with _disabled(), torch.no_grad():
        shards = []
        for coordinate in layout.mesh.held:
            shard = whole[
                tuple(slice(start, start + size) for start, size in zip(*layout.box(coordinate), strict=True))
            ]
            if device is not None:
                shard = torch.empty(shard.shape, dtype=shard.dtype, device=device).copy_(shard)
            shards.append(shard)
        return wrap(local_tensor(shards), layout)
