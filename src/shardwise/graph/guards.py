"""When a program that was captured serves a call: what it depends on, in a form that is quick to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.modes import is_strict, limits, replicates_implicitly
from shardwise.dispatch.planning.fallback import short_dtype
from shardwise.graph.call import Call
from shardwise.graph.identities import unchanged
from shardwise.graph.names import Names
from shardwise.graph.program import FromArgument, FromGradient, FromObject, Place, Program
from shardwise.graph.reached import PLAIN, Found, Reached
from shardwise.layout import Layout

FIRST = "the first call"
"""Why a program was captured that nothing was captured before."""

_disabled = torch._C.DisableTorchFunctionSubclass
_stride = torch._C.TensorBase.stride
_size = torch._C.TensorBase.size
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


MODES = (
    *(
        "grad mode",
        "inference mode",
        "autocast on cpu",
        "autocast on cuda",
        "default dtype",
        "deterministic algorithms",
    ),
    *("float32 matmul precision", "shardwise.strict", "limits of shardwise.strict", "implicit_replication"),
)
"""What `modes` tells, in its order."""


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
        self.found = [x for x in reached.objects if id(x.value) in objects or not isinstance(x.value, Tensor)]
        self.plain = reached.values
        self.codes = reached.codes
        self.modules = list(reached.modules.values())
        self.module_names = [reached.names[key] for key in reached.modules]
        self.training = [module.training for module in self.modules]
        self.states = [(optimizer, optimizer.state, len(optimizer.state)) for optimizer in reached.optimizers.values()]
        self.groups = _group_values(program, reached)
        self.grads = _grads(program)
        training = [(module.__dict__, "training") for module in self.modules]
        self._unchanged = unchanged(
            [*(x.slot for x in self.found), *training], [*(x.value for x in self.found), *self.training]
        )
        self._value_slots, self._values = [x.slot for x in self.plain], [x.value for x in self.plain]

    def layout_at(self, place: Place) -> Layout | None:
        """The layout of a tensor that the program is given, if it is a DTensor."""
        layout: Layout | None = (
            place.owner.__dict__.get("_layout") if isinstance(place, FromObject) else self.kinds[place.leaf][1]
        )
        return layout

    def miss(self, leaves: Sequence[Any], spec: Any) -> str | None:
        """What has changed; None if nothing has."""
        if spec != self.spec:
            return "the arguments are nested otherwise"
        if (now := modes()) != self.modes:
            return next(_changed(*both) for both in zip(MODES, self.modes, now, strict=True) if both[1] != both[2])
        with _disabled():
            for number, (leaf, kind) in enumerate(zip(leaves, self.kinds)):
                if (now_kind := kind_of(leaf)) != kind:
                    return f"{self.names.leaf(number)}: {_differs(kind, now_kind)}"
            try:
                if not self._unchanged():
                    return self._trained() or _other(self.found, is_)
                if [kept[name] for kept, name in self._value_slots] != self._values:
                    return _other(self.plain, lambda a, b: a == b)
            except (KeyError, IndexError, ValueError):
                return next(f"{x.name} is not there any more" for x in (*self.found, *self.plain) if _is_gone(x))
            for optimizer, state, count in self.states:
                if optimizer.state is not state or len(state) != count:
                    return f"the state of {self.names.of_optimizer(optimizer)} is another one"
            for name, group, values in self.groups:
                if any(group.get(key) != value for key, value in values):
                    return next(_changed(f"{name}[{k!r}]", v, group.get(k)) for k, v in values if group.get(k) != v)
            for of, read, was_none in self.grads:
                if (read(leaves) is None) != was_none:
                    return f"{self.names.of(FromGradient(of))} {'is there already' if was_none else 'is None'}"
        return None

    def _trained(self) -> str | None:
        for name, module, before in zip(self.module_names, self.modules, self.training, strict=True):
            if module.training != before:
                return _changed(f"{name or type(module).__name__}.training", before, module.training)
        return None


def _changed(name: str, before: Any, now: Any) -> str:
    return f"{name}: {before!r} is now {now!r}"


def _differs(before: Any, now: Any) -> str:
    """In what two kinds of an argument differ."""
    are_tensors = [isinstance(kind, tuple) and len(kind) > 2 for kind in (before, now)]
    if not all(are_tensors):
        return f"{said(before)} is now {said(now)}"
    if said(before) != said(now):
        return f"{said(before)} is now {said(now)}"
    facts = ("class", "mesh", "strides", "dtype", "device", "requires_grad")
    which = next(at for at, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    if which in (1, 2):
        return f"{said(now)} on another mesh" if which == 1 else f"{said(now)} with other strides"
    return _changed(f"{facts[which]} of {said(now)}", before[which], now[which])


def said(kind: Any) -> str:
    """What is most important of an argument."""
    if not isinstance(kind, tuple):
        return "another object"
    if len(kind) == 2:
        return repr(kind[1])
    _, layout, own, dtype, *_ = kind
    return f"{short_dtype(dtype)}{layout or '[' + ','.join(map(str, own[0][0])) + ']'}"


def _other(found: Sequence[Found], same: Callable[[Any, Any], bool]) -> str:
    for (kept, key), before, name in found:
        if not same(kept[key], before):
            is_plain = isinstance(before, PLAIN)
            return _changed(name, before, kept[key]) if is_plain else f"{name} is another {type(before).__name__}"
    raise AssertionError("nothing has changed")


def _is_gone(found: Found) -> bool:
    kept, key = found.slot
    try:
        kept[key]
    except (KeyError, IndexError, ValueError):
        return True
    return False


def _group_values(program: Program, reached: Reached) -> list[tuple[str, dict[str, Any], list[tuple[str, Any]]]]:
    """Plain values of optimizers' groups that are not inputs of the program."""
    inputs = {(id(given.optimizer), given.index, given.name) for given in program.given}
    return [
        (
            f"{reached.names[key]}.param_groups[{index}]",
            group,
            [
                (name, value)
                for name, value in group.items()
                if (isinstance(value, (*PLAIN, tuple)))
                and (id(optimizer), index, name) not in inputs
                and name not in ("initial_lr",)
            ],
        )
        for key, optimizer in reached.optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
    ]


def _grads(program: Program) -> list[tuple[Place, Callable[[Sequence[Any]], Any], bool]]:
    """Leaves whose gradient when the program begins matters to it, and whether they had none."""
    return [(of, _grad_reader(of), was_none) for of, was_none in program.entry_gradients]


def _grad_reader(of: Place) -> Callable[[Sequence[Any]], Any]:
    if isinstance(of, FromArgument):
        return lambda leaves: _get_grad(shards_of(leaves[of.leaf])[of.shard])
    return lambda leaves: _get_grad(of.tensor)
