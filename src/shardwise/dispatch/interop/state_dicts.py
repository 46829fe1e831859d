"""State dicts of torch.distributed.checkpoint, whose functions know no DTensors but torch's.

All of them go through a state dict by one function, which is told what becomes of a DTensor and what of a plain tensor.
It takes ours for plain ones: `get_model_state_dict` would leave shards where the whole was asked for, and copies that
are to be saved in the background would ask for the memory of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor, shards_of
from shardwise.tensor import DTensor, as_layout, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_as_subclass = torch._C.TensorBase.as_subclass


def knowing_dtensors(iterate: Callable) -> Callable:
    """`_iterate_state_dict(value, sharded_tensor_func, dtensor_func, tensor_func, …)`."""
    as_it_is = iterate.__globals__["_identity_func"]

    @functools.wraps(iterate)
    def iterated(value: Any, sharded_func: Any, dtensor_func: Any, tensor_func: Any, **options: Any) -> Any:
        if isinstance(value, DTensor):
            about = options.get("pg"), options.get("device"), options.get("companion_obj")
            if dtensor_func is as_it_is:
                value = tensor_func(value, *about)
            elif tensor_func is as_it_is:  # who changes DTensors alone wants them whole
                moved: Any = value.detach().to(value._layout.mesh.device_type)  # it may rest on the host
                value = moved.full_tensor()
            else:
                value = on_each_shard(value, lambda shard: tensor_func(shard, *about))
            tensor_func = as_it_is
        return iterate(value, sharded_func, dtensor_func, tensor_func, **options)

    return iterated


def staging_shards(offload: Callable) -> Callable:
    """`StateDictStager._offload_tensor(x, memo, …)`: a copy of a tensor in the host's memory. What is pending is
    reduced before, so that nothing is communicated in the background."""

    @functools.wraps(offload)
    def offloaded(self: Any, x: Tensor, memo: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(x, DTensor):
            return offload(self, x, memo, *args, **kwargs)

        def copied(shard: Tensor) -> Tensor:
            self._keep_alive(shard, memo)  # which remembers it by its address
            return offload(self, shard, memo, *args, **kwargs)

        return on_each_shard(settled(x), copied)

    return offloaded


def settled(x: Tensor) -> Any:
    """A tensor outside the graph with nothing pending on it. Where something is, all ranks must call this."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        return as_layout(x.detach(), x._layout.without_pending, "tensor")


def on_each_shard(x: DTensor, make: Callable[[Tensor], Tensor]) -> DTensor:
    """A DTensor of the same layout, of what `make` makes of each shard that is held here."""
    with _disabled(), torch.no_grad():
        shards = [make(_as_subclass(shard.detach(), Tensor)) for shard in shards_of(localise(x))]
    return wrap(local_tensor(shards), x._layout)
