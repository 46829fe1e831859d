"""What of a module is saved and loaded: parameters and persistent buffers, each tensor once, under all its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.files.memory import held_shards
from shardwise.comm import ranked
from shardwise.dispatch.aliasing.copied_views import carry_on
from shardwise.errors import CheckpointError
from shardwise.parallel.modules import homes_of, keep
from shardwise.tensor import DTensor, wrap
from shardwise.tensor.dtensor import OURS


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a module, and the names that it has there: several if it is tied."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def state_of(module: nn.Module) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors of a module's state dict, and what else is in it. Names are those of the module itself, without what
    wrappers put in front of them."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} is no module: state dicts are saved and loaded by torch.distributed.checkpoint"
        )
    if isinstance(module, DistributedDataParallel):
        module = module.module
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    others: dict[str, Any] = {}
    for wrapped, value in module.state_dict(keep_vars=True).items():
        name = wrapped.replace("_orig_mod.", "")
        if isinstance(value, Tensor):
            check_dense(value, name)
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
        else:
            others[name] = value
    return [Entry(tuple(names[key]), x) for key, x in tensors.items()], others


def check_dense(x: Tensor, name: str) -> None:
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(x, DTensor):
        raise CheckpointError(
            f"{name!r} is a {type(x).__module__}.{type(x).__qualname__}, which knows alone where its numbers are: only "
            f"plain tensors and shardwise's DTensors are saved and loaded (torch's by torch.distributed.checkpoint)"
        )
    if x.is_nested or x.layout is not torch.strided or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise CheckpointError(f"{name!r} is a {kind} tensor, and only dense ones are saved and loaded: convert it")


def check_kept(module: nn.Module, entries: Iterable[Entry]) -> None:
    """What a state dict's hooks have made up cannot be written to: nobody would see it. Nor can what is expanded."""
    kept = homes_of(module)
    for entry in entries:
        if entry.tensor not in kept:
            raise CheckpointError(
                f"{entry.name!r} is in the state dict of {type(module).__name__}, but it is neither a parameter nor a "
                f"buffer of its modules: nothing can be loaded into it"
            )
        if not entry.tensor.is_meta and any(_overlaps(shard) for _, shard in held_shards(entry.tensor)):
            raise CheckpointError(
                f"{entry.name!r} of {type(module).__name__} is expanded: its elements share memory, and nothing can be "
                f"loaded into it; make it contiguous()"
            )


def _overlaps(x: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True))


def without_memory(module: nn.Module) -> Iterator[str]:
    """The names of parameters and buffers on the meta device."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if x.is_meta:
            yield name


@torch.inference_mode(False)  # in which what is made is good for inference only
def with_memory(x: Tensor) -> Tensor:
    """The tensor, or one like it if it is on the meta device: laid out alike, with memory that holds anything."""
    if not x.is_meta:
        return x
    device = torch.get_default_device()
    if not isinstance(x, DTensor):
        return torch.empty_like(x, device="cpu" if device.type == "meta" else device, requires_grad=False)
    shards = [
        torch.empty_like(shard, device=x._layout.mesh.device_type, requires_grad=False) for _, shard in held_shards(x)
    ]
    return wrap(shards[0] if len(shards) == 1 else ranked(shards), x._layout)


@torch.inference_mode(False)
def replace(module: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Have a module hold tensors in the place of those without memory, where they are others."""
    homes = homes_of(module)
    for old, new in pairs:
        if new is not old:
            made: Any = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
            made.__dict__.update({name: value for name, value in old.__dict__.items() if name not in OURS})
            keep(made, homes[old])


def was_written(tensors: Iterable[Tensor]) -> None:
    """Memory was written to without torch's knowing: what was made of it before is out of date."""
    for x in tensors:
        for _, shard in held_shards(x):
            if not shard.is_inference():  # which has no version
                torch.autograd.graph.increment_version(shard)
        carry_on([x])
