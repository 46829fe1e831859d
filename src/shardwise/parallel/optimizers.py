"""Element-wise optimizers step on the shards themselves; Muon's matrices by their owners (`whole_matrices`).

A DTensor is its shard, so an optimizer that treats every element alike needs no dispatch: its step runs on plain
tensors that share storage with the parameters and their state. torch offers the place for it, a hook before every step,
which may replace what the step is given: here, by an optimizer of the same class that holds the plain tensors. A first
step, which makes the state, and every step that this does not fit, runs on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.optim import optimizer as torch_optimizer

from shardwise.comm import noters
from shardwise.dispatch.aliasing.copied_views import carry_on
from shardwise.parallel.loaded_state import lay_out_loaded_state
from shardwise.parallel.whole_matrices import step_split_matrices
from shardwise.redistribute import check_reduced
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
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]

State = dict[str, Any]
"""What an optimizer keeps for one parameter."""


class _Shadows:
    """Plain tensors that share storage with the parameters that have a gradient, and with the state that an optimizer
    keeps for them, as long as none of these gets another storage or layout, or the state another tensor."""

    __slots__ = ("given", "lists", "locals", "originals", "reached", "seen", "states")

    def __init__(self, optimizer: optim.Optimizer, grads: list[Tensor | None], reached: list[list[Tensor]]) -> None:
        everything = _params(optimizer)
        self.reached = [at for at, x in enumerate(everything) if grads[at] is not None and x.__class__ is DTensor]
        params = [everything[at] for at in self.reached]
        self.given: list[State] = [optimizer.state.get(param) or {} for param in params]
        values = (value for state in self.given for value in state.values())
        self.originals: list[Any] = [*params, *(x for x in values if x.__class__ is DTensor)]
        self.seen = self._seen(optimizer, grads)
        self.locals: list[Tensor] = [param.detach() for param in params]
        plain = [{k: x.detach() if x.__class__ is DTensor else x for k, x in state.items()} for state in self.given]
        self.states = _States(zip(self.locals, plain, strict=True))
        local_of = dict(zip(map(id, params), self.locals, strict=True))
        self.lists = [[local_of.get(id(param), param) for param in some] for some in reached]

    def _seen(self, optimizer: optim.Optimizer, grads: list[Tensor | None]) -> tuple[list[Any], list[Any]]:
        """What must be the same objects, and equal numbers, at the next step."""
        state = optimizer.state
        values = [value for kept in self.given for value in kept.values()]
        layouts = [x._layout for x in self.originals]
        same = [*_params(optimizer), *state, *state.values(), *values, *layouts]
        return same, [*map(_pointer, self.originals), *(grad is None for grad in grads)]

    def fit(self, optimizer: optim.Optimizer, grads: list[Tensor | None]) -> bool:
        """Looked at before every step, so all at once."""
        (same, equal), (same_now, equal_now) = self.seen, self._seen(optimizer, grads)
        return equal == equal_now and len(same) == len(same_now) and all(map(is_, same, same_now))


def _params(optimizer: optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _States(dict[Tensor, State]):
    """The state of shadows, and of parameters that are plain tensors themselves."""

    of_others: dict[Tensor, State]

    def __missing__(self, param: Tensor) -> State:
        return self.of_others[param]


_shadows: WeakKeyDictionary[optim.Optimizer, _Shadows] = WeakKeyDictionary()


def step_on_shards(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Before a step: its arguments, with the optimizer's plain twin in its place where that gives the same."""
    if noters:
        noters[-1].step(optimizer)
        twin = _without_split_matrices(optimizer) if isinstance(optimizer, optim.Muon) else None
        return None if twin is None else ((twin,), kwargs)
    check_reduced()
    lay_out_loaded_state(optimizer)
    twin_of = _TWINS.get(optimizer.__class__)
    if twin_of is None or len(args) != 1 or kwargs:  # a closure looks at the parameters
        return None
    if optimizer._optimizer_step_pre_hooks or len(torch_optimizer._global_optimizer_pre_hooks) != 1:
        return None  # hooks that follow may give the parameters other gradients
    if not any(param.__class__ is DTensor for group in optimizer.param_groups for param in group["params"]):
        return None
    twin = twin_of(optimizer)
    return None if twin is None else ((twin,), kwargs)


def _let_go_of_gradients(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """After a step on shards: gradients belong to the parameters alone again."""
    if args[0] is not optimizer:
        locals_ = _shadows[optimizer].locals
        for local in locals_:
            _set_grad(local, None)
        carry_on(locals_)


def _on_shards(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """An optimizer of the same class with plain tensors for parameters and state; None where that is not the same."""
    with _disabled():
        grads = [*map(_grad, _params(optimizer))]
        shadows = _shadows_of(optimizer, grads)
        if shadows is None:
            return None
        for local, at in zip(shadows.locals, shadows.reached):
            grad = grads[at]
            _set_grad(local, grad.detach() if grad.__class__ is DTensor else grad)
        shadows.states.of_others = optimizer.state
        return _twin(optimizer, shadows.states, shadows.lists)


def _without_split_matrices(optimizer: optim.Muon) -> optim.Optimizer | None:
    """An optimizer of what is left when the matrices that are split have been stepped by their owners."""
    lists = step_split_matrices(optimizer)
    return None if lists is None else _twin(optimizer, optimizer.state, lists)


_TWINS: dict[type, Callable[[Any], optim.Optimizer | None]] = {
    **dict.fromkeys(ELEMENTWISE, _on_shards),
    optim.Muon: _without_split_matrices,
}


def _twin(optimizer: optim.Optimizer, state: Any, lists: list[list[Tensor]]) -> optim.Optimizer:
    """An optimizer of the same class with another state, and other parameters in its groups."""
    twin = optimizer.__class__.__new__(optimizer.__class__)
    twin.__dict__.update(optimizer.__dict__)
    twin.state = state
    twin.param_groups = [
        {**group, "params": params} for group, params in zip(optimizer.param_groups, lists, strict=True)
    ]
    return twin


def _shadows_of(optimizer: optim.Optimizer, grads: list[Tensor | None]) -> _Shadows | None:
    """Of the parameters that this step changes, if there are any and all can be stepped on shard by shard."""
    shadows = _shadows.get(optimizer)
    if shadows is not None and shadows.fit(optimizer, grads):
        return shadows
    groups, given = optimizer.param_groups, iter(grads)
    reached = [[param for param in group["params"] if next(given) is not None] for group in groups]
    if not any(reached) or not all(map(_can_step, groups, reached, repeat(optimizer.state))):
        return None
    if optimizer not in _shadows:
        optimizer.register_step_post_hook(_let_go_of_gradients)
    shadows = _shadows[optimizer] = _Shadows(optimizer, grads, reached)
    return shadows


def _can_step(group: dict[str, Any], params: list[Tensor], states: dict[Tensor, State]) -> bool:
    """Whether the state of a group's parameters is made, and elements, gradients and state have equal layouts."""
    is_stateless = "dampening" in group and not group["momentum"]  # plain SGD
    if group.get("differentiable"):
        return False
    return all(
        (is_stateless or states.get(param)) and _is_elementwise(param, states.get(param) or {}) for param in params
    )


def _is_elementwise(param: Tensor, state: State) -> bool:
    if param.__class__ is not DTensor:
        return True
    layout = param._layout
    if layout.has_pending or len(layout.mesh.held) > 1:
        return False
    return all(value._layout is layout for value in state.values() if value.__class__ is DTensor)
