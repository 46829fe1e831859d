"""Writes to tensors that cannot stay where they are while the call runs.

An in-place call keeps the layout of what it writes to. Where no rule does that (`relu_` of a pending sum, whose terms
are not terms of the result), the call runs on a copy in another layout, and what it wrote is brought back: reduced,
changed, and made pending again. That costs what the function out of place would, and nothing on the way back. A copy
that had to be gathered is reported like every other call that gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import ViewOf, depend, retake_hooked, storage_of, unmoved, watch_copy
from shardwise.dispatch.aliasing.views import Writes
from shardwise.dispatch.guarded import Guarded
from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.ask_torch import refused
from shardwise.dispatch.planning.fallback import report
from shardwise.dispatch.planning.trace import Trace, flat_tensors, map_tensors
from shardwise.errors import InPlaceError
from shardwise.layout import Layout
from shardwise.redistribute import Move, plan_moves
from shardwise.rules.kit.registry import refuse_shared_memory
from shardwise.rules.kit.treatments import treat, treatment_of
from shardwise.tensor import DTensor, as_layout, localise

_disabled = torch._C.DisableTorchFunctionSubclass

# Writing a value


def overwrite(target: Any, result: Any) -> None:
    """`target.copy_(result)`, for a target in any layout, but for terms of products and norms."""
    if not target._layout.has_pending:
        target.copy_(result)
        return
    with _disabled():
        dtype = target.dtype
    Guarded(_copy_shards, [Writes("copy_", [0])])((target, as_layout(result.to(dtype), target._layout, "result")), None)


def _copy_shards(args: tuple, kwargs: dict[str, Any] | None) -> None:
    target, moved = args
    some_hold_nothing, moved = target._layout.has_empty, localise(moved)
    with _disabled():
        for shard, part in zip(shards_of(target), shards_of(moved), strict=True):
            if some_hold_nothing:
                refuse_shared_memory(shard)
            shard.copy_(part)


# Calls that write to copies


def plan_inplace_via_copy(
    func: Callable, args: tuple, kwargs: dict[str, Any], refusal: InPlaceError, trace: Trace
) -> Plan:
    """The plan of a call that cannot write to its arguments as they are. Raises the refusal where nothing helps."""
    written = trace.written_arguments
    tensors = flat_tensors((args, kwargs))
    layouts = [x._layout for x in (tensors[at] for at in written) if isinstance(x, DTensor)]
    if not written or len(layouts) < len(written):
        raise refusal
    ways = [way for way in (without_pending, _replicated) if any(way(layout) is not layout for layout in layouts)]
    if not ways:
        raise refusal
    if (torchs := refused(func, args, kwargs)) is not None:  # before anything moves
        raise torchs
    return InplaceViaCopy(func, written, ways, refusal)


without_pending: Callable[[Layout], Layout] = attrgetter("without_pending")


def _replicated(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.shape)


treat(F.embedding, F.embedding_bag, unrecorded=True)  # they shorten rows of parameters


class InplaceViaCopy:
    """The call on copies of what it writes to, which are then written back."""

    __slots__ = ("func", "name", "refusal", "ways", "written")

    def __init__(
        self, func: Callable, written: Sequence[int], ways: Sequence[Callable[[Layout], Layout]], refusal: InPlaceError
    ) -> None:
        self.func, self.written, self.ways = func, frozenset(written), tuple(ways)
        self.name = getattr(func, "__name__", str(func))
        self.refusal = str(refusal)

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        written = [x for at, x in enumerate(flat_tensors((args, kwargs or {}))) if at in self.written]
        if depend(written, self.name):
            raise InPlaceError(self.refusal)
        retake_hooked(written)
        for way in self.ways:
            try:
                return self._run(way, args, kwargs or {})
            except InPlaceError:  # nothing was written
                self.ways = tuple(other for other in self.ways if other is not way)
        raise InPlaceError(self.refusal)

    def moves_of(self, tensors: Sequence[Tensor]) -> list[tuple[Move, ...]]:
        """How the copies will move, for those who watch."""
        return [
            plan_moves(x._layout, self.ways[0](x._layout)) if at in self.written and isinstance(x, DTensor) else ()
            for at, x in enumerate(tensors)
        ]

    def _run(self, way: Callable[[Layout], Layout], args: tuple, kwargs: dict[str, Any]) -> Any:
        given = flat_tensors((args, kwargs))
        if way is _replicated:
            report(self.name, (self.func, *(x._layout for x in given if isinstance(x, DTensor))), args, kwargs)
        originals: dict[int, Any] = {}
        copies: dict[int, Any] = {}
        written = {id(x) for at, x in enumerate(given) if at in self.written}

        def copy_of(x: Any) -> Tensor:
            if id(x) not in written:  # where it is read, too, what was written before is seen
                return x
            if id(x) not in copies:  # an argument may be given twice
                # of a copy, because gradients of extrema need what was there; and a copy, that every rank has its own
                copies[id(x)] = copy = as_layout(unmoved(x).clone(), way(x._layout), "self").clone()
                originals[id(copy)] = x
            return copies[id(x)]

        args, kwargs = map_tensors(args, copy_of), map_tensors(kwargs, copy_of)
        out = self.func(*args, **kwargs)
        with torch.no_grad() if treatment_of(self.func).unrecorded else nullcontext():
            for copy in copies.values():
                overwrite(originals[id(copy)], copy)
        by_storage = {storage_of(copy): originals[id(copy)] for copy in copies.values()}
        for x in flat_tensors(out):
            if id(x) not in originals and (source := by_storage.get(storage_of(x))) is not None:
                watch_copy(x, ViewOf(source))
        return map_tensors(out, lambda x: originals.get(id(x), x))
