"""Calls that cannot run on the shards they are given: gathered, run replicated, right all the same.

They say so once, with the line of the user; strict mode refuses them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.cause import users_line, watchers
from shardwise.comm.record import note_fallback
from shardwise.dispatch.aliasing.copied_views import ViewOf, storage_of, watched_copy
from shardwise.dispatch.modes import is_strict
from shardwise.dispatch.plan import Plan, mover_for, wrap_fresh
from shardwise.dispatch.planning.ask_torch import is_number
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.dispatch.watch import gathered
from shardwise.errors import FallbackWarning, InPlaceError, NoDataError, StrictModeError
from shardwise.layout import Layout, Mesh
from shardwise.local import check_strided, single, spread
from shardwise.redistribute import plan_moves
from shardwise.rules.kit.treatments import treat, treatment_of
from shardwise.tensor import DTensor, localise
from shardwise.words import short_dtype

_disabled = torch._C.DisableTorchFunctionSubclass
_reported: set[tuple] = set()


def describe(name: str, args: tuple, kwargs: dict[str, Any]) -> str:
    """A call as its user thinks of it: `aten.add(f32[8,4] S(0)@tp, …)`."""
    parts = [shown(arg) for arg in args] + [f"{name}={shown(arg)}" for name, arg in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def shown(value: Any, *, kinds: bool = False) -> str:
    """An argument as its user thinks of it; with `kinds`, whether a tensor is a DTensor."""
    if isinstance(value, DTensor):
        with _disabled():
            dtype = short_dtype(value.dtype)
        return f"{'DTensor ' if kinds else ''}{dtype}{value._layout}"
    if isinstance(value, Tensor):
        return f"{'plain ' if kinds else ''}{short_dtype(value.dtype)}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        items = [shown(item, kinds=kinds) for item in value[:4]] + (["…"] if len(value) > 4 else [])
        return f"[{', '.join(items)}]"
    return repr(value)


def report(name: str, key: tuple, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse in strict mode; otherwise warn, once per function and placements, with the user's line."""
    if is_strict():
        raise StrictModeError(
            f"strict mode: {describe(name, args, kwargs)} cannot run on these shards and would gather them. "
            f"Redistribute them to Replicate() yourself, or leave strict mode"
        )
    note_fallback(name)
    key = tuple((part.mesh, part.placements) if isinstance(part, Layout) else part for part in key)
    if key in _reported:
        return
    _reported.add(key)
    file, line, _ = users_line()
    said = f"{describe(name, args, kwargs)} cannot run on these shards: they were gathered and it ran replicated"
    warnings.warn_explicit(said, FallbackWarning, file, line)


_FIRST = ("input", "self", "condition")
"""What torch calls the first argument, which those who run on shards call `x`."""


def keeps_shards(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Says how functions run on shards. Where they cannot, it returns NotImplemented."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        treat(*functions, program=run)
        return run

    return add


class Gathered:
    """A plan that gathers every argument and runs the function itself on plain tensors; the results are replicated."""

    __slots__ = ("function", "mesh")

    def __init__(self, function: Callable, mesh: Mesh) -> None:
        self.function = function
        self.mesh = mesh

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        kwargs = kwargs or {}
        name = getattr(self.function, "__name__", str(self.function))
        originals = [x for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor)]
        if any(not x._layout.replicated for x in originals):
            program = treatment_of(self.function).program
            if program is not None and "out" not in kwargs:
                given = {"x" if key in _FIRST else key: value for key, value in kwargs.items()}
                if (out := program(*args, **given)) is not NotImplemented:
                    return out
            if (out := with_numbers_read(self.function, args, kwargs)) is not NotImplemented:
                return out
            report(name, (self.function, *(x._layout for x in originals)), args, kwargs)
            if watchers:
                gathered(self.function, args, kwargs)
            if _writes(name):
                raise _lost_write(name, args, kwargs)

        local_args, local_kwargs = map_tensors(args, self._gather), map_tensors(kwargs, self._gather)
        alone = _writes(name) or len(self.mesh.held) == 1
        if not alone:  # all ranks would compute, and draw, the same: one does, for all
            local_args, local_kwargs = map_tensors(local_args, single), map_tensors(local_kwargs, single)
        versions = [(x, version_of(x)) for x in flat_tensors((local_args, local_kwargs))]
        out = map_tensors(self.function(*local_args, **local_kwargs), check_strided)
        for (x, version), asked in zip(versions, flat_tensors((args, kwargs)), strict=True):
            if version_of(x) != version and isinstance(asked, DTensor) and not asked._layout.replicated:
                raise _lost_write(name, args, kwargs)
        copies = [] if _writes(name) else self._copies(out, (local_args, local_kwargs), (args, kwargs))
        if not alone:
            out = map_tensors(out, lambda x: spread(x, self.mesh).clone())  # they may be written to
        with _disabled():
            out = map_tensors(out, lambda x: wrap_fresh(x, Layout(self.mesh, tuple(x.shape))))
        shown = {
            id(result): watched_copy(result, ViewOf(source, self.function, args, kwargs, at))
            for at, (result, source) in enumerate(zip(flat_tensors(out), copies))
            if source is not None
        }
        return map_tensors(out, lambda x: shown.get(id(x), x)) if shown else out

    def _copies(self, out: Any, gathered: Any, given: Any) -> list[DTensor | None]:
        """For each result the argument that it would be a view of, were that not gathered."""
        sources = {
            storage_of(x): y
            for x, y in zip(flat_tensors(gathered), flat_tensors(given), strict=True)
            if isinstance(y, DTensor) and storage_of(x) != storage_of(y)
        }
        return [sources.get(storage_of(x)) for x in flat_tensors(out)]

    def _gather(self, x: Tensor) -> Tensor:
        if x.__class__ is not DTensor:
            return x
        moves = plan_moves(x._layout, Layout(self.mesh, x._layout.shape))
        with _disabled():
            found = mover_for(moves)(x) if moves else x
        return localise(found) if found.__class__ is DTensor else found


def _lost_write(name: str, args: tuple, kwargs: dict[str, Any]) -> InPlaceError:
    return InPlaceError(
        f"{describe(name, args, kwargs)} writes to a tensor that is not replicated, and has no sharding rule. Nothing "
        f"was changed; redistribute the tensor to Replicate() first"
    )


def version_of(x: Tensor) -> int:
    """How often a tensor was written to; of those made in inference mode torch does not count it."""
    with _disabled():
        return 0 if x.is_inference() else x._version


def with_numbers_read(function: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """The call with its sizes, dims and indices read out of 0-d tensors of integers, which a trace cannot do
    (`x.view(-1, torch.tensor(4))`); NotImplemented where there are none, or where tensors are wanted."""
    kwargs = kwargs or {}
    module = getattr(function, "__module__", None) or "torch"
    if module.split(".")[0] != "torch" or isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return NotImplemented  # what users wrote, or named by its schema, is given what they gave
    first = next(iter(flat_tensors((args, kwargs))), None)
    numbers = [x for x in flat_tensors((args, kwargs)) if x is not first and is_number(x)]
    if not numbers:
        return NotImplemented

    def read(x: Tensor) -> Any:
        return x.item() if any(x is number for number in numbers) else x

    try:
        return function(*map_tensors(args, read), **map_tensors(kwargs, read))
    except TypeError:
        return NotImplemented


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


# Tensors without data, as all are on a mesh that only records: what depends on data is refused in words


def on_meta(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(x, DTensor) and x._layout.mesh.device_type == "meta" for x in tensors)


class WithoutData:
    """A plan on the meta device. Where torch has no kernel for that, the reason is that there is no data to look at."""

    __slots__ = ("func", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func = plan, func

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        try:
            return self.plan(args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NoDataError) or not speaks_of_meta(error):
                raise
            raise needs_data(self.func, args, kwargs or {}) from error


def speaks_of_meta(error: Exception) -> bool:
    """Whether torch complains about a meta tensor: its words differ from op to op."""
    return re.search(r"(\b|_)meta\b", str(error), re.IGNORECASE) is not None


def needs_data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> NoDataError:
    name = getattr(func, "__name__", str(func))
    return NoDataError(
        f"{describe(name, args, kwargs)} depends on data, and these tensors have none: they are on the meta device. "
        f"Leave it out where collectives are counted, or run the program on shardwise.simulate"
    )
