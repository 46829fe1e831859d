"""Results on thin shards, which do not show how the whole lies in memory.

Of a dim with one index, or none, a stride says nothing, and torch's kernels choose it as they please. Where a rank
holds so little of a dim that is longer on the whole, its shard may look as if the whole lay otherwise than it does, and
otherwise than on other ranks: they would not agree on whether `reshape` is a view or a copy, nor on what follows. All
ranks know of layouts so thin; there the strides of the whole are asked of torch, once for each way in which arguments
lie, and a result that does not show them remembers them as a `Part` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ranked, shards_of
from shardwise.dispatch.aliasing.copied_views import Part, storage_of
from shardwise.dispatch.aliasing.global_strides import on_one_device, strides_shown, whole_lies_plainly
from shardwise.dispatch.aliasing.views import MOST
from shardwise.dispatch.modes import unseen
from shardwise.dispatch.plan import Direct, wrap_fresh
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.layout import Layout
from shardwise.rules import Call
from shardwise.tensor import DTensor, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_size = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride

FRESH = frozenset(
    {"mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "dot", "linear", "matmul", "embedding", "_grouped_mm"}
)
"""Ops that calls are often made of and whose results are laid out anew, however their arguments lie."""


def may_hide(calls: Sequence[Call], results: Sequence[Layout]) -> bool:
    """Whether results of these calls may not show how the whole lies. A view of shards that are thin in one dim keeps
    the strides that it was given, which are enough."""
    if calls and calls[-1].name in FRESH:
        return False
    enough = 2 if all(call.is_view for call in calls) else 1
    return any(layout.thinness >= enough for layout in results)


class Lying:
    """A plan whose results on thin shards lie as the whole does, or know how it does."""

    __slots__ = ("function", "known", "of_plain", "plan", "shown")

    def __init__(self, plan: Callable, function: Callable, of_plain: list[_Whole]) -> None:
        """`of_plain` is what the function gives for whole tensors that lie plainly (those of a trace do), if known."""
        self.plan, self.function, self.of_plain = plan, function, of_plain
        self.known: dict[tuple, list[_Hidden]] = {}
        self.shown: set[tuple[int, ...]] = set()  # strides of an only argument of which the result shows all there is

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        shown = self.shown
        if shown and _on_shard(_stride, (), args[:1]) in shown and "_strides" not in args[0].__dict__:  # type: ignore[call-arg]
            plan: Any = self.plan
            out: Any = _on_shard(plan.function, (), args, kwargs or {})
            if out.__class__ is Tensor:
                out.__class__ = DTensor
                out.__dict__["_layout"] = plan.layout
                return out
            return wrap_fresh(out, plan.layout)
        key = _lying_of((*args, *kwargs.values()) if kwargs else args)
        out = self.plan(args, kwargs)
        hidden = self.known.get(key)
        if hidden is None:
            hidden = self._hidden(args, kwargs or {}, flat_tensors(out))
            if len(self.known) < MOST:
                self.known[key] = hidden
                if not hidden and self.plan.__class__ is Direct and _is_only_tensor(args, kwargs):
                    self.shown.add(key[0])
        if not hidden:
            return out
        results = flat_tensors(out)
        told = {id(results[at]): _told(results[at], strides, moved) for at, strides, moved in hidden}
        return map_tensors(out, lambda x: told.get(id(x), x))

    def _hidden(self, args: tuple, kwargs: dict[str, Any], results: Sequence[Tensor]) -> list[_Hidden]:
        plain = all(whole_lies_plainly(x) for x in flat_tensors((args, kwargs)))
        whole = (plain and self.of_plain) or unseen(self._asked, args, kwargs)
        found: list[_Hidden] = []
        for at, (x, (strides, is_view)) in enumerate(zip(results, whole, strict=True)):
            if x.__class__ is not DTensor:
                continue
            moved = not is_view and not all(_agrees(shard, strides) for shard in shards_of(x))
            if moved or not all(_shows(shard, x._layout.shape, strides) for shard in shards_of(x)):
                found.append((at, strides, moved))
        return found

    def _asked(self, args: tuple, kwargs: dict[str, Any]) -> list[_Whole]:
        whole_args, whole_kwargs = map_tensors(args, on_one_device), map_tensors(kwargs, on_one_device)
        given = {storage_of(x) for x in flat_tensors((whole_args, whole_kwargs))}
        with _disabled(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = flat_tensors(self.function(*whole_args, **whole_kwargs))
        return [(y.stride(), storage_of(y) in given) for y in whole]


_Whole = tuple[tuple[int, ...], bool]
"""The strides of a result on one device, and whether it is a view of an argument."""

_Hidden = tuple[int, tuple[int, ...], bool]
"""A result that does not show how the whole lies, the strides of that, and whether the shards lie otherwise indeed."""


def _told(x: Any, strides: tuple[int, ...], moved: bool) -> Tensor:
    if x.__class__ is not DTensor:
        return x
    if moved:
        with _disabled():
            shards = [_relaid(shard, strides) for shard in shards_of(x)]
        x = wrap(shards[0] if len(shards) == 1 else ranked(shards), x._layout)
    x.__class__, x._strides = Part, strides
    return x


def _packed(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a shard of these sizes that lies as a whole with these strides does."""
    found, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda d: (strides[d], -d)):
        found[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(found)


def _agrees(shard: Tensor, strides: Sequence[int]) -> bool:
    """Whether a shard lies as the whole does, in the dims that it holds more than one index of."""
    with _disabled():
        sizes, own = _size(shard), shard.stride()
    packed = _packed(sizes, strides)
    return 0 in sizes or all(a == b or size == 1 for a, b, size in zip(own, packed, sizes, strict=True))


def _relaid(shard: Tensor, strides: Sequence[int]) -> Tensor:
    sizes = _size(shard)
    return torch.empty_strided(sizes, _packed(sizes, strides), dtype=shard.dtype, device=shard.device).copy_(shard)


def _shows(shard: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a shard's strides are what they are where the whole lies so."""
    with _disabled():
        shown = strides_shown(shape, _size(shard), shard.stride())
    return all(a == b or size == 1 for a, b, size in zip(shown, strides, shape, strict=True))


def _is_only_tensor(args: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether a call takes one tensor, its first argument."""
    return bool(args) and args[0].__class__ is DTensor and len(flat_tensors((args, kwargs))) == 1


def _lying_of(args: Sequence[Any]) -> tuple:
    found = []
    for x in args:
        kind = x.__class__
        if kind is DTensor:
            found.append(_lying(x))
        elif kind is list or kind is tuple:
            return tuple([_lying(x) for x in flat_tensors(args) if isinstance(x, DTensor)])
    return tuple(found)


def _lying(x: Tensor) -> tuple:
    """How a tensor lies in memory, on all ranks held here, and what is remembered of the whole."""
    facts = x.__dict__
    own = _on_shard(_stride, (), (x,))  # type: ignore[call-arg]
    if "_strides" not in facts and "_peers" not in facts:
        return own
    return own, facts.get("_strides"), *(_stride(peer) for peer in facts.get("_peers", ()))
