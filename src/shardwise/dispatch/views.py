"""Views that could not stay views.

What torch makes a view may here need data from other ranks: a reshape across a sharded dim, one row of a sharded dim.
Such a result is a copy, and the program may tell the difference only by writing to it or to its source. So writes are
watched: a write to a copy is carried on to its source where that is possible, and refused before it happens where not;
after a write to the source its copies are stale, and whoever uses one is told so. Nothing is watched while there are no
such copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.trace import flat_tensors, map_tensors
from shardwise.errors import InPlaceError
from shardwise.tensor import DTensor, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass

WayBack = Callable[[DTensor, DTensor], Any]


class CopiedView(DTensor):
    """A copy that torch would make a view, or a view of one."""

    _source: tuple[DTensor, WayBack | None]  # what it was taken from, and how a write gets back there
    _whole: CopiedView  # of a view of a copy: the copy


class StaleView(DTensor):
    """A copy whose source was written to after it was taken."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise stale()

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        raise stale()

    def to_local(self, **kwargs: Any) -> Any:
        raise stale()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StaleView(shape={list(self._layout.shape)})"


def stale() -> InPlaceError:
    return InPlaceError(
        "this view of a DTensor had to be a copy, because its data came from other ranks, and the tensor it was taken "
        "from has been written to since, which a view would show; take the view again"
    )


Register = dict[int, list[weakref.ref[CopiedView]]]
_copies: Register = {}  # by their own storage
_taken: Register = {}  # copies and views of them, by the storage of their source


# Plans


class Copies:
    """A plan of a view whose results at `positions` are copies."""

    __slots__ = ("function", "plan", "positions")

    def __init__(self, plan: Callable, function: Callable, positions: Sequence[int]) -> None:
        self.plan, self.function, self.positions = plan, function, positions

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        out = self.plan(args, kwargs)
        source = args[0] if args else None
        if isinstance(source, DTensor) and not (self.function in _MAY_COPY and not lies_plainly(source)):
            results = flat_tensors(out)
            way_back = _way_back(self.function, args, kwargs or {}) if len(results) == 1 else None
            for position in self.positions:
                if results[position].__class__ is DTensor:
                    _watch(results[position], source, way_back)
        return out


class OfCopies:
    """A plan of a function that is given copies: the function as it is, and views of copies are watched too."""

    __slots__ = ("function",)

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        given: dict[int, CopiedView] = {}

        def as_usual(x: Tensor) -> Tensor:
            if not isinstance(x, CopiedView):
                return x
            made = wrap(localise(x), x._layout)
            given[id(made)] = x
            return made

        args, kwargs = map_tensors(args, as_usual), map_tensors(kwargs or {}, as_usual)
        out = self.function(*args, **kwargs)
        by_storage = {_storage(x): x for x in given.values()}

        def as_before(x: Tensor) -> Tensor:
            if id(x) in given:
                return given[id(x)]
            if x.__class__ is DTensor and (copy := by_storage.get(_storage(x))) is not None:
                watch_view(x, copy)
            return x

        return map_tensors(out, as_before)


class Writes:
    """A plan that writes to the tensor arguments at `positions`, or to a list of them."""

    __slots__ = ("name", "plan", "positions")

    def __init__(self, plan: Callable, name: str, positions: Sequence[int] | None) -> None:
        self.plan, self.name, self.positions = plan, name, positions

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if not _copies:
            return self.plan(args, kwargs)
        tensors = flat_tensors((args, kwargs or {}))
        written = args[0] if self.positions is None else [tensors[position] for position in self.positions]
        _refuse_lost_writes(written, self.name)
        out = self.plan(args, kwargs)
        carry_on(written)
        return out


def lies_plainly(x: Tensor) -> bool:
    """Whether the shards lie in memory as fresh tensors do."""
    with _disabled():
        shards = (x, *x.__dict__.get("_peers", ()))
        return all(_strides(shard) == shard.stride() for shard in shards)


def _strides(shard: Tensor) -> tuple[int, ...]:
    step, found = 1, []
    for size in reversed(torch._C.TensorBase.size(shard)):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


# Watching


def _watch(copy: Any, source: DTensor, way_back: WayBack | None) -> None:
    storage = _storage(copy)
    if storage == _storage(source):
        return  # a view after all
    copy.__class__ = CopiedView
    copy._source = source, way_back  # as long as the copy lives, so does what it was taken from
    _enter(_copies, storage, copy)
    _enter(_taken, _storage(source), copy)


def watch_view(view: Any, copy: CopiedView) -> None:
    """A view of a copy keeps it, and ages with it."""
    view.__class__ = CopiedView
    view._whole = _whole(copy)
    _enter(_taken, _storage(view._whole._source[0]), view)


def _whole(copy: CopiedView) -> CopiedView:
    return copy.__dict__.get("_whole", copy)


def _enter(register: Register, storage: int, copy: CopiedView) -> None:
    def gone(reference: weakref.ref[CopiedView]) -> None:
        left = [other for other in register.pop(storage, ()) if other is not reference]
        if left:
            register[storage] = left

    register.setdefault(storage, []).append(weakref.ref(copy, gone))


def _storage(x: Tensor) -> int:
    with _disabled():
        return x.untyped_storage()._cdata


def _copy_in(x: Tensor) -> CopiedView | None:
    """The copy that a tensor is, or is a view of."""
    found = _copies.get(_storage(x))
    return None if found is None else found[0]()


def _refuse_lost_writes(written: Iterable[Tensor], name: str) -> None:
    """Before a write: refuse it if it would go to a copy from which there is no way back."""
    for x in written:
        copy = _copy_in(x)
        if copy is not None and copy._source[1] is None:
            raise InPlaceError(
                f"{name} would write to a view of a DTensor that had to be a copy, because its data came from other "
                f"ranks, and the write would be lost. Nothing was changed; write to the tensor itself, or redistribute "
                f"it first so that the view needs no data of other ranks"
            )


def carry_on(written: Iterable[Tensor]) -> None:
    """After a write: what was written to a copy goes on to its source; copies of what was written to are stale."""
    if not _copies:
        return
    for x in written:
        for reference in _taken.pop(_storage(x), ()):
            outdated = reference()
            if outdated is not None:
                outdated.__class__ = StaleView  # type: ignore[assignment]
        copy = _copy_in(x)
        if copy is not None:
            source, way_back = copy._source
            storage = _storage(source)
            kin = [view for reference in _taken.pop(storage, ()) if (view := reference()) is not None]
            way_back(source, wrap(localise(copy), copy._layout))  # type: ignore[misc]
            for view in kin:
                if _whole(view) is copy:
                    _enter(_taken, storage, view)
                else:
                    view.__class__ = StaleView  # type: ignore[assignment]


# The ways back that there are: of reshapes, and of parts that an assignment can name


_RESHAPES = frozenset(
    {
        *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.ravel, Tensor.unflatten, Tensor.view_as),
        *(Tensor.reshape_as, torch.reshape, torch.flatten, torch.ravel, torch.unflatten),
        *(Tensor.squeeze, Tensor.unsqueeze, torch.squeeze, torch.unsqueeze),
    }
)


_MAY_COPY = _RESHAPES - {Tensor.view, Tensor.view_as, Tensor.squeeze, Tensor.unsqueeze, torch.squeeze, torch.unsqueeze}
"""What torch makes a copy itself where strides do not allow a view."""


def _way_back(function: Callable, args: tuple, kwargs: dict[str, Any]) -> WayBack | None:
    if function in _RESHAPES:
        return lambda source, copy: source.copy_(copy.reshape(source.shape))
    if function is Tensor.__getitem__ and not flat_tensors(args[1:]):
        return lambda source, copy: source.__setitem__(args[1], copy)
    if function in (Tensor.select, torch.select) and len(args) == 3:
        _, dim, index = args
        return lambda source, copy: source.narrow(dim, index % source.shape[dim], 1).copy_(copy.unsqueeze(dim))
    return None
