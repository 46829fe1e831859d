"""When a program that was captured serves a call: what it depends on, in a form that is quick to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.modes import is_strict, limits, replicates_implicitly
from shardwise.graph.call import Call
from shardwise.graph.names import Names
from shardwise.graph.program import FromArgument, FromObject, Place, Program
from shardwise.graph.reached import PLAIN, Reached, Slot
from shardwise.layout import Layout

_disabled = torch._C.DisableTorchFunctionSubclass
_stride = torch._C.TensorBase.stride
_size = torch._C.TensorBase.size
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


def modes() -> tuple[Any, ...]:
    """Settings of torch's, and of ours, under which a program is captured."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        is_strict(),
        limits(),
        replicates_implicitly(),
    )


def kind_of(leaf: Any) -> Any:
    """What of an argument a program depends on: everything but the data of tensors."""
    if isinstance(leaf, Tensor):
        layout = leaf.__dict__.get("_layout")
        shards = shards_of(leaf)
        own = tuple([(_size(x), _stride(x)) for x in shards])
        return leaf.__class__, layout and layout.unreduced, own, leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, PLAIN):
        return leaf.__class__, leaf
    return id(leaf)


class Guards:
    """What a program depends on."""

    def __init__(self, call: Call, program: Program, why: str) -> None:
        leaves, reached = call.leaves, call.reached
        self.spec, self.modes, self.why = call.spec, modes(), why
        self.names = Names(program, reached, call.names)
        with _disabled():
            self.kinds = [kind_of(leaf) for leaf in leaves]
        self._held = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]  # so that ids stay theirs
        objects = dict.fromkeys(
            id(source.tensor)
            for part in (program.host, *program.ranks)
            for source in part.sources
            if isinstance(source, FromObject)
        )
        wanted = [x for x in reached.objects if id(x.value) in objects or not isinstance(x.value, Tensor)]
        self.slots = [x.slot for x in wanted]
        self.objects = [x.value for x in wanted]
        self.value_slots = [x.slot for x in reached.values]
        self.values = [x.value for x in reached.values]
        self.modules = list(reached.modules.values())
        self.training = [module.training for module in self.modules]
        self.states = [(optimizer, optimizer.state, len(optimizer.state)) for optimizer in reached.optimizers.values()]
        self.groups = _group_values(program, reached)
        self.grads = _grads(program)

    def layout_at(self, place: Place) -> Layout | None:
        """The layout of a tensor that the program is given, if it is a DTensor."""
        layout: Layout | None = (
            place.owner.__dict__.get("_layout") if isinstance(place, FromObject) else self.kinds[place.leaf][1]
        )
        return layout

    def miss(self, leaves: Sequence[Any], spec: Any) -> str | None:
        """What has changed; None if nothing has."""
        if spec != self.spec:
            return "the structure of the arguments"
        if modes() != self.modes:
            return "a mode of torch's or of shardwise's (gradients, autocast, strict …)"
        with _disabled():
            for number, (leaf, kind) in enumerate(zip(leaves, self.kinds)):
                if kind_of(leaf) != kind:
                    return f"argument {number}: {_described(leaf)}"
            if not all(map(is_, [kept[name] for kept, name in self.slots], self.objects)):
                return _changed(self.slots, self.objects, is_)
            if [kept[name] for kept, name in self.value_slots] != self.values:
                return _changed(self.value_slots, self.values, lambda a, b: a == b)
            if [module.training for module in self.modules] != self.training:
                return "modules that train, or that do not"
            for optimizer, state, count in self.states:
                if optimizer.state is not state or len(state) != count:
                    return "the state of an optimizer"
            for group, values in self.groups:
                if any(group[name] != value for name, value in values):
                    return _changed_in_group(group, values)
            for read, was_none in self.grads:
                if (read(leaves) is None) != was_none:
                    return "which parameters have a gradient already"
        return None


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        layout = leaf.__dict__.get("_layout")
        what = str(layout) if layout else str(list(leaf.shape))
        return f"a tensor {what} of {str(leaf.dtype).removeprefix('torch.')}"
    return repr(leaf) if isinstance(leaf, PLAIN) else f"another {type(leaf).__name__}"


def _changed(slots: Sequence[Slot], before: Sequence[Any], same: Callable[[Any, Any], bool]) -> str:
    for (kept, name), value in zip(slots, before):
        if not same(kept[name], value):
            what = f"{value!r} is now {kept[name]!r}" if isinstance(value, PLAIN) else f"another {type(value).__name__}"
            return f"{name}: {what}" if isinstance(name, str) else what
    raise AssertionError("nothing has changed")


def _group_values(program: Program, reached: Reached) -> list[tuple[dict[str, Any], list[tuple[str, Any]]]]:
    """Plain values of optimizers' groups that are not inputs of the program."""
    inputs = {(id(given.optimizer), given.index, given.name) for given in program.given}
    return [
        (
            group,
            [
                (name, value)
                for name, value in group.items()
                if (isinstance(value, (*PLAIN, tuple)))
                and (id(optimizer), index, name) not in inputs
                and name not in ("initial_lr",)
            ],
        )
        for optimizer in reached.optimizers.values()
        for index, group in enumerate(optimizer.param_groups)
    ]


def _changed_in_group(group: dict[str, Any], values: list[tuple[str, Any]]) -> str:
    name, value = next((name, value) for name, value in values if group[name] != value)
    return f"{name!r} of an optimizer's group: {value} is now {group[name]}"


def _grads(program: Program) -> list[tuple[Callable[[Sequence[Any]], Any], bool]]:
    """Leaves whose gradient when the program begins matters to it, and whether they had none."""
    return [(_grad_reader(of), was_none) for of, was_none in program.entry_gradients]


def _grad_reader(of: Any) -> Callable[[Sequence[Any]], Any]:
    if isinstance(of, FromArgument):
        return lambda leaves: _get_grad(shards_of(leaves[of.leaf])[of.shard])
    return lambda leaves: _get_grad(of.tensor)
