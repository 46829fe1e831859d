"""The user's tensors while a program is captured: lent to it, and given back as they were.

The program meets them in calls of torch's functions. Then DTensors go over to the captured mesh, on which plans note
collectives instead of making them. Their shards stay real, and are never written to: ops are recorded, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwise.comm import captured_mesh, noters, shards_of
from shardwise.comm.faked import is_faked
from shardwise.layout import Mesh

_no_functions = torch._C.DisableTorchFunction
_num_modes = torch._C._len_torch_dispatch_stack
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]
_grad_setter = Tensor.grad.__set__  # type: ignore[union-attr]
_data_setter = Tensor.data.__set__  # type: ignore[attr-defined]

_HAND_OUT_DATA = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__})

FORGOTTEN = ("_moved", "_gathered", "_grad_set")
"""What a DTensor remembers of moves on its own mesh."""


@dataclass(slots=True)
class Lent:
    """A tensor as it was before."""

    tensor: Tensor
    shards: tuple[Tensor, ...]
    cls: type
    facts: dict[str, Any]
    grads: Sequence[Tensor | None]
    is_reset: bool = False
    """Whether the program gave it another gradient before it read the one that it had."""


def _differs_beside(lent: Lent, mesh: Mesh) -> bool:
    layout = lent.facts.get("_layout")
    if layout is None:
        return len(lent.shards) > 1
    others = [axis for axis, name in enumerate(layout.mesh.names) if name not in mesh.names]
    return any((layout.pending[axis], layout.axis_dims[axis]) != (None, None) for axis in others)


class Borrowed(TorchFunctionMode):
    """Meets the tensors among the arguments of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: dict[int, Lent] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self.meet(x)
        if func == _grad_setter:  # which is made anew whenever it is asked for
            self._reset(args[0])
        if func == _data_setter and "_layout" not in args[0].__dict__:
            noters[-1].set_data(*args)
        if (
            func in _HAND_OUT_DATA and _num_modes()
        ):  # none are on where ranks ask each other for what is nobody's program
            noters[-1].hand_out(func.__name__)
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], torch.SymFloat):
            func = torch.scalar_tensor  # which does not ask what the number is
        return func(*args, **(kwargs or {}))

    def meet(self, x: Tensor) -> None:
        """A tensor enters the program. So does its gradient, which the program may read off it."""
        if is_faked(x) or id(x) in self.lent:
            return
        with _no_functions():
            grads = [_get_grad(shard) if shard.is_leaf else None for shard in shards_of(x)]
        self.lent[id(x)] = Lent(x, shards_of(x), x.__class__, dict(x.__dict__), grads)
        layout = x.__dict__.get("_layout")
        if layout is not None:
            for name in FORGOTTEN:
                x.__dict__.pop(name, None)
            x.__dict__["_layout"] = layout.on(captured_mesh(layout.mesh))
        for grad in grads:
            if grad is not None:
                self.meet(grad)

    def is_alike_beside(self, mesh: Mesh) -> bool:
        """Whether ranks at one place of a mesh have been given the same: nothing that differs along other axes."""
        return not any(_differs_beside(lent, mesh) for lent in self.lent.values())

    def _reset(self, x: Tensor) -> None:
        lent = self.lent.get(id(x))
        if lent is not None:
            with _no_functions():
                lent.is_reset |= all(a is b for a, b in zip(map(_get_grad, lent.shards), lent.grads, strict=True))

    def gradients(self) -> list[tuple[Lent, list[Tensor | None]]]:
        """Leaves with the gradients that their shards have now, where those are not the ones they had."""
        found = []
        for lent in self.lent.values():
            with _no_functions():
                now = [_get_grad(shard) if shard.is_leaf else None for shard in lent.shards]
            if any(a is not b for a, b in zip(now, lent.grads, strict=True)):
                found.append((lent, now))
        return found

    def give_back(self) -> None:
        for lent in self.lent.values():
            x = lent.tensor
            x.__dict__.clear()
            x.__class__ = lent.cls
            x.__dict__.update(lent.facts)
            with _no_functions():
                for shard, grad in zip(lent.shards, lent.grads, strict=True):
                    if shard.is_leaf and _get_grad(shard) is not grad:
                        _set_grad(shard, grad)
