"""Calls to judge rules by: the aten ops that a function makes, written down with the real data they got."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.dispatch.planning.randomness import is_random
from shardwise.dispatch.planning.trace import Trace, flat_tensors, map_tensors, trace_call
from shardwise.rules import Call, Value, flat_values
from shardwise.rules.kit.treatments import traced_form, treatment_of

LARGEST = 20_000
"""Elements in one tensor beyond which a call is left out: smaller ones show the same."""


@dataclass(frozen=True)
class Recorded:
    """One aten call: `tensors[i]` is what its i-th input was. `trace` is the call alone, as dispatch would see it."""

    call: Call
    tensors: tuple[Tensor, ...]
    trace: Trace
    origin: str

    @property
    def op(self) -> str:
        return self.call.op._schema.name

    def __str__(self) -> str:
        parts = [_show(arg) for arg in self.call.args]
        parts += [f"{name}={_show(arg)}" for name, arg in self.call.kwargs.items()]
        return f"{self.call.op}({', '.join(parts)})"

    def portable(self) -> tuple[str, tuple, dict[str, Any], str]:
        """The call as `pickle` can write it; `made_again` makes it again."""
        held = {value.index: tensor for value, tensor in zip(self.call.inputs, self.tensors, strict=True)}
        kwargs = {name: filled(arg, held) for name, arg in self.call.kwargs.items()}
        return str(self.call.op), tuple(filled(arg, held) for arg in self.call.args), kwargs, self.origin


def _show(arg: Any) -> str:
    if isinstance(arg, Value):
        short = str(arg.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("complex", "c")
        return f"{short}[{','.join(map(str, arg.shape))}]"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_show, arg))}]"
    return repr(arg) if isinstance(arg, str) else str(arg)


def made_again(portable: tuple[str, tuple, dict[str, Any], str]) -> Recorded:
    """A call that was saved."""
    name, args, kwargs, origin = portable
    op = op_named(name)
    tensors = [tensor.detach().clone() for tensor in flat_tensors((args, kwargs))]
    with _quiet(), torch.no_grad():
        return recorded_call(op, args, kwargs, runs(op)(*args, **kwargs), tensors, origin)


def op_named(name: str) -> Any:
    """The op that prints as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def filled(template: Any, held: dict[int, Any]) -> Any:
    """An argument of a call with tensors in place of its values."""
    if isinstance(template, Value):
        return held[template.index]
    if isinstance(template, (list, tuple)):
        return [filled(item, held) for item in template]
    return template


def key_of(recorded: Recorded) -> tuple:
    """What makes two calls the same to a rule: op, shapes, dtypes, static arguments."""
    return str(recorded.call.op), str(recorded)


# Recording


class _Recorder(TorchDispatchMode):
    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin
        self.found: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = flat_tensors((args, kwargs))
        before = [tensor.detach().clone() for tensor in given if _is_plain(tensor)]
        out = func(*args, **kwargs)
        if len(before) == len(given) and all(map(_is_plain, flat_tensors(out))):
            self.found.append(recorded_call(func, args, kwargs, out, before, self.origin))
        return out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def recorded_call(op: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor], origin: str = "") -> Recorded:
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
    outputs = tuple(flat_values(trace.output))
    call = Call(op, bound_args, bound_kwargs, tuple(trace.inputs), outputs)
    trace.calls.append(call)
    trace.dtypes = tuple(value.dtype for value in trace.inputs)
    return Recorded(call, tuple(tensors), trace, origin)


class _Composites(TorchFunctionMode):
    """Functions that have a rule as a whole, written down as one op; what they are made of is written down as well."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin
        self.found: list[Recorded] = []

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
        self.found.append(recorded_call(op, args, kwargs, runs(op)(*args, **kwargs), tensors, self.origin))


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


def runs(op: Any) -> Callable:
    """What runs an op on real tensors: itself, or the Python function that it stands for."""
    return treatment_of(op).function or op


def record(function: Callable, args: Sequence[Any], kwargs: dict[str, Any], origin: str = "") -> list[Recorded]:
    """The aten calls that `function(*args, **kwargs)` makes, and the composites with a rule of their own among them."""
    with _quiet(), _Recorder(origin) as recorder, _Composites(origin) as composites:
        function(*args, **kwargs)
    return [*composites.found, *recorder.found]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
