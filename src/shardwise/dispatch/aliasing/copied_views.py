"""Copies where torch makes views, and what becomes of writes.

What torch makes a view may here need data from other ranks: a reshape across a sharded dim, one row of a sharded dim.
Such a result is a copy, and the program may tell the difference only by writing to it or to its source. So writes are
watched: a write to a copy is carried on to its source where that is possible, and refused before it happens where not;
after a write to the source its copies are stale, and are taken again when they are used next. Nothing is watched while
there are no such copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor, shards_of
from shardwise.dispatch.aliasing.global_strides import shows
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.errors import InPlaceError
from shardwise.layout import Replicate
from shardwise.local import is_leaf
from shardwise.rules.kit.treatments import treatment_of
from shardwise.tensor import DTensor, as_layout, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_taken_of: Any = torch._C.TensorBase._view_func  # type: ignore[attr-defined]


class CopiedView(DTensor):
    """A copy that torch would make a view, or a view of one."""

    _strides: tuple[int, ...]  # of the global tensor, where it is not contiguous
    _view_of: ViewOf
    _copy: CopiedView  # of a view of a copy: the copy


class KeepsStrides(CopiedView):
    """No copy, but a tensor whose shards here do not show its global strides: a part of a sharded dim within others, of
    which some ranks hold all of their piece and others none, or thin shards. Like copies, it is recognised wherever it
    is used."""


def remember_strides(x: Any, strides: tuple[int, ...]) -> None:
    """Let a tensor know its global strides where its shards do not show them, which may be on some ranks only."""
    x.__dict__.pop("_strides", None)
    if not all(shows(shard, x._layout.shape, strides) for shard in shards_of(x)):
        x.__class__ = KeepsStrides if x.__class__ is DTensor else x.__class__
        x._strides = strides


class StaleView(DTensor):
    """A copy whose source was written to after it was taken. Whoever uses it takes it again."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in flat_tensors((args, kwargs or {})):
            if isinstance(x, StaleView):
                renew(x)
        return super().__torch_function__(func, types, args, kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        renew(self)
        return self.redistribute(*args, **kwargs)

    def to_local(self, **kwargs: Any) -> Any:
        renew(self)
        return self.to_local(**kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StaleView(shape={list(self._layout.shape)})"


class ViewOf:
    """How a view was taken of its source: so it can be taken again, and what is written to it be written there. Where
    that is not known, writes are refused, and so is its use after its source was written to."""

    __slots__ = ("args", "function", "kwargs", "position", "recorded", "source")

    def __init__(
        self, source: DTensor, function: Callable | None = None, args: tuple = (), kwargs: Any = None, position: int = 0
    ) -> None:
        known = function is not None and bool(args) and args[0] is source
        self.source, self.function = source, function if known else None
        self.args, self.kwargs, self.position = args[1:], kwargs or {}, position
        self.recorded = torch.is_grad_enabled()

    def leads_back(self, copy: Tensor) -> bool:
        """Not if the view depends on the strides of its source; nor if that repeats in memory what the view shows: a
        copy need not, and what is written to one of the repeats would not be written to the others."""
        known = self.function not in (None, Tensor.as_strided, torch.as_strided)
        return known and not (_repeated(copy) and _repeated(self.source))

    def again(self) -> DTensor:
        """The view of its source as that is now."""
        with torch.set_grad_enabled(self.recorded):
            return self._of(unmoved(self.source))

    def write(self, copy: DTensor) -> None:
        """Write a copy to its source: its shape may be another, or an index may name it; else by way of a view of the
        whole, which needs no data of other ranks."""
        source: Any = of_base(self.source)
        items = self._items()
        if items is not None:
            source[items] = copy
        elif treatment_of(self.function).reshape and self._changes_no_dtype:
            source.copy_(copy.reshape(source.shape))
        else:
            whole = source.redistribute(placements=[Replicate()] * source._layout.mesh.ndim).clone()
            view = self._of(whole)
            _once(view, view).copy_(_once(copy, view))
            source.copy_(whole)

    @property
    def _changes_no_dtype(self) -> bool:
        return not any(isinstance(x, torch.dtype) for x in (*self.args, *self.kwargs.values()))

    def _items(self) -> Any:
        """The index that names the view in its source, if one does."""
        if self.function in (Tensor.select, torch.select) and len(self.args) == 2:
            dim, index = self.args
            return (slice(None),) * (dim % self.source.ndim) + (index,)
        return self.args[0] if self.function is Tensor.__getitem__ and not flat_tensors(self.args) else None

    def _of(self, source: Tensor) -> Any:
        assert self.function is not None
        return flat_tensors(self.function(source, *self.args, **self.kwargs))[self.position]


Register = dict[int, list[weakref.ref[CopiedView]]]
copies: Register = {}  # by their own storage
_taken: Register = {}  # copies and views of them, by the storage of their source


# Watching


def watched_copy(made: Any, taking: ViewOf) -> DTensor:
    """A copy that is shown as a view of what nobody else sees: so torch takes it for a view, as on one device, and
    views of it for others of the same base, which have no part in its history once they are written to."""
    with _disabled():
        shards = [shard.view_as(shard) for shard in shards_of(made)]
    shown = wrap(local_tensor(shards), made._layout)
    watch_copy(shown, taking)
    return shown


def watch_copy(copy: Any, taking: ViewOf) -> None:
    """A copy keeps what it was taken from, which lives at least as long, and how."""
    copy.__class__ = CopiedView
    copy._view_of = taking
    _enter(copies, storage_of(copy), copy)
    _enter(_taken, storage_of(taking.source), copy)


def watch_view(view: Any, copy: CopiedView) -> None:
    """A view of a copy keeps it, and ages with it. It has the strides of the copy, unless it is given others."""
    if "_strides" in copy.__dict__:
        view._strides = copy._strides
    if isinstance(copy, KeepsStrides):
        view.__class__ = KeepsStrides
        return
    view.__class__ = CopiedView
    view._copy = _viewed_copy(copy)
    _enter(_taken, _source_storage(view), view)


def outdate_with(copy: CopiedView, given: dict[int, CopiedView]) -> None:
    """A copy of a copy is as old as that."""
    earlier = given.get(id(copy._view_of.source))
    if earlier.__class__ is CopiedView:
        copy._view_of.source = earlier
        _enter(_taken, _source_storage(earlier), copy)


def _viewed_copy(copy: CopiedView) -> CopiedView:
    return copy.__dict__.get("_copy", copy)


def _enter(register: Register, storage: int, copy: CopiedView) -> None:
    def gone(reference: weakref.ref[CopiedView]) -> None:
        left = [other for other in register.pop(storage, ()) if other is not reference]
        if left:
            register[storage] = left

    register.setdefault(storage, []).append(weakref.ref(copy, gone))


def storage_of(x: Tensor) -> int:
    with _disabled():
        return x.untyped_storage()._cdata


def _source_storage(copy: CopiedView) -> int:
    return storage_of(_viewed_copy(copy)._view_of.source)


def _copy_in(x: Tensor) -> CopiedView | None:
    """The copy that a tensor is, or is a view of."""
    found = copies.get(storage_of(x))
    return None if found is None else found[0]()


def depend(written: Sequence[Tensor], name: str) -> bool:
    """Whether a write to one of several tensors is one to another, too. Refuses those to copies without a way back."""
    first: dict[int, Tensor] = {}
    return any(first.setdefault(root, x) is not x for root, x in zip(roots_of(written, name), written, strict=True))


def roots_of(written: Sequence[Tensor], name: str) -> list[int]:
    """The storages that writes to some tensors get to in the end."""
    return [storage_of(_root(x, name)) for x in written]


def is_view(x: Tensor) -> bool:
    """Whether torch would take a tensor for a view of another."""
    with _disabled():
        return isinstance(x, CopiedView) or x._is_view()


def _root(x: Tensor, name: str) -> Tensor:
    """Where a write to a tensor gets in the end: there it must be possible."""
    root, copy, recorded = x, _copy_in(x), True
    while copy is not None:
        if not copy._view_of.leads_back(copy):
            raise InPlaceError(
                f"{name} would write to a view of a DTensor that had to be a copy, because its data came from other "
                f"ranks, and the write would be lost. Nothing was changed; write to the tensor itself, or redistribute "
                f"it first so that the view needs no data of other ranks"
            )
        recorded = recorded and _is_recorded(root, copy)
        root = copy._view_of.source
        if recorded and is_leaf(root) and root.requires_grad:
            raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
        copy = _copy_in(root)
    return root


def _is_recorded(x: Tensor, copy: CopiedView) -> bool:
    """Whether a write to a copy, or to a view of it, is part of its history: not one to what was detached from it."""
    with _disabled():
        same = (x if x._base is None else x._base) is (copy if copy._base is None else copy._base)
        return same and torch.is_grad_enabled() and x.requires_grad


def retake_hooked(written: Iterable[Tensor]) -> None:
    """Before a write that is part of the graph: to torch a view that is written to is what its base becomes, and what
    was computed from it before, and hooks on it, are another matter. So a copy with hooks is taken anew, of what its
    source is a view of."""
    for x in written:
        copy = _copy_in(x)
        if copy is not None and _is_recorded(x, copy):
            _pass_by_hooks(copy)


def _pass_by_hooks(copy: CopiedView | None) -> bool:
    """Take a copy anew if there are hooks on it or on what it was taken from. Whether there were."""
    if copy is None or copy._view_of.function is None:
        return False
    source = copy._view_of.source
    found = _pass_by_hooks(_copy_in(source)) or _is_watched(copy) or _is_watched(source)
    if found:
        _take_again(copy)
    return found


def _is_watched(x: DTensor) -> bool:
    """Whether somebody sees the gradient of a tensor. Torch makes a view that was written to part of a new history,
    and whoever watches it with it, at the next look."""
    with _disabled():
        return bool(x._backward_hooks or x.retains_grad)


def of_base(x: DTensor) -> DTensor:
    """What a view shows, past hooks on it: where a view is written to, torch reads its base."""
    with _disabled():
        if not (torch.is_grad_enabled() and x.requires_grad and x._is_view()):
            return x
        # as torch took the view, which strides alone do not say: it may be of another dtype, or conjugated
        shards = [shard if shard._base is None else _taken_of(shard, shard._base) for shard in shards_of(x)]
    return wrap(local_tensor(shards), x._layout)


def unmoved(x: DTensor) -> DTensor:
    """What a view shows, past hooks on it, without what it was moved to before. Kernels make views on some ranks only,
    and the others must not communicate less."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    return wrap(localise(of_base(x)), x._layout.unreduced) if recorded else x


def carry_on(written: Iterable[Tensor]) -> None:
    """After a write: what was written to a copy goes on to its source; copies of what was written to are stale."""
    if not copies:
        return
    for x in written:
        for reference in _taken.pop(storage_of(x), ()):
            _outdate(reference())
        copy = _copy_in(x)
        if copy is not None:
            source = copy._view_of.source
            storage = storage_of(source)
            source.__dict__["_layout"] = source._layout.unreduced  # what it came to; views to write to are not of that
            views = [view for reference in _taken.pop(storage, ()) if (view := reference()) is not None]
            recorded = _is_recorded(x, copy)
            with nullcontext() if recorded else torch.no_grad():
                copy._view_of.write(wrap(localise(copy), copy._layout))
            for view in views:
                is_shown = _viewed_copy(view) is copy or (
                    view.__class__ is CopiedView and _source_storage(view) == storage_of(copy)
                )
                if is_shown and not recorded and not _is_watched(view):
                    _enter(_taken, storage, view)
                else:
                    _outdate(view)
            if recorded:
                copy._shown = source._version
                with _disabled():
                    observed = copy.retains_grad
                if observed:
                    renew(copy)


def _outdate(copy: CopiedView | None) -> None:
    """A copy is stale, and so is all that was taken from it."""
    if copy is not None:
        copy.__class__ = StaleView  # type: ignore[assignment]
        for reference in _taken.pop(storage_of(copy), ()):
            _outdate(reference())


def renew(x: Any) -> None:
    """A stale copy, or a view of one, shows what its source does now."""
    copy: Any = _viewed_copy(x)
    if copy.__class__ is StaleView:
        _take_again(copy)
    if x is not copy:
        x.__class__ = CopiedView
        _enter(_taken, _source_storage(x), x)


def _once(x: Tensor, target: Tensor) -> Tensor:
    """What is to be written to a target, without the repeats of one that is expanded: those cannot be written to."""
    for dim in _repeated(target):
        x = x.narrow(dim, 0, 1)
    return x


def _repeated(x: Tensor) -> list[int]:
    """The dims along which a tensor is expanded."""
    return [dim for dim, (step, size) in enumerate(zip(x.stride(), x.shape)) if step == 0 and size > 1]


def _take_again(copy: Any) -> None:
    if copy._view_of.function is None:
        raise InPlaceError(
            "this view of a DTensor had to be a copy, because its data came from other ranks, and the tensor it was "
            "taken from has been written to since, which a view would show; take the view again"
        )
    source, fresh = copy._view_of.source, copy._view_of.again()
    with torch.set_grad_enabled(fresh.requires_grad):  # the source may have had what it was reduced to
        fresh = as_layout(fresh, copy._layout, "a view")
    copy.__class__ = CopiedView
    unchanged = copy.__dict__.pop("_shown", None) == source._version
    with _disabled(), torch.set_grad_enabled(fresh.requires_grad):  # in torch, too, it has the new history of its base
        for mine, taken in zip(shards_of(copy), shards_of(fresh), strict=True):
            with torch.autograd._unsafe_preserve_version_counter(mine) if unchanged else nullcontext():
                _once(mine, mine).copy_(_once(taken, mine))
    _enter(_taken, storage_of(source), copy)
