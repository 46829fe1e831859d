"""Plans with guards: what must happen before a call, and what becomes of its result, apart from how it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta, _set_creation_meta

from shardwise.comm import shards_of
from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.local import is_leaf
from shardwise.redistribute import LookedUp
from shardwise.tensor import DTensor, settled

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_is_view = torch._C.TensorBase._is_view


class Guard:
    """One concern around a plan. A guard overrides what it needs."""

    __slots__ = ()

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Runs before the plan, and may refuse the call."""

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the call, given that of the plan."""
        return out


class Guarded:
    """A plan within its guards, of which the first is nearest to it."""

    __slots__ = ("_after", "_before", "plan")

    def __init__(self, plan: Plan, guards: Sequence[Guard]) -> None:
        self.plan = plan
        self._before = tuple(g.before for g in reversed(guards) if type(g).before is not Guard.before)
        self._after = tuple(g.after for g in guards if type(g).after is not Guard.after)

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        named = kwargs or {}
        for before in self._before:
            before(args, named)
        out = self.plan(args, kwargs)
        for after in self._after:
            out = after(out, args, named)
        return out


class Changes(Guard):
    """Writes to tensors of which some keep what was pending on them, reduced: that is another value now."""

    __slots__ = ("positions",)

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = flat_tensors((args, kwargs))
        for x in (tensors[position] for position in self.positions):
            if x.__class__ is DTensor:
                x.__dict__["_layout"] = x._layout.unreduced
        return out


class Retains(Guard):
    """Writes, in the simulator, to aliases of the arguments."""

    __slots__ = ("positions",)

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = flat_tensors((args, kwargs))
        retain_anew(tensors[position] for position in self.positions)
        return out


def retain_anew(tensors: Iterable[Tensor]) -> None:
    """A view that retains its gradient does so where its history is once it was written to; but if an alias of it was
    written to, only once it is itself asked for that."""
    with _disabled():
        for x in tensors:
            if x.retains_grad:
                for shard in (x, *x.__dict__.get("_peers", ())):
                    shard.grad_fn  # noqa: B018


class OfSource(Guard):
    """Rows that are found by an index remember of what, as long as that is no leaf, whose gradient is reduced with
    others."""

    __slots__ = ()

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        x, index = args
        if out.requires_grad and not is_leaf(x):
            with _disabled():
                sources, indices, rows = map(shards_of, (x, index, out))
                out.__dict__["_gathered"] = LookedUp(x._layout, sources, indices, rows[0])
        return out


class Settles(Guard):
    """Results that may be terms of a product or of a norm: those within a graph are reduced at once."""

    __slots__ = ()

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return map_tensors(out, lambda x: settled(x) if x.requires_grad else x)


class Unrecorded(Guard):
    """Results that are fresh, but that kernels may have made views of something: torch would refuse to record a write
    to one that was made without autograd, on the ranks where it is a view."""

    __slots__ = ()

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            for x in (out,) if isinstance(out, Tensor) else flat_tensors(out):
                if "_peers" in x.__dict__ or _on_shard(_is_view, (), (x,)):  # type: ignore[call-arg]
                    _let_record(x)
        return out


def _let_record(x: Tensor) -> None:
    with _disabled():
        for shard in shards_of(x):
            if shard._is_view() and _get_creation_meta(shard) == CreationMeta.NO_GRAD_MODE:
                _set_creation_meta(shard, CreationMeta.DEFAULT)
