"""Strides of results on thin shards, from which the global strides cannot be inferred.

The stride of a dim with one index, or none, says nothing, and torch's kernels choose it as they please. Where a rank
holds so little of a longer dim, the global strides inferred from its shard may be others than torch's, and others than
on other ranks: they would not agree on whether `reshape` is a view or a copy, nor on which tensors a write reaches. All
ranks know which layouts are that thin. There torch is asked for the strides of the result, once for each way in which
the arguments are strided, and a result from whose shards they cannot be inferred keeps them (`KeepsStrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor, shards_of
from shardwise.dispatch.aliasing.copied_views import KeepsStrides, storage_of
from shardwise.dispatch.aliasing.global_strides import global_strides, globally_contiguous, on_one_device, shows
from shardwise.dispatch.aliasing.views import MOST
from shardwise.dispatch.modes import unseen
from shardwise.dispatch.plan import Direct, wrap_fresh
from shardwise.dispatch.planning.ask_torch import affordable
from shardwise.dispatch.planning.lower import LoweredCall
from shardwise.dispatch.planning.trace import ResultStrides, flat_tensors, map_tensors
from shardwise.layout import Layout
from shardwise.tensor import DTensor, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_size = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride

CONTIGUOUS = frozenset(
    {"mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "dot", "linear", "matmul", "embedding", "_grouped_mm"}
)
"""Ops that calls are often made of and whose results are contiguous, however their arguments are strided."""


def may_lose_strides(calls: Sequence[LoweredCall], results: Sequence[Layout]) -> bool:
    """Whether the global strides may not follow from the shards of these calls' results. A view of shards that are thin
    in one dim keeps the strides that it was given, which are enough; but `view` computes new ones, and takes a thin
    shard of a transposed tensor for a contiguous one. What is computed follows the strides of thin arguments too."""
    if any(made.call.name == "diagonal" and any(made.layouts.ins[0].splits) for made in calls):
        return True  # a step along rows and columns at once: a sum, from which neither is inferred
    if not calls or all(made.call.is_view and not _is_view_of_thin(made) for made in calls):
        return any(layout.thinness > 1 for layout in results)
    if calls[-1].call.name in CONTIGUOUS:
        return False
    computed = [layout for made in calls if not made.call.is_view for layout in _met(made)]
    return any(layout.thinness for layout in results) or (
        any(layout.thinness for layout in computed)
        and any(sum(size > 1 for size in layout.shape) > 1 for layout in results)
    )


def _met(made: LoweredCall) -> Iterator[Layout]:
    """The layouts in which a call's arguments come, and those in which it takes them."""
    yield from made.layouts.ins
    yield from (move.source.layout for moves in made.moves for move in moves)


def _is_view_of_thin(made: LoweredCall) -> bool:
    return made.call.name == "view" and made.layouts.ins[0].thinness > 0


class WithStrides:
    """A plan whose results on thin shards have torch's global strides: by their shards' strides, or remembered."""

    __slots__ = ("contiguous", "function", "inferred", "known", "plan")

    def __init__(self, plan: Callable, function: Callable, contiguous: ResultStrides) -> None:
        """`contiguous`: what the function gives for contiguous arguments, such as those of a trace, if known."""
        self.plan, self.function, self.contiguous = plan, function, contiguous
        self.known: dict[tuple, list[_Lost]] = {}
        self.inferred: set[tuple[int, ...]] = set()  # strides of an only argument from whose result they are inferred

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        inferred = self.inferred
        if inferred and _on_shard(_stride, (), args[:1]) in inferred and "_strides" not in args[0].__dict__:  # type: ignore[call-arg]
            plan: Any = self.plan
            out: Any = _on_shard(plan.function, (), args, kwargs or {})
            if out.__class__ is Tensor:
                out.__class__ = DTensor
                out.__dict__["_layout"] = plan.layout
                return out
            return wrap_fresh(out, plan.layout)
        key = _strides_of_all((*args, *kwargs.values()) if kwargs else args)
        out = self.plan(args, kwargs)
        lost = self.known.get(key)
        if lost is None:
            lost = self._lost(args, kwargs or {}, flat_tensors(out))
            if len(self.known) < MOST:
                self.known[key] = lost
                if not lost and self.plan.__class__ is Direct and _is_only_tensor(args, kwargs):
                    self.inferred.add(key[0])
        if not lost:
            return out
        results = flat_tensors(out)
        mended = {id(results[at]): _mended(results[at], strides, restrided) for at, strides, restrided in lost}
        return map_tensors(out, lambda x: mended.get(id(x), x))

    def _lost(self, args: tuple, kwargs: dict[str, Any], results: Sequence[Tensor]) -> list[_Lost]:
        contiguous = all(globally_contiguous(x) for x in flat_tensors((args, kwargs)))
        on_one = (contiguous and self.contiguous) or unseen(_asked, self.function, args, kwargs)
        found: list[_Lost] = []
        for at, (x, (strides, is_view)) in enumerate(zip(results, on_one, strict=True)):
            if x.__class__ is not DTensor:
                continue
            restrided = not is_view and _differs(x, strides)
            if restrided or not _shown(x, strides):
                found.append((at, strides, restrided))
        return found


_Lost = tuple[int, tuple[int, ...], bool]
"""A result whose global strides cannot be inferred, what they are, and whether its shards must be strided otherwise."""


def _asked(function: Callable, args: tuple, kwargs: dict[str, Any]) -> ResultStrides:
    """Asked of the CPU's own kernels if that is cheap: those for meta tensors give some results other strides."""
    if _can_be_tried(function, args, kwargs):
        try:
            return _strides_on(torch.device("cpu"), function, args, kwargs)
        except Exception:  # zeros are bad data
            pass
    return _strides_on(torch.device("meta"), function, args, kwargs)


def _can_be_tried(function: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Not ops of users, which may do more than compute, nor what draws from a generator of theirs."""
    known = not isinstance(function, torch._ops.OpOverload) or function.namespace == "aten"
    return known and "generator" not in kwargs and affordable(flat_tensors((args, kwargs)))


def _strides_on(device: torch.device, function: Callable, args: tuple, kwargs: dict[str, Any]) -> ResultStrides:
    def whole(x: Tensor) -> Tensor:
        return on_one_device(x, device)

    args, kwargs = map_tensors(args, whole), map_tensors(kwargs, whole)
    given = {storage_of(x) for x in flat_tensors((args, kwargs))}
    with _disabled(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        results = flat_tensors(function(*args, **kwargs))
    return [(y.stride(), storage_of(y) in given) for y in results]


def _mended(x: Any, strides: tuple[int, ...], restrided: bool) -> Tensor:
    if x.__class__ is not DTensor:
        return x
    if restrided:
        with _disabled():
            shards = [_restrided(shard, strides) for shard in shards_of(x)]
        x = wrap(local_tensor(shards), x._layout)
    x.__class__, x._strides = KeepsStrides, strides
    return x


def with_strides_of(x: DTensor, grad: DTensor) -> DTensor:
    """A gradient of `x`; on thin shards with the strides of a tensor made like `x`. Those that kernels give it
    are nobody's promise, but ranks must agree on them."""
    if not grad._layout.thinness:
        return grad
    strides = _packed(x._layout.shape, global_strides(x))
    restrided = _differs(grad, strides)
    return _mended(grad, strides, restrided) if restrided or not _shown(grad, strides) else grad  # type: ignore[return-value]


def _differs(x: DTensor, strides: tuple[int, ...]) -> bool:
    return not all(_agrees(shard, strides) for shard in shards_of(x))


def _shown(x: DTensor, strides: tuple[int, ...]) -> bool:
    return all(shows(shard, x._layout.shape, strides) for shard in shards_of(x))


def _packed(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense shard of these sizes whose dims are in the order of these global strides."""
    found, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda d: (strides[d], -d)):
        found[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(found)


def _agrees(shard: Tensor, strides: Sequence[int]) -> bool:
    """Whether a shard is dense and ordered so, in the dims that it holds more than one index of."""
    with _disabled():
        sizes, own = _size(shard), shard.stride()
    packed = _packed(sizes, strides)
    return 0 in sizes or all(a == b or size == 1 for a, b, size in zip(own, packed, sizes, strict=True))


def _restrided(shard: Tensor, strides: Sequence[int]) -> Tensor:
    sizes = _size(shard)
    return torch.empty_strided(sizes, _packed(sizes, strides), dtype=shard.dtype, device=shard.device).copy_(shard)


def _is_only_tensor(args: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether a call takes one tensor, its first argument."""
    return bool(args) and args[0].__class__ is DTensor and len(flat_tensors((args, kwargs))) == 1


def _strides_of_all(args: Sequence[Any]) -> tuple:
    found = []
    for x in args:
        kind = x.__class__
        if kind is DTensor:
            found.append(_strides_of(x))
        elif kind is list or kind is tuple:
            return tuple([_strides_of(x) for x in flat_tensors(args) if isinstance(x, DTensor)])
    return tuple(found)


def _strides_of(x: Tensor) -> tuple:
    """The strides of all shards held here, and those that are remembered of the whole."""
    facts = x.__dict__
    own = _on_shard(_stride, (), (x,))  # type: ignore[call-arg]
    if "_strides" not in facts and "_peers" not in facts:
        return own
    return own, facts.get("_strides"), *(_stride(peer) for peer in facts.get("_peers", ()))
