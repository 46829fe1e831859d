"""What `fully_shard` makes of a module: the methods that it has besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.fully_sharded.group import Group
from shardwise.parallel.fully_sharded.hooks import HOOKS, Hooks, hooks_of


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

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`, by its older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.cuda.Stream | None = None) -> None:
        """What is called with the sums of gradients, flat, before the shards get them: to add those of ranks that the
        mesh does not have, say. It runs in the current stream."""
        self._set(False, all_reduce_hook=hook)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What to wait for before parameters are gathered again."""
        event.wait()

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

    # What torch asks of its streams, buffers and groups: here there is nothing to choose, and results are the same

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Gradients are always added up, and divided then."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Each reduction has the memory that it needs, until it is through."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """The mesh's group gathers and reduces."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """What is sent is in ordinary memory."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """What is sent is in ordinary memory."""

    def set_custom_all_gather(self, comm: Any) -> None:
        raise NotImplementedError("parameters are gathered by the process group of the mesh: choose its backend")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        raise NotImplementedError("gradients are reduced by the process group of the mesh: choose its backend")

    # What modules do, with the shards

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


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """For programs written for torch, in which models share streams: here there are none of their own."""
    for module in modules:
        _group_of(module)


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


def fsdp_class(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes[cls]


def class_before(cls: type) -> type:
    """Which class a module of this one had, before it was fully sharded."""
    return next((before for before, made in _classes.items() if made is cls), cls)


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
