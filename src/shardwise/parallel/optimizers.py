"""Element-wise optimizers step on the shards themselves; Muon's matrices by their owners (`whole_matrices`).

A DTensor is its shard, so an optimizer that treats every element alike needs no dispatch: its step runs on plain
tensors that share storage with the parameters and their state. torch offers the place for it, a hook before every step,
which may replace what the step is given: here, by an optimizer of the same class that holds the plain tensors. A first
step, which makes the state, and every step that this does not fit, runs on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, count, repeat
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
_is_sparse = torch._C.TensorBase.is_sparse.__get__  # type: ignore[attr-defined]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]

State = dict[str, Any]
"""What an optimizer keeps for one parameter."""


class _Shadows:
    """Plain tensors that share storage with the parameters that have a gradient, and with the state that an optimizer
    keeps for them, as long as none of these gets another storage or layout, the state another tensor, or a group other
    options."""

    __slots__ = ("found", "given", "lists", "locals", "originals", "places", "seen", "states")

    def __init__(self, optimizer: optim.Optimizer, grads: list[Tensor | None], places: list[list[int]]) -> None:
        everything, self.places = _params(optimizer), places
        params = [everything[at] for group in places for at in group if everything[at].__class__ is DTensor]
        self.given: list[State] = [optimizer.state.get(param) or {} for param in params]
        values = (value for state in self.given for value in state.values())
        self.originals: list[Any] = [*params, *(x for x in values if x.__class__ is DTensor)]
        self.seen = self._seen(optimizer, everything, grads)
        self.locals: list[Tensor] = [param.detach() for param in params]
        plain = [{k: x.detach() if x.__class__ is DTensor else x for k, x in state.items()} for state in self.given]
        self.states = _States(zip(self.locals, plain, strict=True))
        local_of = dict(zip(map(id, params), self.locals, strict=True))
        self.lists = [[local_of.get(id(everything[at]), everything[at]) for at in group] for group in places]
        self.found: dict[int, _Found] = {}

    def _seen(self, optimizer: optim.Optimizer, params: list[Tensor], grads: list[Tensor | None]) -> tuple[list, list]:
        """What must be the same objects, and equal, at the next step. State lies as its parameter does."""
        state = optimizer.state
        layouts = [x._layout for x in params if x.__class__ is DTensor]
        same = [*params, *state, *state.values(), *chain.from_iterable(map(dict.values, self.given)), *layouts]
        kinds = [grad if grad is None else _is_sparse(grad) for grad in grads]
        return same, [*map(_pointer, self.originals), *kinds, *map(_options, optimizer.param_groups)]

    def fit(self, optimizer: optim.Optimizer, grads: list[Tensor | None]) -> bool:
        """Looked at before every step, so all at once."""
        (same, equal), (same_now, equal_now) = self.seen, self._seen(optimizer, _params(optimizer), grads)
        return equal == equal_now and len(same) == len(same_now) and all(map(is_, same, same_now))

    def init_group(self, optimizer: optim.Optimizer, grads: list[Any], group: dict[str, Any], *lists: list[Any]) -> Any:
        """In the place of the twin's method, which looks at one parameter after the other: it would find what it found
        before, and other gradients. The twin itself is not given: gradients would live as long as that cycle."""
        at = next(at for at, params in enumerate(self.lists) if params is group["params"])
        mine = [grads[place] for place in self.places[at]]
        if at not in self.found:
            self.found[at] = _found(_twin(optimizer, self.states, self.lists), group, mine, len(lists))
        returned, parts = self.found[at]
        for target, part in zip(lists, parts, strict=True):
            target += mine if part is None else part
        return returned


_Found = tuple[Any, list[list[Any] | None]]
"""What `_init_group` returned, and what it put into each of the lists that it was given; None for the gradients."""


def _found(twin: Any, group: dict[str, Any], grads: list[Any], num_lists: int) -> _Found:
    lent = [param for param, grad in zip(group["params"], grads, strict=True) if _grad(param) is not grad]
    lists: list[list[Any]] = [[] for _ in range(num_lists)]
    try:
        for param, grad in zip(group["params"], grads, strict=True):
            _set_grad(param, grad)
        returned = twin.__class__._init_group(twin, group, *lists)
    finally:
        for param in lent:
            _set_grad(param, None)
    are_grads = [len(part) == len(grads) and all(map(is_, part, grads)) for part in lists]
    return returned, [None if is_grads else part for part, is_grads in zip(lists, are_grads, strict=True)]


def _options(group: dict[str, Any]) -> list[Any]:
    """Of floats, which may change with every step as learning rates do, only whether they are zero."""
    return [
        x if x is None or x.__class__ in _EXACT else (x.__class__, x.__class__ is float and not x)
        for x in group.values()
    ]


_EXACT = frozenset({bool, int, str})


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
    check_reduced(optimizer)
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


def _written(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """After a step on shards."""
    if args[0] is not optimizer:
        carry_on(_shadows[optimizer].locals)


def _on_shards(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """An optimizer of the same class with plain tensors for parameters and state; None where that is not the same."""
    with _disabled():
        grads = [*map(_grad, _params(optimizer))]
        shadows = _shadows_of(optimizer, grads)
        if shadows is None:
            return None
        shadows.states.of_others = optimizer.state
        twin = _twin(optimizer, shadows.states, shadows.lists)
        plain = [grad.detach() if grad.__class__ is DTensor else grad for grad in grads]
    twin.__dict__["_init_group"] = partial(shadows.init_group, optimizer, plain)
    return twin


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
    everything, groups, places = _params(optimizer), optimizer.param_groups, count()
    reached = [[at for _, at in zip(group["params"], places) if grads[at] is not None] for group in groups]
    params = [[everything[at] for at in group] for group in reached]
    if not any(reached) or not all(map(_can_step, groups, params, repeat(optimizer.state))):
        return None
    if optimizer not in _shadows:
        optimizer.register_step_post_hook(_written)
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
    if any(value is None for value in state.values()):
        return False  # an optimizer may put it there itself, and would put it into a copy
    if layout.has_pending or len(layout.mesh.held) > 1:
        return False
    return all(value._layout is layout for value in state.values() if value.__class__ is DTensor)
