"""Element-wise optimizers step on the shards themselves.

A DTensor is its shard, so an optimizer that treats every element alike needs no dispatch: its step runs on plain
tensors that share storage with the parameters and their state. torch offers the place for it, a hook before every step,
which may replace what the step is given: here, by an optimizer of the same class that holds the plain tensors. A first
step, which makes the state, and every step that this does not fit, runs on DTensors.
"""

from __future__ import annotations

from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.optim import optimizer as torch_optimizer

from shardwise.dispatch.copies import carry_on
from shardwise.redistribute import check_paid
from shardwise.tensor import DTensor

ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    }
)
"""What these do to an element depends on that element's gradient and state alone. Not so Adafactor, Muon, LBFGS."""

_disabled = torch._C.DisableTorchFunctionSubclass
_pointer = torch._C.TensorBase.data_ptr
_to_list = torch._C.TensorBase.tolist
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


class _Count(Tensor):
    """A number that a step reads, of how many there were. Reading one out of a tensor is watched, at a price (see
    `dispatch.entries`), which steps on shards need not pay: there are no DTensors among them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def item(self) -> Any:
        return _to_list(self)  # of no dims: the number


class _Shadow:
    """Plain tensors that share storage with one parameter and the state that an optimizer keeps for it, as long as none
    of these gets another storage, or the state another tensor."""

    __slots__ = ("layouts", "local", "names", "originals", "pointers", "state", "values")

    def __init__(self, param: DTensor, state: dict[str, Any]) -> None:
        self.originals = [param, *(value for value in state.values() if value.__class__ is DTensor)]
        self.layouts = [x._layout for x in self.originals]
        self.pointers = [*map(_pointer, self.originals)]
        self.names, self.values = [*state], [*state.values()]
        self.local: Tensor = param.detach()
        self.state = {name: x.detach() if x.__class__ is DTensor else _count(x) for name, x in state.items()}

    def fits(self, param: DTensor, state: dict[str, Any]) -> bool:
        return (
            self.originals[0] is param
            and [*state] == self.names
            and all(map(is_, state.values(), self.values))
            and [*map(_pointer, self.originals)] == self.pointers
            and [x._layout for x in self.originals] == self.layouts
        )


def _count(x: Any) -> Any:
    is_number = isinstance(x, Tensor) and not x.dim() and x.device.type == "cpu"
    return x.as_subclass(_Count) if is_number else x


_shadows: WeakKeyDictionary[optim.Optimizer, dict[int, _Shadow]] = WeakKeyDictionary()


def step_on_shards(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Before a step: its arguments, with the optimizer's plain twin in its place where that gives the same."""
    check_paid()
    if optimizer.__class__ not in ELEMENTWISE or len(args) != 1 or kwargs:  # a closure looks at the parameters
        return None
    if optimizer._optimizer_step_pre_hooks or len(torch_optimizer._global_optimizer_pre_hooks) != 1:
        return None  # hooks that follow may give the parameters other gradients
    with _disabled():
        twin = _twin_of(optimizer)
    return None if twin is None else ((twin,), kwargs)


def let_go_of_gradients(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """After a step on shards: gradients belong to the parameters alone again."""
    if args[0] is not optimizer:
        locals_ = [shadow.local for shadow in _shadows[optimizer].values()]
        for local in locals_:
            _set_grad(local, None)
        carry_on(locals_)


def _twin_of(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """An optimizer of the same class with plain tensors for parameters and state; None where that is not the same."""
    before = _shadows.get(optimizer, {})
    after = _shadows[optimizer] = {}
    groups, states = [], {}
    plain: list[tuple[Tensor, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return None
        params = []
        for param in group["params"]:
            grad = _grad(param)
            if grad is None:
                continue
            if param.__class__ is not DTensor:
                params.append(param)
                plain.append((param, group))
                continue
            state = optimizer.state.get(param, {})
            shadow = before.get(id(param))
            if shadow is None or not shadow.fits(param, state):
                if not _is_elementwise(param, state, group):
                    return None
                shadow = _Shadow(param, state)
            after[id(param)] = shadow
            local = shadow.local
            _set_grad(local, grad.detach() if grad.__class__ is DTensor else grad)
            params.append(local)
            states[local] = shadow.state
        groups.append({**group, "params": params})
    if not after:
        return None
    for param, group in plain:
        if not _is_stateless(group):
            states[param] = optimizer.state[param]
    twin = optimizer.__class__.__new__(optimizer.__class__)
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups, twin.state = groups, states  # type: ignore[assignment]
    return twin


def _is_elementwise(param: DTensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether a parameter's elements, gradients and state lie side by side on every rank, and the state is made."""
    layout = param._layout
    if layout.has_pending or len(layout.mesh.held) > 1 or not (state or _is_stateless(group)):
        return False
    return all(value._layout is layout for value in state.values() if value.__class__ is DTensor)


def _is_stateless(group: dict[str, Any]) -> bool:
    """Whether nothing is kept from step to step: plain SGD."""
    return "dampening" in group and not group["momentum"]


torch_optimizer.register_optimizer_step_pre_hook(step_on_shards)
torch_optimizer.register_optimizer_step_post_hook(let_go_of_gradients)
