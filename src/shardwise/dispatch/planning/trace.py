"""Tracing: run a call on meta tensors of global shape and write down the aten ops it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.dispatch.modes import ThinkingMode
from shardwise.dispatch.planning.meta_results import run_on_meta
from shardwise.errors import InPlaceError
from shardwise.rules import Call, Value
from shardwise.rules.kit.treatments import treat, treatment_of

aten = torch.ops.aten

treat(torch._C._nn.linear, op=aten.linear.default)
treat(torch.rms_norm, op=aten.rms_norm.default)
treat(torch.matmul, Tensor.matmul, Tensor.__matmul__, op=aten.matmul.default)
treat(torch._C._nn.scaled_dot_product_attention, op=aten.scaled_dot_product_attention.default)
treat(torch._C._nn.one_hot, op=aten.one_hot.default)
treat(Tensor.fill_diagonal_, op=aten.fill_diagonal_.default)
treat(torch.nn.functional.layer_norm, runs_as=torch.layer_norm)
treat(torch.nn.functional.rms_norm, runs_as=torch.rms_norm)

SILENT_IN_EVALUATION = frozenset(
    {
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_no_training.default,
    }
)
"""Ops that return empty statistics when they do not train, whatever their kernels for meta tensors say."""

LARGE = 1 << 16
"""Numbers of a function's own that a plan does not keep but makes again for every call."""


ResultStrides = list[tuple[tuple[int, ...], bool]]
"""Of each result: its strides, and whether it is a view of an argument."""


class Trace:
    """A call as a list of aten ops over values. `inputs[i]` is the value of the i-th tensor argument; `output`
    is what the call returned, with values for tensors, and `results` are these; `constants` are tensors the function
    brought along itself."""

    def __init__(self, *, needs_grad: bool = False) -> None:
        self.needs_grad = needs_grad
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.constants: list[tuple[Value, Tensor]] = []
        self.output: Any = None
        self.results: list[Value] = []
        self.result_strides: ResultStrides = []
        self.need_grad: set[int] = set()  # inputs that need a gradient
        self.parameters: set[int] = set()  # inputs that are parameters, or other leaves that need a gradient
        self.reduced: set[int] = set()  # inputs that are pending, and keep what that has come to

    def new_value(self, like: Tensor) -> Value:
        value = Value(len(self.values), tuple(like.shape), like.dtype)
        value.may_need_grad = self.needs_grad
        self.values.append(value)
        return value

    # What follows from a finished trace

    @cached_property
    def returned(self) -> set[int]:
        """The indices of the results."""
        return {value.index for value in self.results}

    @cached_property
    def pinned(self) -> set[int]:
        """Values that a write must reach where they are: arguments, and whatever has views or is one."""
        found = {value.index for value in self.inputs} | {value.index for value, _ in self.constants}
        for call in self.calls:
            if call.is_view:
                found.update(value.index for value in (*call.inputs, *call.outputs))
        return found

    @cached_property
    def families(self) -> dict[int, int]:
        """Values that share storage with others, each with its family: the value all of them are views of, or views of
        views of."""
        base: dict[int, int] = {}
        for call in self.calls:
            if call.is_view and call.inputs:
                root = base.setdefault(call.inputs[0].index, call.inputs[0].index)
                for value in call.outputs:
                    base.setdefault(value.index, root)
        return base

    @cached_property
    def written_families(self) -> dict[int, int]:
        """Values that share storage with one that is written to, each with its family."""
        written = {self.families.get(call.inputs[i].index) for call in self.calls for i in call.mutated}
        return {index: root for index, root in self.families.items() if root in written}

    @cached_property
    def written_arguments(self) -> list[int]:
        """Positions of the tensor arguments that the call writes to, or to a view of."""
        families = self.written_families
        values = [call.inputs[i].index for call in self.calls for i in call.mutated]
        written = {*values, *(families[index] for index in values if index in families)}
        return [position for position, value in enumerate(self.inputs) if value.index in written]

    @cached_property
    def seen_arguments(self) -> list[int]:
        """Positions of the tensor arguments that the call writes to, or returns views of."""
        shown = {self.families.get(index) for index in self.returned}
        written = self.written_arguments
        return [position for position, value in enumerate(self.inputs) if position in written or value.index in shown]


class _Recorder(ThinkingMode):
    def __init__(self, trace: Trace, known: dict[int, Value], device: torch.device) -> None:
        super().__init__()
        self.trace = trace
        self.device = device
        self.known = known
        self.arguments = set(known)
        self.alive: list[Tensor] = []  # ids stay unique while the tensors live

    def value_of(self, tensor: Tensor) -> Value:
        found = self.known.get(id(tensor))
        if found is None:  # a tensor the function had up its sleeve: a constant
            found = self.known[id(tensor)] = self.trace.new_value(tensor)
            self.alive.append(tensor)
            self.trace.constants.append((found, tensor.detach().clone()))
        return found

    def result(self, tensor: Tensor) -> Value:
        found = self.known.get(id(tensor))
        if found is not None and found.shape != tuple(tensor.shape):
            raise InPlaceError("an op that changes the shape of a DTensor in place is not available; use its result")
        if found is None:
            found = self.known[id(tensor)] = self.trace.new_value(tensor)
            self.alive.append(tensor)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags and id(args[0]) not in self.arguments:
            return self.reshape_in_place(func, args, kwargs)
        out = run_on_meta(func, args, kwargs)
        if func in SILENT_IN_EVALUATION and not Call(func, args, kwargs, (), ()).bound.get("training"):
            out = (out[0], *(stat.new_empty(0) for stat in out[1:3]), *out[3:])
        made = flat_tensors(out)
        if made and self.is_constant(func, made, flat_tensors((args, kwargs))):
            self.alive += made
            for tensor in made:
                self.known.pop(id(tensor), None)  # written to: what it was before is another constant
        else:
            self.record(func, args, kwargs, out)
        return out

    def is_constant(self, func: Any, made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
        """Whether an op only makes numbers of the function's own, on a real device. They are written down when they are
        used: until then the function may still fill them, unseen by us."""
        if torch.Tag.nondeterministic_seeded in func.tags or any(tensor.is_meta for tensor in (*made, *given)):
            return False
        constants = {value.index for value, _ in self.trace.constants}
        if any(id(x) in self.known and self.known[id(x)].index not in constants for x in given):
            return False
        return func is aten.empty.memory_format or sum(tensor.numel() for tensor in made) < LARGE

    def reshape_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of the function's own that changes its shape in place (`unsqueeze_`) is a new value from then on."""
        with self:
            view = getattr(aten, func._schema.name.split("::")[1][:-1])(*args, **kwargs)
        self.known[id(args[0])] = self.known[id(view)]
        return func(*args, **kwargs)

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs: list[Value] = []

        def note(tensor: Tensor) -> Value:
            value = self.value_of(tensor)
            inputs.append(value)
            return value

        bound_args = tuple(map_tensors(arg, note) for arg in args)
        bound_kwargs = {name: map_tensors(arg, note) for name, arg in kwargs.items()}
        if isinstance(device := bound_kwargs.get("device"), torch.device) and device.type == "meta":
            bound_kwargs["device"] = self.device  # new tensors are made where the shards are
        outputs = [self.result(tensor) for tensor in flat_tensors(out)]
        self.trace.calls.append(Call(func, bound_args, bound_kwargs, tuple(inputs), tuple(outputs)))


class _InOnePiece(TorchFunctionMode):
    """Records the composite functions that have a rule as one op each, also where another function calls them. For
    functions of ours only: a mode does not see what torch's Python functions call, once it has seen those."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = treatment_of(func).op, kwargs or {}
        if op is None:
            return func(*args, **kwargs)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        self.recorder.record(op, tuple(args), kwargs, out)
        return out


def trace_call(
    function: Callable, args: Sequence[Any], kwargs: dict[str, Any], metas: Sequence[Tensor], device: torch.device
) -> Trace:
    """Trace `function(*args, **kwargs)` with the meta tensors `metas`, all different, in place of the tensors in the
    arguments, which are on `device`."""
    left = iter(metas)
    args, kwargs = map_tensors((args, kwargs), lambda _: next(left))
    trace = Trace(needs_grad=torch.is_grad_enabled() and any(meta.requires_grad for meta in metas))
    trace.inputs = [Value(index, tuple(meta.shape), meta.dtype) for index, meta in enumerate(metas)]
    for value, meta in zip(trace.inputs, metas, strict=True):
        value.may_need_grad = trace.needs_grad
        if trace.needs_grad and meta.requires_grad:
            trace.need_grad.add(value.index)
    trace.values = list(trace.inputs)
    recorder = _Recorder(trace, dict(zip(map(id, metas), trace.inputs, strict=True)), device)
    with_gradients, known_as = torch.is_grad_enabled(), treatment_of(function)
    # Whoever listens for saved tensors (a checkpoint) must not hear of ours.
    unheard = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients), unheard:
        if known_as.op is not None:
            out = function(*args, **kwargs)
            recorder.record(known_as.op, tuple(args), kwargs, out)
        else:
            with recorder, _InOnePiece(recorder) if known_as.keeps_composites else nullcontext():
                out = function(*args, **kwargs)
    given = {meta.untyped_storage()._cdata for meta in metas}
    trace.result_strides = [(x.stride(), x.untyped_storage()._cdata in given) for x in flat_tensors(out)]
    trace.output = map_tensors(out, recorder.value_of)
    trace.results = [recorder.value_of(x) for x in flat_tensors(out)]
    return trace


def flat_tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(item, Tensor):
            found.append(item)
        else:
            found += flat_tensors(item)
    return found


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested lists, tuples and dicts. Named tuples keep their type."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list):
        return [map_tensors(item, function) for item in tree]
    if isinstance(tree, tuple):
        items = [map_tensors(item, function) for item in tree]
        return tuple(items) if type(tree) is tuple else _rebuild(tree, items)
    if isinstance(tree, dict):
        return {name: map_tensors(item, function) for name, item in tree.items()}
    return tree


def _rebuild(like: tuple, items: list[Any]) -> tuple:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)  # a namedtuple, or torch's own kind
