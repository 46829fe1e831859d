"""The first call of its kind: trace → choose → lower → build. Then an eye on what it writes to and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.aliasing.copied_views import CopiedView
from shardwise.dispatch.aliasing.empty_writes import OnNothing
from shardwise.dispatch.aliasing.global_strides import whole_lies_plainly, whole_strides
from shardwise.dispatch.aliasing.inplace_via_copy import seen_arguments, written_arguments, written_elsewhere
from shardwise.dispatch.aliasing.out import plan_out
from shardwise.dispatch.aliasing.result_strides import Lying, may_hide
from shardwise.dispatch.aliasing.views import (
    MAY_COPY,
    ONLY_VIEWS,
    Copies,
    OfAllRanks,
    OfCopies,
    ViewOrCopy,
    Writes,
    only_views,
)
from shardwise.dispatch.functions.foreach import in_turn, plan_list_call, written_terms
from shardwise.dispatch.interop.mixing import is_collective, refuse_collective
from shardwise.dispatch.key import is_parameter, variant_key
from shardwise.dispatch.modes import unseen
from shardwise.dispatch.plan import (
    Plan,
    changed,
    has_terms,
    reduced_first,
    retaining,
    runs_in_cpp,
    settling,
)
from shardwise.dispatch.planning.ask_torch import can_be_tried, refused, refused_dtypes, torchs_own
from shardwise.dispatch.planning.autocast import AUTOCAST, Autocast, autocast_dtype
from shardwise.dispatch.planning.build import Steps, build
from shardwise.dispatch.planning.fallback import Gathered, describe, report
from shardwise.dispatch.planning.lower import LostWriteError, Lowered, is_builtin, lower
from shardwise.dispatch.planning.trace import FORWARDS, Trace, flat_tensors, map_tensors, trace_call
from shardwise.dispatch.watch import labelled
from shardwise.errors import InPlaceError, MeshError, ShardwiseError, StrideError
from shardwise.layout import Layout
from shardwise.local import is_leaf
from shardwise.rules import Value, flat_values, rule_for
from shardwise.rules.math.foreach import is_list_op
from shardwise.rules.math.pointwise import ELEMENTWISE
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass


class Misses:
    """How many calls have been planned so far."""

    count = 0


misses = Misses()


def make_plan(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Plan one call."""
    if is_collective(func):
        return refuse_collective
    if any(isinstance(x, CopiedView) for x in flat_tensors((args, kwargs))):
        return in_turn(OfCopies(func), func)
    if is_list_op(func):
        if terms := written_terms(func, args, kwargs):
            return reduced_first(func, terms)
        try:
            plan = plan_list_call(func, args, kwargs)
        except InPlaceError as refusal:
            return in_turn(written_elsewhere(func, args, kwargs, refusal), func)
        return Writes(plan, func.__name__, None) if func.__name__.endswith("_") else plan
    if "out" in kwargs and (into := plan_out(func, args, kwargs)) is not None:
        return into
    tensors = flat_tensors((args, kwargs))
    mesh = _common_mesh(tensors)
    layouts = [x._layout if isinstance(x, DTensor) else Layout(mesh, tuple(x.shape)) for x in tensors]
    if any(isinstance(kwargs.get(name), Tensor) for name in NUMBERS):
        return _with_numbers(func)
    try:
        plan, invariant = _plan(func, args, kwargs, layouts)
    except Exception:
        if autocast_dtype(func, args, kwargs) is None:
            raise
        # It may do with the dtypes that it will be given. Outside autocast it is planned, and refused, as usual.
        return Autocast(lambda args, kwargs: make_plan(func, args, kwargs or {})(args, kwargs), func)
    return plan if invariant else Variants(func, layouts, variant_key_now(args, kwargs), plan)


NUMBERS = ("alpha", "beta", "value")
"""Arguments that are numbers, for which torch takes 0-d tensors as well."""


def _with_numbers(func: Callable) -> Plan:
    """The call with its numbers read out of their tensors."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        read = {k: x.item() if k in NUMBERS and isinstance(x, Tensor) else x for k, x in (kwargs or {}).items()}
        return func(*args, **read)

    return run


def variant_key_now(args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    with _disabled():
        return variant_key(args, kwargs)


class Variants:
    """Plans of one key that depend on dtypes or on the values of floats as well."""

    __slots__ = ("func", "layouts", "plans")

    def __init__(self, func: Callable, layouts: list[Layout], key: tuple, plan: Plan) -> None:
        self.func = func
        self.layouts = layouts
        self.plans = {key: plan}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        key = variant_key_now(args, kwargs)
        plan = self.plans.get(key)
        if plan is None:
            plan = self._made(key, args, kwargs)
        return plan(args, kwargs)

    def plan_for(self, args: tuple, kwargs: dict[str, Any] | None) -> Plan:
        """The plan that a call would run."""
        key = variant_key_now(args, kwargs)
        return self.plans.get(key) or self._made(key, args, kwargs)

    def _made(self, key: tuple, args: tuple, kwargs: dict[str, Any] | None) -> Plan:
        if len(self.plans) >= 64:
            del self.plans[next(iter(self.plans))]
        misses.count += 1
        plan = self.plans[key] = unseen(_plan, self.func, args, kwargs or {}, self.layouts)[0]
        return plan


def _common_mesh(tensors: Sequence[Tensor]) -> Any:
    meshes = list(dict.fromkeys(x._layout.mesh for x in tensors if isinstance(x, DTensor)))
    if len(meshes) > 1:
        raise MeshError(
            f"one call mixes tensors on {meshes[0]} and on {meshes[1]}; bring them to one mesh first "
            f"(full_tensor() and distribute_tensor)"
        )
    return meshes[0]


def _plan(asked: Callable, args: tuple, kwargs: dict[str, Any], layouts: list[Layout]) -> tuple[Plan, bool]:
    """A plan, and whether it holds for all dtypes and floats."""
    func = FORWARDS.get(asked, asked)
    trace = _traced(func, args, kwargs, layouts)
    if not isinstance(trace, Trace):
        return trace, False
    layouts = [layout.unreduced for layout in layouts]
    _refuse_what_meta_lets_pass(trace, asked, args, kwargs)
    lowered = _without_rules(trace, func, asked, args, kwargs, layouts) or _lowered(
        trace, func, asked, args, kwargs, layouts
    )
    if not isinstance(lowered, Lowered):
        return lowered, False
    if func in ONLY_VIEWS:
        only_views(lowered)
    plan = labelled(build(func, lowered, args, kwargs, asked), lowered)
    invariant = is_builtin(func) and _is_invariant(plan, lowered, args, kwargs)
    if isinstance(plan, Steps) and asked in AUTOCAST:
        plan = Autocast(plan, asked)
    if func in MAY_COPY and layouts[0].thinness:
        plan = ViewOrCopy(plan, func, _layout_of_one_view(lowered))
    gathering = [call for call in lowered.calls if call.gathers]
    if gathering:
        plan = Reported(plan, gathering[0].call.op._schema.name.replace("::", "."), (func, *layouts))
    return _watched(plan, func, args, kwargs, layouts, lowered), invariant


def _traced(func: Callable, args: tuple, kwargs: dict[str, Any], layouts: Sequence[Layout]) -> Trace | Plan:
    """The ops that a call makes; or, where meta tensors cannot tell, the plan that does without."""
    metas: list[Tensor] = []

    def meta(x: Tensor) -> Tensor:
        """One for each argument, even where two are the same tensor: the plan must hold for two that are not."""
        shape = x._layout.shape if isinstance(x, DTensor) else tuple(x.shape)
        made = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        metas.append(made if is_leaf(x) else made.clone())  # functions may branch on either
        return metas[-1]

    with _disabled(), torch.inference_mode(False):
        parameters = [is_parameter(x) for x in flat_tensors((args, kwargs))]
        meta_args, meta_kwargs = map_tensors(args, meta), map_tensors(kwargs, meta)
    try:
        trace = trace_call(func, meta_args, meta_kwargs, metas, _device(args, kwargs))
    except Exception as error:
        if func is Tensor.__getitem__ and _has_tensor_indices(args[1]):
            return picked_by_tensor
        if isinstance(error, NotImplementedError) or (isinstance(error, RuntimeError) and _knows_no_meta(str(error))):
            return _gathered(func, args, kwargs, layouts)
        if not isinstance(error, ShardwiseError) and not all(layout.numel for layout in layouts):
            return _gathered(func, args, kwargs, layouts)  # of nothing, kernels for meta tensors refuse more
        raise torchs_own(error, func, args, kwargs) or error from None
    trace.parameters = {value.index for value, is_one in zip(trace.inputs, parameters, strict=True) if is_one}
    trace.reduced = {value.index for value, layout in zip(trace.inputs, layouts, strict=True) if layout.reduced}
    return trace


def _refuse_what_meta_lets_pass(trace: Trace, asked: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    if not all(map(can_be_tried, trace.calls)):
        return
    unchecked = any(call.name.rstrip("_") in UNCHECKED_ON_META for call in trace.calls)
    if unchecked or not all(call.is_view for call in trace.calls):
        refusal = (refused if unchecked else refused_dtypes)(asked, args, kwargs)
        if refusal is not None:
            raise refusal


def _without_rules(
    trace: Trace, func: Callable, asked: Callable, args: tuple, kwargs: dict[str, Any], layouts: list[Layout]
) -> Plan | None:
    """The plan of a call for which rules are not asked."""
    if terms := [at for at in seen_arguments(trace) if has_terms(layouts[at])]:
        return reduced_first(asked, terms)
    if any(call.name.startswith("as_strided") for call in trace.calls) and not all(x.replicated for x in layouts):
        return ContiguousOnly(_gathered(func, args, kwargs, layouts))
    if trace.output is NotImplemented:
        return left_to_others
    if not _covered(trace.output) or _lost_constants(trace, _device(args, kwargs)):
        return _gathered(func, args, kwargs, layouts)
    return None


def _lowered(
    trace: Trace, func: Callable, asked: Callable, args: tuple, kwargs: dict[str, Any], layouts: list[Layout]
) -> Lowered | Plan:
    """The call on shards; or, where a target cannot stay where it is, the plan that writes to it by way of a copy."""
    try:
        return lower(trace, layouts)
    except LostWriteError as lost:
        if not written_arguments(trace):
            return _gathered(func, args, kwargs, layouts)
        call = describe(_name(asked), args, kwargs)
        refusal = InPlaceError(f"{call} {lost}. Nothing was changed; redistribute first")
        return written_elsewhere(asked, args, kwargs, refusal, trace)
    except InPlaceError as refusal:
        return written_elsewhere(asked, args, kwargs, refusal, trace)


def _watched(
    plan: Plan, func: Callable, args: tuple, kwargs: dict[str, Any], layouts: list[Layout], lowered: Lowered
) -> Plan:
    """The plan, with an eye on what it writes to; or on results that are copies where torch's are views, and on those
    that do not show how the whole lies in memory."""
    trace = lowered.trace
    written = written_arguments(trace)
    if written:
        if trace.reduced:
            plan = changed(plan, written)
        if len(lowered.mesh.held) > 1:
            plan = retaining(plan, written)
        if any(0 in layouts[i].pieces(dim) for i in written for dim in range(len(layouts[i].shape))):
            plan = OnNothing(plan, func, written)
        plan = Writes(plan, _name(func), written)
        tensors = flat_tensors((args, kwargs))
        shared = len(lowered.mesh.held) > 1 and not all(isinstance(tensors[i], DTensor) for i in written)
        return OfAllRanks(plan, func, written, lowered.mesh) if shared else plan
    results = flat_values(trace.output)
    copies = [i for i, value in enumerate(results) if value.index in lowered.copies]
    if copies:
        plan = Copies(plan, func, copies)
    if may_hide([call.call for call in lowered.calls], [lowered.layouts[value.index] for value in results]):
        plan = Lying(plan, func, trace.lying)
    if any(has_terms(lowered.layouts[value.index]) for value in results):
        plan = settling(plan)
    return plan


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))


def _knows_no_meta(complaint: str) -> bool:
    """Whether an op only has no kernel for meta tensors: torch's words for its own ops, and for custom ones."""
    return "meta" in complaint or "no fake impl registered" in complaint


def _layout_of_one_view(lowered: Lowered) -> Layout | None:
    """The layout of the result, if the call is one view of one shard."""
    if len(lowered.calls) != 1 or not runs_in_cpp(lowered.mesh) or not isinstance(lowered.trace.output, Value):
        return None
    (call,) = lowered.calls
    moved = any(call.moves) or any(call.out_moves) or (call.local is not None and call.local.groups)
    return None if moved or call.gathers else lowered.layouts[lowered.trace.output.index]


def _gathered(func: Callable, args: tuple, kwargs: dict[str, Any], layouts: Sequence[Layout]) -> Plan:
    """The call on whole tensors, unless torch refuses such arguments whatever the data: then nothing is gathered."""
    if (refusal := refused(func, args, kwargs)) is not None:
        raise refusal
    return Gathered(func, layouts[0].mesh)


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    with _disabled():
        return next(x.device for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor))


def _covered(output: Any) -> bool:
    """Whether a traced call returned something made of tensors, not a number read off a meta tensor."""
    return bool(flat_values(output)) or output is None


def left_to_others(args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An operator that does not know the other operand."""
    return NotImplemented


def _has_tensor_indices(index: Any) -> bool:
    """Whether an index holds numbers in tensors, which torch reads out, and a trace cannot."""
    items = index if isinstance(index, tuple) else (index,)
    return any(_is_number(item) for item in items)


def _is_number(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.dim() and item.dtype != torch.bool


def picked_by_tensor(args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
    """`x[i]` with `i` a number in a tensor. As in torch it is read out, and the result is a view."""
    x, index = args
    items = index if isinstance(index, tuple) else (index,)
    return x[tuple(int(item) if _is_number(item) else item for item in items)]


UNCHECKED_ON_META = frozenset(
    {
        *("select_scatter", "slice_scatter", "diagonal_scatter"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__", "__or__", "__xor__"),
    }
)
"""Ops whose kernels for meta tensors let sizes or dtypes pass that others refuse."""


class ContiguousOnly:
    """A plan of a function that reads memory by strides: it is gathered, so the whole must lie as gathered ones do."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if not all(map(whole_lies_plainly, flat_tensors((args, kwargs or {})))):
            if (inside := _in_order_of_memory(args[0] if args else None)) is not None:
                return torch.as_strided(inside, *args[1:], **(kwargs or {}))
            raise StrideError(
                f"{describe('as_strided', args, kwargs or {})}: how the whole of a sharded tensor that is not "
                f"contiguous lies in memory is not defined; call contiguous() first"
            )
        return self.plan(args, kwargs)


def _in_order_of_memory(x: Any) -> DTensor | None:
    """The tensor with its dims in the order in which they lie, if that makes it contiguous: it lies where `x` does."""
    if not isinstance(x, DTensor):
        return None
    strides = whole_strides(x)
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    inside: Any = x.permute(order) if order != list(range(x.ndim)) else None
    return inside if inside is not None and whole_lies_plainly(inside) else None


def _lost_constants(trace: Trace, device: torch.device) -> bool:
    """Whether the function made a tensor of numbers of its own where its arguments were, on meta: they are lost."""
    return device.type != "meta" and any(constant.is_meta for _, constant in trace.constants)


def _is_invariant(plan: Plan, lowered: Lowered, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a plan holds for all dtypes, floats and needs of gradients: it runs one op and passes them on to it. What
    a function in Python does with them is unknown."""
    if len(lowered.calls) != 1 or isinstance(plan, Steps) or lowered.by_gradient:
        return False  # a function that does nothing to floats may do something to complex numbers
    (call,) = lowered.calls
    if call.call.name == "_to_copy":
        return False  # what passes through a conversion depends on the dtype
    if call.call.name == "scaled_dot_product_attention" and any(
        isinstance(x, float) for x in (*args, *kwargs.values())
    ):
        return False  # whether it draws depends on a float
    if call.call.bound.float_read and rule_for(call.call.op) is not ELEMENTWISE:
        return False  # the rule looked at a float (element-wise ones see to that themselves)
    if call.local is not None and not call.local.resized:  # its arguments may have been read off dtypes and floats
        return False
    if any(layout.has_empty for layout in call.layouts.ins):
        return False  # ranks that hold nothing would not say what torch has against a dtype
    return not any(map(has_terms, call.layouts.outs))


class Reported:
    """A plan in which something without a rule is gathered."""

    __slots__ = ("key", "name", "plan")

    def __init__(self, plan: Plan, name: str, key: tuple) -> None:
        self.plan, self.name, self.key = plan, name, key

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        report(self.name, self.key, args, kwargs or {})
        return self.plan(args, kwargs)
