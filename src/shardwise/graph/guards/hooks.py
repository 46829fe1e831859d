"""Hooks of modules, optimizers and tensors: where torch keeps them, and what they are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.comm import shards_of
from shardwise.comm.rendezvous import PLACES

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")

OF_ALL: tuple[Mapping[int, Callable], ...] = (
    *(of_modules._global_forward_hooks, of_modules._global_forward_pre_hooks),
    *(of_modules._global_backward_hooks, of_modules._global_backward_pre_hooks),
    *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
)
"""Hooks of all modules, and of all optimizers."""


def hooks_of(x: Any) -> Iterator[Mapping[int, Callable]]:
    """The dicts of hooks of a module, an optimizer or a tensor; of a DTensor, those of all shards held here."""
    if isinstance(x, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            for shard in shards_of(x):
                yield from (getattr(shard, kind, None) or {} for kind in _OF_TENSORS)
                yield from (found.calls for found, _ in shard.__dict__.get(PLACES, {}).values())
    else:
        yield from (getattr(x, kind) for kind in (_OF_MODULES if isinstance(x, nn.Module) else _OF_OPTIMIZERS))


def given_to(hook: Callable) -> list[Callable]:
    """The functions that a hook is made of, as ours are of users'."""
    if isinstance(hook, functools.partial):
        given = [hook.func, *hook.args, *hook.keywords.values()]
    else:
        given = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return [x for x in given if isinstance(x, (FunctionType, MethodType, functools.partial))]
