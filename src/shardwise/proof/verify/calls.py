"""Calls to judge rules by: the aten ops that a function makes, written down with the real data they got."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.dispatch.planning.randomness import is_random
from shardwise.dispatch.planning.trace import Trace, flat_tensors, map_tensors, trace_call
from shardwise.proof.verify.case import Case, filled, runs
from shardwise.rules import Call, Value, flat_values
from shardwise.rules.kit.treatments import traced_form, treatment_of

LARGEST = 20_000
"""Elements in one tensor beyond which a call is left out: smaller ones show the same."""


def made_again(portable: tuple[str, tuple, dict[str, Any], str]) -> Case:
    """A call that was saved."""
    name, args, kwargs, origin = portable
    op = op_named(name)
    tensors = [tensor.detach().clone() for tensor in flat_tensors((args, kwargs))]
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        return recorded_call(op, args, kwargs, runs(op)(*args, **kwargs), tensors, origin)


def op_named(name: str) -> Any:
    """The op that prints as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# Recording


class _Recorder(TorchDispatchMode):
    """Writes aten calls down."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Case] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = flat_tensors((args, kwargs))
        before = [tensor.detach().clone() for tensor in given if _is_plain(tensor)]
        out = func(*args, **kwargs)
        if len(before) == len(given) and all(map(_is_plain, flat_tensors(out))):
            self.found.append(recorded_call(func, args, kwargs, out, before))
        return out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def recorded_call(op: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor], origin: str = "") -> Case:
    """A call that was made, with copies of its tensors as they were before. Every occurrence of a tensor is a value of
    its own, so that placements can be given to each."""
    trace = Trace()
    seen: dict[int, Value] = {}

    def note(tensor: Tensor) -> Value:
        value = seen[id(tensor)] = trace.new_value(tensors[len(trace.inputs)])  # the op may have changed its shape
        trace.inputs.append(value)
        return value

    bound_args = tuple(map_tensors(arg, note) for arg in args)
    bound_kwargs = {name: map_tensors(arg, note) for name, arg in kwargs.items()}

    def result(tensor: Tensor) -> Value:
        if id(tensor) not in seen or seen[id(tensor)].shape != tuple(tensor.shape):
            seen[id(tensor)] = trace.new_value(tensor)
        return seen[id(tensor)]

    trace.output = map_tensors(out, result)
    trace.results = flat_values(trace.output)
    call = Call(op, bound_args, bound_kwargs, tuple(trace.inputs), tuple(trace.results))
    trace.calls.append(call)
    return Case(call, tuple(tensors), trace, origin)


class _Composites(TorchFunctionMode):
    """Functions that have a rule as a whole, written down as one op; what they are made of is written down as well."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Case] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        treatment = treatment_of(func)
        if (op := treatment_of(treatment.stand_in or func).op) is not None:
            self.note(op, args, kwargs)
        elif treatment.traced_as is not None:
            for op, op_args, op_kwargs in _traced_as(func, args, kwargs):
                self.note(op, op_args, op_kwargs)
        return func(*args, **kwargs)

    def note(self, op: Any, args: Any, kwargs: Any) -> None:
        tensors = [tensor.detach().clone() for tensor in flat_tensors((args, kwargs))]
        self.found.append(recorded_call(op, args, kwargs, runs(op)(*args, **kwargs), tensors))


def _traced_as(function: Callable, args: Any, kwargs: Any) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """The op of ours as which dispatch sees a call of a Python function with a rule, if it does."""
    metas = [torch.empty_like(tensor, device="meta") for tensor in flat_tensors((args, kwargs))]
    left = iter(metas)
    meta_args, meta_kwargs = map_tensors((args, kwargs), lambda _: next(left))
    trace = trace_call(traced_form(function), meta_args, meta_kwargs, metas, torch.device("cpu"))
    real = {value.index: x for value, x in zip(trace.inputs, flat_tensors((args, kwargs)), strict=True)}
    for call in trace.calls:
        if call.op.namespace == "shardwise" and all(value.index in real for value in call.inputs):
            yield call.op, filled(call.args, real), {name: filled(arg, real) for name, arg in call.kwargs.items()}


def record(function: Callable, args: Sequence[Any], kwargs: dict[str, Any], origin: str = "") -> list[Case]:
    """The aten calls that `function(*args, **kwargs)` makes, and the composites with a rule of their own among them."""
    with warnings.catch_warnings(action="ignore"), _Recorder() as recorder, _Composites() as composites:
        function(*args, **kwargs)
    return [replace(case, origin=origin) for case in (*composites.found, *recorder.found)]


# What is not judged, and why

DRAWN = "draws random numbers"
UNWRITTEN = "its result is uninitialised memory"
UNDEFINED = frozenset(
    {"empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty", "resize_", "set_"}
)


def excluded(call: Call) -> str | None:
    """Why a call cannot be judged by recombining shards; None if it can."""
    if is_random(call) and call.bound.get("dropout_p") != 0:
        return DRAWN
    if call.name.rstrip("_") in UNDEFINED or call.name in UNDEFINED:
        return UNWRITTEN
    if call.name == "lift_fresh":
        return "only marks a constant as new"
    if any(value.dtype == torch.complex32 for value in (*call.inputs, *call.outputs)):
        return "torch cannot add half-precision complex numbers"
    tags = call.op.tags
    if torch.Tag.inplace_view in tags:
        return "changes how a tensor is viewed; dispatch does so itself"
    if torch.Tag.dynamic_output_shape in tags and not _has_fixed_shape(call):
        return "the shape of its result depends on data"
    if not call.inputs:
        return "takes no tensors"
    if not call.outputs and not call.mutated:
        return "returns a number read off the data" if torch.Tag.data_dependent_output in tags else "returns no tensor"
    if max((value.numel for value in (*call.inputs, *call.outputs)), default=0) > LARGEST:
        return "large; smaller samples are judged"
    return None


def _has_fixed_shape(call: Call) -> bool:
    """Whether a call of an op whose result may have any shape has a result of one shape after all."""
    if call.name == "index":
        return all(value.dtype not in (torch.bool, torch.uint8) for value in call.inputs[1:])
    return call.name == "_ctc_loss" or (call.name == "one_hot" and call["num_classes"] >= 0)
