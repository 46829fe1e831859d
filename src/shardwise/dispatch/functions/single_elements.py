"""List calls that run element by element: one call for each, where one for all would not be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import is_view, roots_of
from shardwise.dispatch.interop.autograd_function import flat_shards, joined
from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.rules.math.foreach import FUSED, list_name
from shardwise.tensor import settled as reduced_terms

_disabled = torch._C.DisableTorchFunctionSubclass


def lead_of(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The list that the others follow: the first one of tensors."""
    return next(list(arg) for arg in (*args, *kwargs.values()) if is_tensors(arg))


def is_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument) and isinstance(argument[0], Tensor)


def is_recorded(args: tuple, kwargs: dict[str, Any] | None) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in flat_tensors((args, kwargs or {})))


def returned(func: Callable, args: tuple, kwargs: dict[str, Any] | None, results: Sequence[Any]) -> Any:
    """What torch's function returns: the results in a tuple or, in place, the list that it was given; fused steps
    return nothing. An aten op returns the results in a list and, in place, nothing."""
    is_op, name = isinstance(func, torch._ops.OpOverload), list_name(func)
    if not name.endswith("_"):
        return list(results) if is_op else tuple(results)
    return None if is_op or name in FUSED else args[0] if args else (kwargs or {})["self"]


# In place, one after the other


def in_turn(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """A call in place for one element after the other, which is how torch runs it on the CPU. What it refuses, it
    refuses before it writes."""
    written, *rest = args
    recorded = is_recorded(args, kwargs)
    if recorded:
        refuse_unwritable(written)
    former = {id(x): _of_one_node([x])[0] for x in forgotten(written, func) if recorded}
    for at, x in enumerate(written):
        own = former[id(x)].clone() if id(x) in former else x
        named = {name: _element(arg, at) for name, arg in (kwargs or {}).items()}
        func([own], *(_element(arg, at) for arg in rest), **named)
        if own is not x:
            x.copy_(own)
    return returned(func, args, kwargs, ())


def forgotten(written: Sequence[Tensor], func: Callable) -> list[Tensor]:
    """The elements that are no views and share memory with others: torch's graph has only the last write to them."""
    roots = roots_of(written, list_name(func))
    return [x for x, root in zip(written, roots, strict=True) if roots.count(root) > 1 and not is_view(x)]


def _element(argument: Any, at: int) -> Any:
    """A list of one element, or of a number; what all elements share, as it is."""
    several = argument.dim() if isinstance(argument, Tensor) else isinstance(argument, (list, tuple))
    return argument[at : at + 1] if several else argument


def refuse_unwritable(written: Sequence[Tensor]) -> None:
    """Let torch say that it does not write to leaves, to views of them, or to one of several views."""
    with _disabled():
        for shard in (shard for x in written for shard in shards_of(x)):
            leaves = [x for x in (shard, shard._base) if x is not None and x.requires_grad and x.grad_fn is None]
            if leaves or (
                shard.requires_grad and shard._is_view() and _get_creation_meta(shard) == CreationMeta.MULTI_OUTPUT_NODE
            ):
                shard.mul_(torch.ones((), requires_grad=True))


# Out of place


def each(func: Callable) -> Plan:
    """The base op for each element on its own."""
    base = _base(list_name(func).removeprefix("_foreach_"))

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        results = []
        for at in range(len(lead_of(args, kwargs or {}))):
            mine = [arg[at] if isinstance(arg, (list, tuple)) else arg for arg in args]
            named = {k: arg[at] if isinstance(arg, (list, tuple)) else arg for k, arg in (kwargs or {}).items()}
            results.append(base(*mine, **named))
        if any(x.requires_grad for x in results) and not list_name(func).endswith("_"):
            results = _of_one_node(results)
        return returned(func, args, kwargs, results)

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
