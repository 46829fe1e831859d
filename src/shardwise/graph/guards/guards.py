"""When a program that was captured serves a call: what it depends on, in a form that is quick to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.modes import is_strict, limits, replicates_implicitly
from shardwise.graph.capture.optimizers import are_floats
from shardwise.graph.draft.storages import writes_to_arguments
from shardwise.graph.guards.call import Call
from shardwise.graph.guards.kinds import changed
from shardwise.graph.guards.names import Names
from shardwise.graph.guards.places import Class
from shardwise.graph.guards.reached import Found, Reached, Sized
from shardwise.graph.guards.unchanged import (
    Contents,
    Histories,
    Hooks,
    Identities,
    Kinds,
    TensorFacts,
)
from shardwise.graph.guards.values import is_library, is_value
from shardwise.graph.guards.whereabouts import Whereabouts
from shardwise.graph.program import FromArgument, FromGradient, FromObject, Place, Program
from shardwise.layout import Layout
from shardwise.redistribute import is_keeping

FIRST = "the first call"
"""Why a program was captured that nothing was captured before."""

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_stride = torch._C.TensorBase.stride


OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""What schedulers keep in groups, and no step reads."""

MODES = (
    *(
        "grad mode",
        "inference mode",
        "autocast on cpu",
        "autocast on cuda",
        "default dtype",
        "deterministic algorithms",
    ),
    *(
        "float32 matmul precision",
        "function modes",
        "shardwise.strict",
        "limits of shardwise.strict",
        "implicit_replication",
    ),
)
"""What `modes` tells, in its order."""


def modes() -> tuple[Any, ...]:
    """Settings of torch's, and of ours, under which a program is captured."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_function_stack(),
        is_strict(),
        limits(),
        replicates_implicitly(),
    )


class Guards:
    """What a program depends on."""

    def __init__(self, call: Call, program: Program, why: str) -> None:
        leaves, reached = call.leaves, call.reached
        self.spec, self.modes, self.why = call.spec, modes(), why
        self.asked = call.lookups.names
        self.names = Names(program, reached, call.names)
        self.kinds, self.contents = Kinds(leaves, reached.marks), Contents(reached)
        objects = {
            id(tensor)
            for part in (program.host, *program.ranks)
            for source in part.sources
            if isinstance(source, FromObject)
            for tensor in (source.tensor, source.owner)
        }
        self.found = [x for x in reached.objects if id(x.value) in objects or not isinstance(x.value, Tensor)]
        self.settings = [*_group_values(program, reached)]
        self.plain, self.codes = [*reached.values, *self.settings], reached.codes
        self.training = [
            Found((module.__dict__, "training"), module.training, f"{name or type(module).__name__}.training")
            for name, module in ((reached.names[key], module) for key, module in reached.modules.items())
            if "training" in reached.read or not is_library(module)
        ]
        self.optimizers = list(reached.optimizers.values())
        self.given = program.given
        self.makes_gradients = program.differentiable is None and bool(program.gradients)
        self.grads = _grads(program, leaves)
        matter = self.makes_gradients or not reached.read.isdisjoint({"is_leaf", "grad_fn"})
        self.histories = Histories(leaves if matter else ())
        self.identities = Identities(leaves, reached, is_written=any(map(writes_to_arguments, program.ranks)))
        self.hooks = Hooks(reached)
        self.lengths = [*reached.lengths, *_group_lengths(reached)]
        self.absent = [*_without_forward(reached), *reached.absent]
        self.facts = TensorFacts([x for x in self.found if isinstance(x.value, Tensor)])
        self._others = [*reached.others, *_groups(reached), *_classes(reached.iterators)]
        self.functions = [x for x in reached.others if callable(x.value) and is_library(x.value)]
        found = [*self.training, *self.found, *self.plain, *self._others]
        self.whereabouts = Whereabouts(reached, found, self.lengths, self.absent)

    def layout_at(self, place: Place) -> Layout | None:
        """The layout of a tensor that the program is given, if it is a DTensor."""
        layout: Layout | None = (
            place.owner.__dict__.get("_layout") if isinstance(place, FromObject) else self.kinds.of[place.leaf][1]
        )
        return layout

    def miss(self, leaves: Sequence[Any], spec: Any) -> str | None:
        """What has changed; None if nothing has."""
        if spec is not self.spec and spec != self.spec:
            return "the arguments are nested otherwise"
        if self.makes_gradients and is_keeping():
            return "no_sync() keeps gradients"
        if (now := modes()) != self.modes:
            return next(changed(*both) for both in zip(MODES, self.modes, now, strict=True) if both[1] != both[2])
        with _disabled():
            return (
                self.kinds.miss(leaves, self.names)
                or self.whereabouts.miss()
                or self._no_number()
                or self.contents.miss()
                or self.histories.miss(leaves, self.names)
                or self.identities.miss(leaves, self.names)
                or self.facts.miss()
                or self.hooks.miss()
                or self._other_gradients(leaves)
            )

    def _no_number(self) -> str | None:
        """A learning rate that is no number any more."""
        for given in self.given:
            if not isinstance(now := given.read(), float):
                return f"{self.names.of(given)} is now a {type(now).__name__}"
        return None

    def _other_gradients(self, leaves: Sequence[Any]) -> str | None:
        for of, read, was_none, kind in self.grads:
            now = read(leaves)
            if (now is None) != was_none:
                return f"{self.names.of(FromGradient(of))} {'is there already' if was_none else 'is None'}"
            if now is not None and kind != _grad_kind(now):
                return f"{self.names.of(FromGradient(of))} is of another dtype, or has other strides"
        return None

    def varying(self) -> set[str]:
        """Settings of optimizers that are other numbers now: a scheduler changes them."""
        return {
            x.slot[1]
            for x in self.settings
            if are_floats(x.value) and are_floats(now := x.slot[0].get(x.slot[1])) and now != x.value
        }


def _groups(reached: Reached) -> Iterator[Found]:
    """The groups of optimizers, their lists of parameters, and tensors that they are set to."""
    for key, optimizer in reached.optimizers.items():
        name = reached.names[key]
        yield Found((optimizer.__dict__, "param_groups"), optimizer.param_groups, f"{name}.param_groups")
        for index, group in enumerate(optimizer.param_groups):
            here = f"{name}.param_groups[{index}]"
            yield Found((optimizer.param_groups, index), group, here)
            for own, value in group.items():
                if own == "params" or isinstance(value, Tensor):
                    yield Found((group, own), value, f"{here}[{own!r}]")


def _classes(iterators: Sequence[Found]) -> Iterator[Found]:
    """Of an iterator that the program does not look into it only matters that there is one."""
    return (Found((Class(x.slot), 0), type(x.value), f"the class of {x.name}") for x in iterators)


def _without_forward(reached: Reached) -> Iterator[Found]:
    """Where modules of libraries might get a `forward` of their own."""
    for key, module in reached.modules.items():
        if is_library(module) and "forward" not in module.__dict__:
            yield Found((module.__dict__, "forward"), None, f"{reached.names[key]}.forward".lstrip("."))


def _group_lengths(reached: Reached) -> Iterator[Sized]:
    for key, optimizer in reached.optimizers.items():
        name = f"{reached.names[key]}.param_groups"
        yield Sized(optimizer.param_groups, len(optimizer.param_groups), name)
        for index, group in enumerate(optimizer.param_groups):
            yield Sized(group["params"], len(group["params"]), f"{name}[{index}]['params']")


def _group_values(program: Program, reached: Reached) -> Iterator[Found]:
    """Plain values of optimizers' groups that are not inputs of the program."""
    inputs = {(id(given.optimizer), given.index, given.name) for given in program.given}
    for key, optimizer in reached.optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if is_value(value) and name not in OF_SCHEDULERS and (id(optimizer), index, name) not in inputs:
                    yield Found((group, name), value, f"{reached.names[key]}.param_groups[{index}][{name!r}]")


def _grads(program: Program, leaves: Sequence[Any]) -> list[tuple[Place, Callable[[Sequence[Any]], Any], bool, Any]]:
    """Leaves whose gradient when the program begins matters to it: whether they had none, or of which kind it was."""
    readers = [(of, _grad_reader(of), was_none) for of, was_none in program.entry_gradients]
    with _disabled():
        return [(of, read, none, None if none else _grad_kind(read(leaves))) for of, read, none in readers]


def _grad_kind(grad: Any) -> Any:
    return None if grad is None else (grad.dtype, _stride(grad))


def _grad_reader(of: Place) -> Callable[[Sequence[Any]], Any]:
    if isinstance(of, FromArgument):
        return lambda leaves: _get_grad(shards_of(leaves[of.leaf])[of.shard])
    return lambda leaves: _get_grad(of.tensor)
