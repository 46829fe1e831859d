"""Plans of views that may have to be copies, and of writes, which may go to such copies (`copied_views`).

Whether torch makes a view or a copy may depend on the global strides (`reshape`, `contiguous`). These are inferred from
the shards (`global_strides`), except where a part was cut out of a sharded dim within others, which `KeepsStrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import (
    CopiedView,
    KeepsStrides,
    ViewOf,
    carry_on,
    copies,
    outdate_with,
    remember_strides,
    retake_hooked,
    roots_of,
    storage_of,
    watch_view,
    watched_copy,
)
from shardwise.dispatch.aliasing.global_strides import copied, on_one_device, shards_contiguous
from shardwise.dispatch.guarded import Guard, retain_anew
from shardwise.dispatch.modes import unseen
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.layout import Layout, Mesh
from shardwise.local import spread
from shardwise.redistribute import forget, windows
from shardwise.rules.kit.treatments import treat, treatment_of
from shardwise.tensor import DTensor, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_stride = torch._C.TensorBase.stride
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


class GivesCopiedViews(Guard):
    """Views of which the results at `positions` are copies, or parts of a sharded dim."""

    __slots__ = ("function", "known", "positions")

    def __init__(self, function: Callable, positions: Sequence[int]) -> None:
        self.function, self.positions = function, positions
        self.known: dict[tuple, list[Strides]] = {}

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._strides(args, kwargs)  # asked first, for what torch refuses

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        source, all_strides = _first(args, kwargs), self._strides(args, kwargs)
        results = [out] if isinstance(out, Tensor) else flat_tensors(out)
        if all_strides[self.positions[0]] is None:  # torch copies too
            own: Any = copied  # what was moved is not the result's to write to
            return map_tensors(out, own) if "_moved" in source.__dict__ else out
        are_views = _share_memory(results[self.positions[0]], source)
        shown: dict[int, DTensor] = {}
        for at in self.positions:
            result, strides = results[at], all_strides[at]
            assert strides is not None
            if not are_views and result.__class__ is not DTensor:
                continue
            if not are_views:
                taking = ViewOf(source, self.function, args, kwargs, at)
                result = shown[id(results[at])] = watched_copy(result, taking)
            remember_strides(result, strides)
        return map_tensors(out, lambda x: shown.get(id(x), x)) if shown else out

    def _strides(self, args: tuple, kwargs: dict[str, Any]) -> list[Strides]:
        """Those of the results that are views on one device."""
        key = _strides_known(_first(args, kwargs))
        strides = self.known.get(key)
        if strides is None:
            strides = strides_of_views(self.function, args, kwargs)
            if len(self.known) < MOST:
                self.known[key] = strides
        return strides


def _first(args: tuple, kwargs: dict[str, Any]) -> DTensor:
    return next(x for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor))


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors do, on all ranks: where some only had a copy, others would write alone."""
    found = [storage_of(a) == storage_of(b) for a, b in zip(shards_of(x), shards_of(y))]
    assert len(set(found)) == 1, "a view on some ranks that is a copy on others"
    return found[0]


class OnCopiedViews:
    """A plan of a function that is given copies: the function as it is, and views of copies are watched too."""

    __slots__ = ("function",)

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        followed = {id(x): x for x in flat_tensors((args, kwargs)) if isinstance(x, CopiedView)}
        usual = {at: x if isinstance(x, KeepsStrides) else _alias(x) for at, x in followed.items()}
        given = {id(usual[at]): x for at, x in followed.items()}
        args, kwargs = map_tensors((args, kwargs or {}), lambda x: usual.get(id(x), x))
        parts = [x for x in followed.values() if isinstance(x, KeepsStrides)]
        for x in parts:  # to the function they are what they are on ranks that show their strides: uses share moves
            x.__class__ = DTensor  # type: ignore[assignment]
        try:
            return self._run(args, kwargs, given)
        finally:
            for x in parts:
                if x.__class__ is DTensor:
                    x.__class__ = KeepsStrides

    def _run(self, args: tuple, kwargs: dict[str, Any], given: dict[int, CopiedView]) -> Any:
        if (
            _depends_on_strides(self.function)
            and "_strides" in args[0].__dict__
            and not is_view(self.function, args, kwargs)
        ):
            return _apart(self.function(*args, **kwargs), args[0])
        out = self.function(*args, **kwargs)
        retain_anew(given.values())
        by_storage = {storage_of(x): x for x in given.values()}
        results = flat_tensors(out)
        hidden: list[int] = []  # views of what has to remember its global strides
        for at, x in enumerate(results):
            if x.__class__ is CopiedView:
                outdate_with(x, given)
            copy = (
                by_storage.get(storage_of(x)) if x.__class__ in (DTensor, KeepsStrides) and id(x) not in given else None
            )
            if copy.__class__ is CopiedView:
                watch_view(x, copy)
            if copy is not None and "_strides" in copy.__dict__ and x.__class__ is not KeepsStrides:
                hidden.append(at)
        all_strides = strides_of_views(self.function, args, kwargs) if hidden else []
        for at in hidden:
            strides = all_strides[at]
            assert strides is not None, "a copy that shares memory"
            remember_strides(results[at], strides)
        return map_tensors(out, lambda x: given.get(id(x), x))


def _alias(x: CopiedView) -> DTensor:
    """A copy as the usual tensor that it is to functions."""
    made = wrap(localise(x), x._layout)
    if "_strides" in x.__dict__:
        made._strides = x._strides
    return made


class ViewOrCopy:
    """A plan of a reshape of shards so thin that they may allow a view where the global tensor does not: one row on
    every rank is contiguous, however far apart the rows are. What torch copies for its strides is copied here too."""

    __slots__ = ("function", "known", "layout", "plan", "sizes")

    def __init__(self, plan: Callable, function: Callable, layout: Layout | None) -> None:
        """`layout` is the result's if one view of the one shard held here is all there is to do."""
        self.plan, self.function, self.layout = plan, function, layout
        self.sizes = layout.held_shapes[0] if layout is not None else ()
        self.known: dict[Any, bool] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        x = args[0]
        strides: tuple = _on_shard(_stride, (), (x,)) if "_strides" not in x.__dict__ else _strides_known(x)  # type: ignore[call-arg]
        view = self.known.get(strides)
        if view is None:
            view = is_view(self.function, args, kwargs or {})
            if len(self.known) < MOST:
                self.known[strides] = view
        if view:
            return self.plan(args, kwargs)
        if self.layout is None:
            return copied(self.plan(args, kwargs))
        out: Any = _on_shard(torch.view_copy, (), (x, self.sizes))  # type: ignore[call-arg]
        out.__class__ = DTensor
        out.__dict__["_layout"] = self.layout
        return out


def _apart(out: DTensor, x: DTensor) -> DTensor:
    """A result in memory of its own. The result is copied, not `x` before it: uses of `x` share moves, or no rank would
    know whether others communicate."""
    shared = any(storage_of(a) == storage_of(b) for a, b in zip(shards_of(out), shards_of(x)))
    return copied(out) if shared else out


class Writes(Guard):
    """Writes to the tensor arguments at `positions`, or to a list of them."""

    __slots__ = ("name", "positions")

    def __init__(self, name: str, positions: Sequence[int] | None) -> None:
        self.name, self.positions = name, positions

    def before(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if windows and not _is_recorded(args, kwargs):
            for mesh in {x._layout.mesh for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor)}:
                forget(mesh)
        if copies:
            written = self._written(args, kwargs)
            roots_of(written, self.name)  # refuses writes that would be lost
            retake_hooked(written)

    def after(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if copies:
            carry_on(self._written(args, kwargs))
        return out

    def _written(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[Tensor]:
        if self.positions is None:
            return args[0]
        tensors = flat_tensors((args, kwargs))
        return [tensors[position] for position in self.positions]


class WritesToPlain:
    """A plan of the simulator's that writes to plain tensors at `positions`. They are taken as replicated, and there is
    only one of each for all ranks: so ranks write to replicas, and what they agree on is written to the tensor, which
    then has the history of all of them."""

    __slots__ = ("function", "mesh", "plan", "positions")

    def __init__(self, plan: Callable, function: Callable, positions: Sequence[int], mesh: Mesh) -> None:
        self.plan, self.function, self.positions, self.mesh = plan, function, positions, mesh

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if not torch.is_grad_enabled():
            return self.plan(args, kwargs)
        tensors = flat_tensors((args, kwargs or {}))
        plain = [x for x in (tensors[position] for position in self.positions) if not isinstance(x, DTensor)]
        replicas = {id(x): self._replica(x) for x in plain}

        def swapped(x: Tensor) -> Tensor:
            return replicas.get(id(x), x)

        out = self.function(*map_tensors(args, swapped), **map_tensors(kwargs or {}, swapped))
        for x in plain:
            x.copy_(replicas[id(x)].full_tensor())
        return next((x for x in plain if out is replicas[id(x)]), out)

    def _replica(self, x: Tensor) -> DTensor:
        return wrap(spread(x, self.mesh).clone(), Layout(self.mesh, tuple(x.shape)))


def _is_recorded(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether autograd takes note of a write. It does not hear of writes to `x.data`, and then whoever remembers what
    was moved of `x` does not either."""
    x = args[0] if args else None
    if x.__class__ is list and x:
        x = x[0]
    return x.__class__ is DTensor and "out" not in kwargs and _on_shard(_requires_grad, (), (x,))  # type: ignore[call-arg]


# Views and copies on one device


Strides = tuple[int, ...] | None
"""Those of a view on one device; of a copy, none."""


def strides_of_views(function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Strides]:
    """The strides of the results on one device, as far as they are views there."""
    return unseen(_strides_on_one_device, function, args, kwargs)


def _strides_on_one_device(function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Strides]:
    whole_args = (*map_tensors(args[:1], on_one_device), *map_tensors(args[1:], _index_or_whole))
    whole_kwargs = map_tensors(kwargs, _index_or_whole)
    given = {storage_of(x) for x in flat_tensors((whole_args, whole_kwargs))}
    with torch.no_grad():
        results = flat_tensors(function(*whole_args, **whole_kwargs))
    return [y.stride() if storage_of(y) in given else None for y in results]


def _index_or_whole(x: Tensor) -> Any:
    """An argument on one device. A number that torch reads out to take an index by may be any: strides are the same."""
    is_number = not x.dim() and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    return 0 if is_number else on_one_device(x)


def is_view(function: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether torch makes a view of this tensor by this function."""
    if not _depends_on_strides(function) or shards_contiguous(args[0]):
        return True
    return None not in strides_of_views(function, args, kwargs)


MOST = 4096


def _strides_known(x: DTensor) -> tuple:
    """The strides of a shard, and the global ones where they are remembered."""
    return _on_shard(_stride, (), (x,)), x.__dict__.get("_strides")  # type: ignore[call-arg]


# Reshapes


treat(Tensor.squeeze, Tensor.unsqueeze, torch.squeeze, torch.unsqueeze, reshape="view")
treat(Tensor.view, Tensor.view_as, reshape="view or error")
treat(
    *(Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.reshape_as),
    *(torch.reshape, torch.flatten, torch.unflatten),
    reshape="view or copy",
)


def _depends_on_strides(function: Callable) -> bool:
    """Whether torch makes a copy, or refuses, where strides do not allow a view."""
    return treatment_of(function).reshape not in (None, "view")


def only_views(lowered: Any) -> None:
    """Let the shards refuse what torch refuses: where a shard stays, its strides allow what those of the whole do.
    (Where it is so thin that they allow more, `ViewOrCopy` looks at the whole.)"""
    for call in lowered.calls:
        if call.local is not None and call.local.function is Tensor.reshape and not call.moves[0]:
            call.local = replace(call.local, function=Tensor.view)
