"""How a lowered call runs on the shards: a function, and a template of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import PerRank, local_tensor, shards_of
from shardwise.comm.ranked import join, pick
from shardwise.dispatch.modes import ThinkingMode
from shardwise.dispatch.planning.lower import LoweredCall
from shardwise.dispatch.planning.meta_results import SHAPES
from shardwise.dispatch.planning.trace import map_tensors
from shardwise.layout import Mesh
from shardwise.redistribute import Group, own_node
from shardwise.rules import Call, HeldValues, Value
from shardwise.rules.kit.kernels import kernel_for

_disabled = torch._C.DisableTorchFunctionSubclass


def local_call(lowered: LoweredCall, mesh: Mesh) -> tuple[Callable, list[Any], dict[str, Any]]:
    """The function that runs on the shards and its arguments, in which `Value`s stand for shards."""
    call, local = lowered.call, lowered.local
    if local is None:
        return _binding(call), list(call.args), dict(call.kwargs)
    groups = [Group(mesh, axes, lowered.layouts.ins) for axes in local.groups]
    args = [*groups, *(_held(arg) for arg in local.args)]
    function = kernel_for(local.function, mesh.device_type)
    if not groups:
        function = function if len(mesh.held) == 1 else EachRank(function, len(mesh.held))
    elif all(returned.alias_info is None for returned in call.op._schema.returns):
        function = partial(_of_program, function)
    return function, args, {name: _held(arg) for name, arg in local.kwargs.items()}


def _of_program(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Results that are views only of what the program made on the way are none to autograd, as torch's are none: to a
    view that is written to, or whose base is, its hooks are lost. Those that are not the first of their node, as other
    ranks' in the simulator are not, have one of their own: where torch keeps a gradient for them after a write to a
    view of theirs, it looks for the first, and dies."""
    return map_tensors(function(*args, **kwargs), _of_its_own)


def _of_its_own(x: Tensor) -> Tensor:
    held = shards_of(x)
    with _disabled():
        if not x.requires_grad or not any(shard._is_view() or (len(held) > 1 and shard.output_nr) for shard in held):
            return x
        shards = [own_node(shard) for shard in held]
    return local_tensor(shards)


class EachRank:
    """An ordinary local function, run for every rank of the simulator."""

    __slots__ = ("function", "num_ranks")

    def __init__(self, function: Callable, num_ranks: int) -> None:
        self.function, self.num_ranks = function, num_ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disabled():
            return join([self.function(*pick(args, rank), **pick(kwargs, rank)) for rank in range(self.num_ranks)])


def _held(argument: Any) -> Any:
    """An argument per held rank as the runner wants it: plain where there is one rank or all agree."""
    if isinstance(argument, HeldValues):
        first = argument.values[0]
        return first if all(value == first for value in argument.values) else PerRank(argument.values)
    return argument


# The quickest callable for an aten op: the C++ binding of the same name, where it makes exactly the same call

_bindings: dict[tuple, Callable] = {}
MAX_BINDINGS = 4096


def _binding(call: Call) -> Callable:
    """The quickest callable for a call's op, which is found by trying: once for all calls that differ in sizes only."""
    key = (call.op, _kind_of(call.args, call.op), _kind_of(tuple(call.kwargs.items()), call.op))
    found = _bindings.get(key)
    if found is None:
        if len(_bindings) >= MAX_BINDINGS:
            _bindings.clear()
        found = _bindings[key] = fast_callable(call)
    return found


def _kind_of(tree: Any, op: Any) -> Any:
    """An argument as bindings see it. Those that are made of other ops may look at sizes too."""
    if isinstance(tree, Value):
        sees_sizes = has_composites(op) and op not in SHAPES
        return (Value, tree.dtype, tree.shape if sees_sizes else tree.ndim)
    if isinstance(tree, (list, tuple)):
        return tuple([_kind_of(item, op) for item in tree])
    return (tree.__class__, tree)


_composites: dict[Any, bool] = {}


def has_composites(op: Any) -> bool:
    """Whether some overload of an op is made of other ops, so that its binding may do more than call the op. Overloads
    for named dims are, but nothing here has names."""
    packet = op.overloadpacket
    found = _composites.get(packet)
    if found is None:
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        names = [overload.name() for overload in overloads if "dimname" not in str(overload._schema).lower()]
        found = _composites[packet] = any(
            torch._C._dispatch_has_kernel(name)
            and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            for name in names
        )
    return found


def fast_callable(call: Call) -> Any:
    """A binding in `torch` (or `torch.nn.functional`'s own) for the call's op, tried out on meta tensors, or the op."""
    if call.mutated:
        return call.op
    known: dict[int, Value] = {}

    def meta(value: Value) -> Tensor:
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
        known[id(made)] = value
        return made

    args, kwargs = map_values(call.args, meta), {name: map_values(arg, meta) for name, arg in call.kwargs.items()}
    for namespace in (torch._C._VariableFunctions, torch._C._nn):
        binding = getattr(namespace, call.name, None)
        if binding is not None and makes_call(binding, args, kwargs, call, known):
            return binding
    return call.op


def map_values(tree: Any, function: Callable[[Value], Any]) -> Any:
    """Replace the `Value`s in nested lists and tuples."""
    if isinstance(tree, Value):
        return function(tree)
    return [map_values(item, function) for item in tree] if isinstance(tree, (list, tuple)) else tree


def makes_call(
    function: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    call: Call,
    known: dict[int, Value],
    results: Sequence[Tensor] | None = None,
) -> bool:
    """Whether a function of meta tensors, which stand for the values that `known` says, makes this one call and no
    other. Given its `results`, nothing is computed."""
    rehearsal = _Rehearsal(call, known, results)
    try:
        with torch.no_grad(), rehearsal:
            function(*args, **kwargs)
    except Exception:  # whatever it is, it is not this call
        return False
    return rehearsal.num_calls == 1


class _Rehearsal(ThinkingMode):
    def __init__(self, call: Call, known: dict[int, Value], results: Sequence[Tensor] | None) -> None:
        super().__init__()
        self.call, self.known, self.results = call, known, results
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        given_args, given_kwargs = map_tensors((tuple(args), kwargs or {}), lambda x: self.known[id(x)])
        given = Call(func, given_args, given_kwargs, (), ())
        if func is not self.call.op or comparable(given.bound) != comparable(self.call.bound):
            raise RuntimeError("another call")
        if self.results is None:
            return func(*args, **(kwargs or {}))
        made = iter(self.results)
        returns = [next(made) if str(one.type) == "Tensor" else list(made) for one in func._schema.returns]
        return returns[0] if len(returns) == 1 else tuple(returns)


def comparable(tree: Any, rank: int = 0) -> Any:
    """Arguments with each value as its number: shapes differ, everything else must not."""
    if isinstance(tree, Value):
        return ("value", tree.index)
    if isinstance(tree, HeldValues):
        return comparable(tree.values[rank])
    if isinstance(tree, (list, tuple)):
        return [comparable(item, rank) for item in tree]
    if isinstance(tree, dict):
        return {name: comparable(item, rank) for name, item in tree.items() if name != "device"}
    return tree
