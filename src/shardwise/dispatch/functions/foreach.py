"""`_foreach_*` and `_fused_*`: one call for many tensors. Each element is on its own; all run in the one local call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import CopiedView, depend, is_view, roots_of
from shardwise.dispatch.aliasing.inplace_via_copy import InplaceViaCopy, without_pending
from shardwise.dispatch.aliasing.result_strides import WithStrides
from shardwise.dispatch.aliasing.views import OnCopiedViews, Writes
from shardwise.dispatch.guarded import Guarded
from shardwise.dispatch.interop.autograd_function import flat_shards, joined
from shardwise.dispatch.interop.nodes import pass_none_on
from shardwise.dispatch.plan import Mover, Plan, direct_list, has_terms, mover_of, reduced_first, runs_in_cpp
from shardwise.dispatch.planning.ask_torch import refused
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.dispatch.steps import Whole
from shardwise.errors import InPlaceError
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import Group, plan_moves
from shardwise.rules.math.foreach import FUSED, REDUCING, STATE, UNSCALE, is_list_op, list_name
from shardwise.tensor import DTensor, localise
from shardwise.tensor import settled as reduced_terms

_disabled = torch._C.DisableTorchFunctionSubclass


def plan_list_call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Bring the lists into the layouts of the first one, element by element, and run the call as it is."""
    if places := _plain_apart(func, args, kwargs):
        return _ByMesh(func, places)
    name, written = list_name(func), _lead(args, kwargs) if list_name(func).endswith("_") else []
    is_step = name in (*FUSED, UNSCALE)
    if any(isinstance(x, CopiedView) for x in flat_tensors((args, kwargs))):
        several = len(written) > 1 and any(x.__class__ is CopiedView for x in written)
        return partial(_in_turn, func) if several and not is_step else OnCopiedViews(func)
    if terms := [at for at, x in enumerate(written) if isinstance(x, DTensor) and has_terms(x._layout)]:
        return reduced_first(func, terms)
    plan = _plan_together(func, args, kwargs)
    if isinstance(plan, _ByMesh):
        return plan
    if written and not isinstance(plan, InplaceViaCopy):
        plan = Guarded(plan, [Writes(name, None)])
    elif not written and any(x._layout.thinness for x in _lead(args, kwargs)):
        plan = WithStrides(plan, func, [])
    return plan if is_step else _Recorded(plan, func)


def _plan_together(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan:
    name = list_name(func)
    in_place = name.endswith("_")
    lead = _lead(args, kwargs)
    _refuse(func, args, kwargs)
    wanted = [layout.without_pending for layout in _layouts(lead, name)]
    meshes = list(dict.fromkeys(layout.mesh for layout in wanted))
    if len(meshes) > 1:
        return _ByMesh(func, {mesh: _on(mesh, lead) for mesh in meshes})
    if in_place and (pending := [x._layout for x in lead if x._layout.has_pending]):
        refusal = InPlaceError(f"{name} cannot write to a tensor with the layout {pending[0]}; redistribute it first")
        if name in (*FUSED, UNSCALE):
            raise refusal
        return InplaceViaCopy(func, range(len(lead)), [without_pending], refusal)
    _check_state(func, args, kwargs, wanted)
    if name == UNSCALE:
        return _Unscale(func, wanted[0].mesh)
    try:
        movers = _movers(args, kwargs, wanted)
    except _NotAlike:
        return _each(func)
    if name == "_foreach_mm":
        return _each(func)
    if name in REDUCING:
        return _Reduced(func, movers, wanted)
    mesh = wanted[0].mesh
    if not any(movers) and runs_in_cpp(mesh):
        return _direct_in_place(func) if in_place else direct_list(func, wanted)
    if in_place:
        return _InPlace(func, movers, mesh)
    return Whole(func, movers, wanted, [None] * len(wanted), mesh)


def _refuse(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Where lists do not match in length, shapes or dtypes, let torch look at such tensors before anything moves."""
    lists = [arg for arg in (*args, *kwargs.values()) if _is_tensors(arg)]
    kinds = [[(tuple(x.shape), x.dtype) for x in items] for items in lists]
    mixed = any(dtype.is_complex != kinds[0][0][1].is_complex for _, dtype in kinds[0])
    if (all(found == kinds[0] for found in kinds) and not mixed) or list_name(func) in FUSED:
        return
    if (refusal := refused(func, args, kwargs)) is not None:
        raise refusal


def _lead(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The list that the others follow: the first one of tensors."""
    return next(list(arg) for arg in (*args, *kwargs.values()) if _is_tensors(arg))


def has_plain_elements(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether some elements of a list call are plain in all of its lists, beside others that are DTensors."""
    return is_list_op(func) and bool(_plain_apart(func, args, kwargs or {}))


def _plain_apart(func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[Mesh | None, list[int]]:
    """Where such elements are, and where the others are, by their meshes. Plain ones come first: what they add to a
    number that all elements share (whether any gradient is infinite) the others tell the other ranks."""
    lead = _lead(args, kwargs)
    plain = [at for at, x in enumerate(lead) if not isinstance(x, DTensor)]
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and len(x) == len(lead)]
    if not plain or len(plain) == len(lead) or any(isinstance(x[at], DTensor) for x in lists for at in plain):
        return {}
    meshes = dict.fromkeys(x._layout.mesh for x in lead if isinstance(x, DTensor))
    return {None: plain, **{mesh: _on(mesh, lead) for mesh in meshes}}


def _on(mesh: Mesh, lead: Sequence[Any]) -> list[int]:
    return [at for at, x in enumerate(lead) if isinstance(x, DTensor) and x._layout.mesh is mesh]


def _is_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument) and isinstance(argument[0], Tensor)


def _layouts(lead: Sequence[Any], name: str) -> list[Layout]:
    if not all(isinstance(x, DTensor) for x in lead):
        raise InPlaceError(f"{name} mixes plain tensors and DTensors in one list; distribute the plain ones first")
    return [x._layout for x in lead]


def _check_state(func: Callable, args: tuple, kwargs: dict[str, Any], wanted: Sequence[Layout]) -> None:
    """A fused step writes to several lists. All must have the parameters' layouts: a write to a moved copy is lost."""
    if list_name(func) not in FUSED:
        return
    names = [argument.name for argument in getattr(torch.ops.aten, list_name(func)).default._schema.arguments]
    for name, tensors in (*zip(names, args), *kwargs.items()):
        for x, target in zip(tensors, wanted) if name in STATE else ():
            if isinstance(x, DTensor) and x._layout is not target:
                raise InPlaceError(
                    f"{list_name(func)} cannot write to {name} with the layout {x._layout}, while its parameter has "
                    f"{target}. Nothing was changed; redistribute it first"
                )


# How the elements of other lists come into the layouts of the first


class _NotAlike(Exception):
    """An element has a partner of another shape: they broadcast, or multiply, and how depends on their shapes."""


def _movers(args: tuple, kwargs: dict[str, Any], wanted: Sequence[Layout]) -> list[Mover | None]:
    movers: list[Mover | None] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            tensors = flat_tensors(argument)
            if len(tensors) == len(wanted):
                movers += [_mover(x, target) for x, target in zip(tensors, wanted, strict=True)]
            elif tensors:
                raise _NotAlike
        elif isinstance(argument, Tensor):
            movers.append(_whole(argument))
    return movers


def _mover(x: Tensor, target: Layout) -> Mover | None:
    """How an element comes into its partner's layout. A number is whole on all ranks, which use it differently."""
    layout = x._layout if isinstance(x, DTensor) else Layout(target.mesh, tuple(x.shape))
    if layout.shape == target.shape:
        return mover_of(plan_moves(layout, target))
    if layout.shape:
        raise _NotAlike
    return mover_of(plan_moves(layout, Layout(target.mesh, ()), frozenset(target.split_axes)))


def _whole(x: Tensor) -> Mover | None:
    if not isinstance(x, DTensor):
        return None
    return mover_of(plan_moves(x._layout, Layout(x._layout.mesh, x._layout.shape)))


# Plans


class _Recorded:
    """A plan that holds for what autograd does not record. In its graph torch makes one node of the call, which runs
    for all elements, whichever of them a loss depends on: what came before the others is given no gradient. In place
    each element has a node of its own, so each gets a call of its own. A tensor that all elements share, and that needs
    a gradient, is taken by each on its own."""

    __slots__ = ("func", "in_place", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func, self.in_place = plan, func, list_name(func).endswith("_")

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if isinstance(self.plan, InplaceViaCopy) and depend(args[0], list_name(self.func)):
            return _in_turn(self.func, args, kwargs)  # a copy does not show what was written to another
        if not _is_recorded(args, kwargs):
            return self.plan(args, kwargs)
        several = len(_lead(args, kwargs or {})) > 1
        if self.in_place and several:
            _refuse_unwritable(args[0])
            if not _forgets(args[0], self.func):
                return _in_turn(self.func, args, kwargs)
        shared = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *(kwargs or {}).values()))
        out = (_each(self.func) if shared else self.plan)(args, kwargs)
        if several and not self.in_place:
            pass_none_on(out)
        return out


def _is_recorded(args: tuple, kwargs: dict[str, Any] | None) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in flat_tensors((args, kwargs or {})))


# Writing to one element after the other


def _in_turn(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A call in place for one element after the other, which is how torch runs it on the CPU. What it refuses, it
    refuses before it writes."""
    written, *rest = args
    recorded = _is_recorded(args, kwargs)
    if recorded:
        _refuse_unwritable(written)
    former = {id(x): _of_one_node([x])[0] for x in _forgets(written, func) if recorded}
    for at, x in enumerate(written):
        own = former[id(x)].clone() if id(x) in former else x
        named = {name: _element(arg, at) for name, arg in (kwargs or {}).items()}
        func([own], *(_element(arg, at) for arg in rest), **named)
        if own is not x:
            x.copy_(own)
    return _returned(func, args, kwargs, ())


def _forgets(written: Sequence[Tensor], func: Callable) -> list[Tensor]:
    """The elements that are no views and share memory with others: torch's graph has only the last write to them."""
    roots = roots_of(written, list_name(func))
    return [x for x, root in zip(written, roots, strict=True) if roots.count(root) > 1 and not is_view(x)]


def _element(argument: Any, at: int) -> Any:
    """A list of one element, or of a number; what all elements share, as it is."""
    several = argument.dim() if isinstance(argument, Tensor) else isinstance(argument, (list, tuple))
    return argument[at : at + 1] if several else argument


def _refuse_unwritable(written: Sequence[Tensor]) -> None:
    """Let torch say that it does not write to leaves, to views of them, or to one of several views."""
    with _disabled():
        for shard in (shard for x in written for shard in shards_of(x)):
            leaves = [x for x in (shard, shard._base) if x is not None and x.requires_grad and x.grad_fn is None]
            if leaves or (
                shard.requires_grad and shard._is_view() and _get_creation_meta(shard) == CreationMeta.MULTI_OUTPUT_NODE
            ):
                shard.mul_(torch.ones((), requires_grad=True))


class _ByMesh:
    """A call whose elements live on several meshes, or on none: one call for each."""

    __slots__ = ("func", "places")

    def __init__(self, func: Callable, places: dict[Any, list[int]]) -> None:
        self.func, self.places = func, places

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        length = sum(map(len, self.places.values()))
        results: list[Any] = [None] * length
        for mesh, group in self.places.items():
            part = tuple(_part(arg, group, length, mesh) for arg in args)
            named = {name: _part(arg, group, length, mesh) for name, arg in (kwargs or {}).items()}
            out = self.func(*part, **named)
            for at, result in zip(group, out or ()):
                results[at] = result
        return _returned(self.func, args, kwargs, results)


def _part(argument: Any, group: Sequence[int], length: int, mesh: Mesh | None) -> Any:
    """The elements of a list that are on one mesh; a number that is on another mesh comes over to this one."""
    if isinstance(argument, (list, tuple)) and len(argument) == length:
        return [argument[at] for at in group]
    if isinstance(argument, DTensor) and argument._layout.mesh is not mesh:
        number = argument.full_tensor()
        return number if mesh is None else DTensor.from_local(number, mesh)
    return argument


class _Reduced:
    """A list call that reduces each element to a number. What is then pending depends on the order of a norm, which is
    a float: there is a plan for each."""

    __slots__ = ("func", "movers", "plans", "wanted")

    def __init__(self, func: Callable, movers: list[Mover | None], wanted: list[Layout]) -> None:
        self.func, self.movers, self.wanted = func, movers, wanted
        self.plans: dict[tuple[float | None, bool], Plan] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        kind = REDUCING[list_name(self.func)]
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in args[0])
        order = float((kwargs or {}).get("ord", args[1] if len(args) > 1 else 2)) if kind == "norm" else None
        plan = self.plans.get((order, needs_gradients))
        if plan is None:
            while len(self.plans) >= 8:
                del self.plans[next(iter(self.plans))]
            plan = self.plans[order, needs_gradients] = self._plan(kind, order, needs_gradients)
        return plan(args, kwargs)

    def _plan(self, kind: str, order: float | None, needs_gradients: bool) -> Plan:
        extremum = kind == "max" or (order is not None and (math.isinf(order) or order < 0))
        empty = any(layout.has_empty or not layout.numel for layout in self.wanted)
        split = any(layout.split_axes for layout in self.wanted)
        if (extremum and empty) or (needs_gradients and kind != "sum" and split):
            return _each(self.func)  # an empty shard has no extremum; only terms of a sum have gradients of their own
        pending = Partial("norm", order) if order is not None else Partial(kind)
        layouts = [_reduced(layout, pending) for layout in self.wanted]
        return Whole(self.func, self.movers, layouts, [None] * len(layouts), self.wanted[0].mesh)


def _reduced(layout: Layout, pending: Partial) -> Layout:
    return Layout(
        layout.mesh, (), (), [pending if axis in layout.split_axes else None for axis in range(layout.mesh.ndim)]
    )


class _InPlace:
    """An in-place list call: the results are the arguments. Every rank's shards are written to themselves: the graph of
    a write to aliases is another where a tensor is in the list twice."""

    __slots__ = ("func", "mesh", "movers")

    def __init__(self, func: Callable, movers: list[Mover | None], mesh: Mesh) -> None:
        self.func, self.movers, self.mesh = func, movers, mesh

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        written = {id(x) for x in _lead(args, kwargs or {})} if self.mesh.device_type != "meta" else ()
        movers = iter(self.movers)

        def shards(x: Tensor) -> Tensor:
            mover = next(movers)
            y = mover(x) if mover is not None else x
            return y if id(y) in written or y.__class__ is not DTensor else localise(y)

        with _disabled():
            local = map_tensors(args, shards), map_tensors(kwargs or {}, shards)
            for rank in range(len(self.mesh.held)):
                mine = [map_tensors(tree, partial(_of_rank, rank)) for tree in local]
                self.func(*mine[0], **mine[1])
        return _returned(self.func, args, kwargs, ())


def _of_rank(rank: int, x: Tensor) -> Tensor:
    held = shards_of(x)
    return held[rank] if len(held) > 1 else x


def _direct_in_place(func: Callable) -> Plan:
    """The function itself on the shards: what it returns is the list that it was given, or nothing."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        with _disabled():
            return func(*args, **kwargs) if kwargs else func(*args)

    return run


def _returned(func: Callable, args: tuple, kwargs: dict[str, Any] | None, results: Sequence[Any]) -> Any:
    """What torch's function returns: the results in a tuple or, in place, the list that it was given; fused steps
    return nothing. An aten op returns the results in a list and, in place, nothing."""
    is_op, name = isinstance(func, torch._ops.OpOverload), list_name(func)
    if not name.endswith("_"):
        return list(results) if is_op else tuple(results)
    return None if is_op or name in FUSED else args[0] if args else (kwargs or {})["self"]


class _Unscale:
    """Gradients divided by a loss scale, in place. Infinities found on any rank are found on all."""

    __slots__ = ("func", "group")

    def __init__(self, func: Callable, mesh: Mesh) -> None:
        self.func, self.group = func, Group(mesh, tuple(range(mesh.ndim)), ())

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> None:
        grads, found, scale = (*args, *(kwargs or {}).values())
        grads, scale = [localise(x) for x in grads], _local(scale)
        here = _local(found) * grads[0].new_ones((), dtype=torch.float32)  # one for each rank
        self.func(grads, here, scale)
        anywhere = self.group.reduce(here, "max")
        with _disabled():
            for target, value in zip(shards_of(found), shards_of(anywhere)):
                target.copy_(value)


def _local(x: Tensor) -> Tensor:
    return localise(x) if isinstance(x, DTensor) else x


# One by one


def _each(func: Callable) -> Plan:
    """The base op for each element on its own."""
    base = _base(list_name(func).removeprefix("_foreach_"))

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        results = []
        for at in range(len(_lead(args, kwargs or {}))):
            mine = [arg[at] if isinstance(arg, (list, tuple)) else arg for arg in args]
            named = {k: arg[at] if isinstance(arg, (list, tuple)) else arg for k, arg in (kwargs or {}).items()}
            results.append(base(*mine, **named))
        if any(x.requires_grad for x in results) and not list_name(func).endswith("_"):
            results = _of_one_node(results)
        return _returned(func, args, kwargs, results)

    return run


def _of_one_node(results: list[Any]) -> list[Any]:
    results = [reduced_terms(x) for x in results]  # within a graph all of them are, whatever each was computed from
    with _disabled():
        return joined(_OneNode.apply(*flat_shards(results)), [x._layout for x in results], [None] * len(results))


class _OneNode(torch.autograd.Function):
    """Results as torch's one node would give them: what is there of their gradients is passed on."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads


def _base(name: str) -> Callable[..., Tensor]:
    match name:
        case "addcmul" | "addcdiv" | "addcmul_" | "addcdiv_":
            return lambda x, a, b, value=1, scalars=None: getattr(x, name)(
                a, b, value=value if scalars is None else scalars
            )
        case "norm":
            return lambda x, ord=2, **dtype: torch.linalg.vector_norm(x, ord, **dtype)
        case "powsum":
            return lambda x, ord=2, dtype=None: x.abs().pow(ord).sum(dtype=dtype)
        case "max" | "pow" | "mm":
            return getattr(torch, name)
        case "maximum_" | "minimum_":
            return Tensor.clamp_min_ if name == "maximum_" else Tensor.clamp_max_
    return getattr(Tensor, name)
