"""The first call of its kind: trace → choose → lower → build. Then an eye on what it writes to and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.dispatch.aliasing.copied_views import CopiedView
from shardwise.dispatch.aliasing.global_strides import globally_contiguous
from shardwise.dispatch.aliasing.inplace_via_copy import plan_inplace_via_copy
from shardwise.dispatch.aliasing.kept_operands import KeepsCopies
from shardwise.dispatch.aliasing.out import plan_out
from shardwise.dispatch.aliasing.result_strides import WithStrides, may_lose_strides
from shardwise.dispatch.aliasing.thin_writes import OnThinShards
from shardwise.dispatch.aliasing.views import (
    GivesCopiedViews,
    OnCopiedViews,
    ViewOrCopy,
    Writes,
    WritesToPlain,
    only_views,
)
from shardwise.dispatch.disjoint import may_be_disjoint
from shardwise.dispatch.functions.foreach import plan_list_call
from shardwise.dispatch.guarded import Changes, Guard, Guarded, OfSource, Retains, Settles, Unrecorded
from shardwise.dispatch.interop.mixing import COLLECTIVES, apart, refuse_collective
from shardwise.dispatch.key import variant_key
from shardwise.dispatch.modes import unseen
from shardwise.dispatch.plan import Plan, has_terms, reduced_first, runs_in_cpp
from shardwise.dispatch.planning.ask_torch import LARGE, is_number, only_meta_refuses, refuse_early, refused
from shardwise.dispatch.planning.autocast import Autocast, autocast_dtype
from shardwise.dispatch.planning.build import build, is_builtin
from shardwise.dispatch.planning.fallback import Gathered, WithoutData, describe, on_meta, report, with_numbers_read
from shardwise.dispatch.planning.lower import LostWriteError, Lowered, lower
from shardwise.dispatch.planning.trace import Trace, flat_tensors, trace_call
from shardwise.dispatch.steps import Steps, Whole
from shardwise.dispatch.watch import labelled
from shardwise.errors import InPlaceError, ShardwiseError, StrideError
from shardwise.layout import Layout
from shardwise.local import is_leaf, is_parameter
from shardwise.rules import Value, rule_for
from shardwise.rules.kit.treatments import treatment_of
from shardwise.rules.math.foreach import is_list_op
from shardwise.rules.math.pointwise import ELEMENTWISE
from shardwise.tensor import DTensor, within_graph, without_terms

_disabled = torch._C.DisableTorchFunctionSubclass


class Misses:
    """How many calls have been planned so far."""

    count = 0


misses = Misses()


def make_plan(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Plan one call."""
    if getattr(func, "__module__", None) in COLLECTIVES:
        return refuse_collective
    tensors = flat_tensors((args, kwargs))
    if not on_meta(tensors):
        return _plan_for(func, args, kwargs, tensors)
    return WithoutData(WithoutData(partial(_plan_for, func, tensors=tensors), func)(args, kwargs), func)


def _plan_for(func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Plan:
    if is_list_op(func):
        return plan_list_call(func, args, kwargs)
    if any(isinstance(x, CopiedView) for x in tensors):
        return OnCopiedViews(func)
    if "out" in kwargs and (into := plan_out(func, args, kwargs)) is not None:
        return into
    if any(isinstance(kwargs.get(name), Tensor) for name in NUMBERS):
        return _with_numbers(func)
    mesh, *others = dict.fromkeys(x._layout.mesh for x in tensors if isinstance(x, DTensor))
    if others:
        raise apart(func, args, kwargs, mesh, others[0])
    layouts = [x._layout if isinstance(x, DTensor) else Layout(mesh, tuple(x.shape)) for x in tensors]
    try:
        plan, invariant = _plan(Asked(func, args, kwargs, tensors, layouts))
    except Exception:
        if autocast_dtype(func, args, kwargs) is None:
            raise
        # It may do with the dtypes that it will be given. Outside autocast it is planned, and refused, as usual.
        return Autocast(lambda args, kwargs: make_plan(func, args, kwargs or {})(args, kwargs), func)
    plan = plan if invariant else Variants(func, layouts, variant_key_now(args, kwargs), plan)
    return may_be_disjoint(func, plan, layouts)


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
        call = Asked(self.func, args, kwargs or {}, flat_tensors((args, kwargs)), self.layouts)
        plan = self.plans[key] = unseen(_plan, call)[0]
        return plan


class Asked:
    """A call to be planned: the function as users know it, the one that is planned in its place, and the arguments."""

    __slots__ = ("args", "asked", "func", "kwargs", "layouts", "tensors")

    def __init__(
        self, asked: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor], layouts: list[Layout]
    ) -> None:
        self.asked, self.func = asked, treatment_of(asked).stand_in or asked
        self.args, self.kwargs, self.tensors, self.layouts = args, kwargs, tensors, layouts

    @property
    def name(self) -> str:
        return getattr(self.asked, "__name__", str(self.asked))

    @property
    def device(self) -> torch.device:
        with _disabled():
            return next(x.device for x in self.tensors if isinstance(x, DTensor))

    def gathered(self) -> Plan:
        """The call on gathered tensors, unless torch refuses such arguments whatever the data."""
        made_up = not any(map(is_number, self.tensors))
        if made_up and (refusal := refused(self.func, self.args, self.kwargs)) is not None:
            raise refusal
        return Gathered(self.func, self.layouts[0].mesh)


def _plan(call: Asked) -> tuple[Plan, bool]:
    """A plan, and whether it holds for all dtypes and floats."""
    try:
        return _planned(call)
    except ShardwiseError:
        raise
    except Exception as error:  # of meta tensors; or of a rule, given sizes that do not go together
        raise refused(call.asked, call.args, call.kwargs, most=LARGE) or error from None


def _planned(call: Asked) -> tuple[Plan, bool]:
    trace = _traced(call)
    if not isinstance(trace, Trace):
        return trace, False
    call.layouts = [layout.unreduced for layout in call.layouts]
    lowered = _without_rules(trace, call) or _lowered(trace, call)
    if not isinstance(lowered, Lowered):
        return lowered, False
    refuse_early(lowered, call.asked, call.args, call.kwargs)
    return _built(lowered, call)


def _traced(call: Asked) -> Trace | Plan:
    """The ops that a call makes; or, where meta tensors cannot tell, the plan that does without."""
    with _disabled(), torch.inference_mode(False):
        facts = [(is_parameter(x), x.requires_grad and not is_leaf(x)) for x in call.tensors]
        # One for each argument, even where two are the same tensor: the plan must hold for two that are not. Functions
        # may branch on who needs a gradient, and on who is a leaf.
        metas = [
            torch.empty(layout.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
            for x, layout in zip(call.tensors, call.layouts, strict=True)
        ]
        metas = [x.clone() if is_inner else x for x, (_, is_inner) in zip(metas, facts, strict=True)]
    try:
        trace = trace_call(call.func, call.args, call.kwargs, metas, call.device)
    except Exception as error:
        if call.func is Tensor.__getitem__ and any(map(is_number, call.tensors[1:])):
            return partial(with_numbers_read, call.func)  # a view, as in torch
        if not isinstance(error, ShardwiseError) and only_meta_refuses(error, metas):
            return call.gathered()
        raise
    trace.parameters = {value.index for value, (is_one, _) in zip(trace.inputs, facts, strict=True) if is_one}
    trace.reduced = {value.index for value, layout in zip(trace.inputs, call.layouts, strict=True) if layout.reduced}
    return trace


def _without_rules(trace: Trace, call: Asked) -> Plan | None:
    """The plan of a call for which rules are not asked."""
    if terms := [at for at in trace.seen_arguments if has_terms(call.layouts[at])]:
        return reduced_first(call.asked, terms)
    if any(made.name.startswith("as_strided") for made in trace.calls) and not all(x.replicated for x in call.layouts):
        return Guarded(call.gathered(), [ContiguousOnly()])
    if trace.output is NotImplemented:
        return left_to_others
    is_number = not trace.results and trace.output is not None  # read off a meta tensor
    if is_number or _lost_constants(trace, call.device):
        return call.gathered()
    return None


def _lowered(trace: Trace, call: Asked) -> Lowered | Plan:
    """The call on shards; or, where a target cannot stay where it is, the plan that writes to it by way of a copy."""
    try:
        return lower(trace, call.layouts)
    except LostWriteError as lost:
        if not trace.written_arguments:
            return call.gathered()
        described = describe(call.name, call.args, call.kwargs)
        refusal = InPlaceError(f"{described} {lost}. Nothing was changed; redistribute first")
    except InPlaceError as refused:
        refusal = refused
    return plan_inplace_via_copy(call.asked, call.args, call.kwargs, refusal, trace)


def _built(lowered: Lowered, call: Asked) -> tuple[Plan, bool]:
    treatment = treatment_of(call.func)
    if treatment.reshape == "view or error":
        only_views(lowered)
    plan = labelled(build(call.func, lowered, call.args, call.kwargs, call.asked), lowered)
    invariant = is_builtin(call.func) and _is_invariant(plan, lowered, call.args, call.kwargs)
    if isinstance(plan, Steps) and treatment_of(call.asked).autocast is not None:
        plan = Autocast(plan, call.asked)
    if treatment.reshape not in (None, "view") and call.layouts[0].thinness:
        plan = ViewOrCopy(plan, call.func, _layout_of_one_view(lowered))
    if treatment_of(call.asked).reshapes_operands and any(layout.is_thin_in_places for layout in call.layouts):
        plan = KeepsCopies(plan, lowered.trace.written_arguments)
    guards: list[Guard] = []
    gathering = [made for made in lowered.calls if made.gathers]
    if gathering:
        guards.append(Reports(gathering[0].call.op._schema.name.replace("::", "."), (call.func, *call.layouts)))
    written = lowered.trace.written_arguments
    return (
        _writing(plan, guards, written, lowered, call) if written else _returning(plan, guards, lowered, call)
    ), invariant


def _writing(plan: Plan, guards: list[Guard], written: Sequence[int], lowered: Lowered, call: Asked) -> Plan:
    """The plan of a call that writes to arguments."""
    simulated = len(lowered.mesh.held) > 1
    if lowered.trace.reduced:
        guards.append(Changes(written))
    if simulated:
        guards.append(Retains(written))
    if any(call.layouts[i].thinness for i in written):
        plan = OnThinShards(plan, call.name, written)
    guards.append(Writes(call.name, written))
    plan = Guarded(plan, guards)
    shared = simulated and not all(isinstance(call.tensors[i], DTensor) for i in written)
    plan = WritesToPlain(plan, call.func, written, lowered.mesh) if shared else plan
    is_fresh = not any(value in lowered.trace.inputs for value in lowered.trace.results)
    return _with_strides(plan, lowered, call) if is_fresh else plan


def _returning(plan: Plan, guards: list[Guard], lowered: Lowered, call: Asked) -> Plan:
    """The plan of a call that only returns something: copies where torch returns views, perhaps, or shards that do
    not show the global strides."""
    results = lowered.trace.results
    layouts = [lowered.layouts[value.index] for value in results]
    copies = [at for at, value in enumerate(results) if value.index in lowered.copies]
    is_view = not copies and all(made.call.is_view for made in lowered.calls[-1:])  # or the argument itself
    allowed = without_terms if is_view else within_graph  # what writes pass through stays as it is
    if any(layout.has_pending and allowed(layout) is not layout.unreduced for layout in layouts):
        guards.append(Settles())
    if copies:
        guards.append(GivesCopiedViews(call.func, copies))  # of what is reduced by then, to which writes are watched
    if isinstance(plan, (Autocast, KeepsCopies, Steps, Whole)) and not lowered.trace.seen_arguments:
        guards.append(Unrecorded())
    if call.asked is Tensor.__getitem__ and _finds_more_rows(call, layouts):
        guards.append(OfSource())
    return _with_strides(Guarded(plan, guards) if guards else plan, lowered, call)


def _finds_more_rows(call: Asked, layouts: Sequence[Layout]) -> bool:
    """Whether a call is `x[index]`, all replicated, and finds more than there is."""
    index = call.args[1]
    if not isinstance(index, DTensor) or index.dtype in (torch.bool, torch.uint8):
        return False
    return all(layout.replicated for layout in (*call.layouts, *layouts)) and layouts[0].numel > call.layouts[0].numel


def _with_strides(plan: Plan, lowered: Lowered, call: Asked) -> Plan:
    layouts = [lowered.layouts[value.index] for value in lowered.trace.results]
    loses = may_lose_strides(lowered.calls, layouts)
    return WithStrides(plan, call.func, lowered.trace.result_strides) if loses else plan


def _layout_of_one_view(lowered: Lowered) -> Layout | None:
    """The layout of the result, if the call is one view of one shard."""
    if len(lowered.calls) != 1 or not runs_in_cpp(lowered.mesh) or not isinstance(lowered.trace.output, Value):
        return None
    (call,) = lowered.calls
    moved = any(call.moves) or any(call.out_moves) or (call.local is not None and call.local.groups)
    return None if moved or call.gathers else lowered.layouts[lowered.trace.output.index]


def left_to_others(args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """An operator that does not know the other operand."""
    return NotImplemented


class ContiguousOnly(Guard):
    """Calls that read memory by strides: they are gathered, and gathered tensors are contiguous."""

    __slots__ = ()

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if not all(map(globally_contiguous, flat_tensors((args, kwargs)))):
            raise StrideError(
                f"{describe('as_strided', args, kwargs)}: a sharded tensor that is not contiguous has no memory to "
                f"take a view of by strides; call contiguous() first"
            )


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
    draws_by_float = call.call.name == "scaled_dot_product_attention"
    looked = call.call.bound.float_read and rule_for(call.call.op) is not ELEMENTWISE  # those see to that themselves
    if (draws_by_float or looked) and any(isinstance(x, (float, complex)) for x in tree_leaves((args, kwargs))):
        return False  # the rule looked at a float that was given, not at a default
    if call.local is not None and not call.local.resized:  # its arguments may have been read off dtypes and floats
        return False
    if any(layout.has_empty for layout in call.layouts.ins):
        return False  # ranks that hold nothing would not say what torch has against a dtype
    return all(not layout.has_pending or within_graph(layout) is layout.unreduced for layout in call.layouts.outs)


class Reports(Guard):
    """Something in the call has no rule, and is gathered."""

    __slots__ = ("key", "name")

    def __init__(self, name: str, key: tuple) -> None:
        self.name, self.key = name, key

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        report(self.name, self.key, args, kwargs)
