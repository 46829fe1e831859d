"""Kernels of one's own for a device, in the place of functions that run on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwise.dispatch import clear_cache
from shardwise.rules.kit.kernels import kernels

_F = TypeVar("_F", bound=Callable[..., Any])


def register_kernel(function: Callable[..., Any], device: str) -> Callable[[_F], _F]:
    """Say what runs on the shards of a device in the place of a function, as a decorator.

    >>> import torch, shardwise as sw
    >>> from shardwise.experimental import register_kernel
    >>> @register_kernel(torch.nn.functional.silu, "cuda")
    ... def fused_silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    ...     return x * torch.sigmoid(x)  # a Triton kernel, say, in an autograd function

    The kernel is given what the function would be given, plain shards for tensors, and gives what that gives; its
    gradient is its own. What it does not take it may leave to the function. It runs where the shards would run the
    function as it is. Of a function that the ranks compute together, `docs/rules.md` names the steps that it may be
    offered for. Plans made before are forgotten; on other devices nothing changes.
    """
    if not callable(function):
        raise TypeError(f"a kernel stands for a function, such as torch.nn.functional.silu, not for {function!r}")
    torch.device(device)  # in torch's words

    def register(kernel: _F) -> _F:
        kernels[function, device] = kernel
        clear_cache()
        return kernel

    return register
