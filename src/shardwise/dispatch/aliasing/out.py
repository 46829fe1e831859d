"""`out=`: the results of the call without it, written to where the user wants them, however that lies.

Torch writes over whatever is there, so a result is brought into the layout of its target, pending ones included, and a
target of another shape is resized: it keeps its placements, if the new shape has the dims that they name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import is_copied_view
from shardwise.dispatch.aliasing.inplace_via_copy import overwrite
from shardwise.dispatch.plan import Plan, has_terms, reduced_first
from shardwise.dispatch.planning.ask_torch import filled, meta
from shardwise.dispatch.planning.fallback import _user_level
from shardwise.dispatch.planning.randomness import check_in_step
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors, trace_call
from shardwise.errors import InPlaceError, PlacementError
from shardwise.layout import Layout
from shardwise.rules import flat_values
from shardwise.tensor import DTensor, distribute_tensor

_disabled = torch._C.DisableTorchFunctionSubclass

COMPUTED_AS_OUT = frozenset({"sum", "nansum", "prod", "cumsum", "cumprod", "mean", "nanmean"})
"""Functions that compute in the dtype of `out`, unless they are told another: the rest compute first and convert."""


MANY = 1 << 20
"""Elements that are not worth making only to hear an error in better words."""

MOST = 64
"""Combinations of dtypes that are remembered."""

RETURNING_NOTHING = frozenset({"split_copy", "split_with_sizes_copy", "unbind_copy"})
"""Functions that return nothing when they are given `out`."""


def plan_out(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Plan | None:
    """The plan of a call with `out=` DTensors; None for other calls, and for those that need none of their own."""
    targets = flat_tensors(kwargs.get("out"))
    if not targets or not all(isinstance(x, DTensor) for x in targets) or isinstance(func, torch._ops.OpOverload):
        return None
    name = getattr(func, "__name__", str(func))
    tensors: Any = flat_tensors((args, kwargs))
    written = {id(x) for x in targets}
    if terms := [at for at, x in enumerate(tensors) if id(x) in written and has_terms(x._layout)]:
        return reduced_first(func, terms)
    if len(targets) == len(tensors) == 1:
        return _Made(func, name)
    if len(targets) == 1 and _runs_as_it_is(name, tensors):
        return None
    _refuse_overlap(func, args, kwargs)
    _foresee(name, func, args, {key: value for key, value in kwargs.items() if key != "out"}, targets)
    return _IntoOut(func, name)


def _runs_as_it_is(name: str, tensors: Sequence[Any]) -> bool:
    """Whether a call is element-wise on tensors that all lie alike: then it runs on the shards, `out=` included."""
    layouts = {x._layout if isinstance(x, DTensor) else None for x in tensors}
    if len(layouts) > 1 or any(layout is None or layout.has_pending for layout in layouts):
        return False
    op = getattr(getattr(torch.ops.aten, name, None), "out", None)
    return op is not None and torch.Tag.pointwise in op.tags


def _foresee(name: str, func: Callable, args: tuple, given: dict[str, Any], targets: Sequence[Any]) -> None:
    """Refuse before anything runs, where that can be known: the function may write to other arguments too."""
    metas: list[Tensor] = []

    def stand_in(x: Tensor) -> Tensor:
        metas.append(meta(x))
        return metas[-1]

    try:
        with torch.no_grad():
            on_meta = map_tensors(args, stand_in), map_tensors(given, stand_in)
            results = flat_values(trace_call(func, *on_meta, metas, torch.device("cpu")).output)
    except Exception:  # no kernel for meta tensors, or bad arguments: the call itself says so
        return
    for target, result in zip(targets, results):
        _fitting(name, target, result.shape)


def _refuse_overlap(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Some functions read while they write, and refuse to write to an argument. Here results are complete before they
    are written, but a program must not learn to rely on that."""
    given, targets = flat_tensors((args, {k: x for k, x in kwargs.items() if k != "out"})), flat_tensors(kwargs["out"])
    if not {id(x) for x in targets}.intersection(map(id, given)) or sum(x.numel() for x in given) > MANY:
        return
    made = {id(x): filled(x).detach() for x in (*given, *targets)}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*map_tensors(args, lambda x: made[id(x)]), **map_tensors(kwargs, lambda x: made[id(x)]))
    except RuntimeError as error:
        if str(error).startswith("unsupported operation"):
            raise error.with_traceback(None) from None
    except Exception:  # something else, of which the call itself will tell
        return


def _fitting(name: str, target: Any, shape: tuple[int, ...]) -> Layout:
    """The layout that a target will have, of the shape of its result."""
    layout = target._layout
    if layout.shape == shape:
        return layout
    refused = f"{name} cannot write a result of shape {list(shape)} to out= that lies as {layout}"
    with _disabled():
        is_view = target._is_view()
    if is_view or is_copied_view(target):
        raise InPlaceError(
            f"{refused}: it is a view, and what it is a view of would not show what is written beyond it. Nothing was "
            f"changed; give it a tensor of that shape"
        )
    try:
        return Layout.of(layout.mesh, shape, layout.placements)
    except PlacementError as error:
        raise InPlaceError(
            f"{refused}: its placements do not fit ({error}). Nothing was changed; give it a tensor of that shape"
        ) from None


RESIZED = (
    "An output with one or more elements was resized since it had shape {}, which does not match the required output "
    "shape {}. This behavior is deprecated, and in a future PyTorch release outputs will not be resized unless they "
    "have zero elements. You can explicitly reuse an out tensor t by resizing it, inplace, to zero elements with "
    "t.resize_(0)."
)
"""What torch says when it resizes."""


def _resize(target: Any, layout: Layout) -> None:
    """Give a target the shape, and the layout, that its result will have there."""
    old = target._layout
    if old is layout:
        return
    if old.numel:
        warnings.warn(RESIZED.format(list(old.shape), list(layout.shape)), UserWarning, stacklevel=_user_level())
    with _disabled():
        for shard, shape in zip(shards_of(target), layout.held_shapes, strict=True):
            shard.resize_(shape)
    target._layout = layout


def _check_gradients(name: str, tensors: Iterable[Tensor]) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of "
            f"the arguments requires grad."
        )


class _Made:
    """A factory: what it makes of numbers alone, or draws, is the same on all ranks, and each keeps its part."""

    __slots__ = ("func", "name")

    def __init__(self, func: Callable, name: str) -> None:
        self.func, self.name = func, name

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        given = {**(kwargs or {})}
        out, requires_grad = given.pop("out"), given.pop("requires_grad", False)
        _check_gradients(self.name, [out])
        mesh = out._layout.mesh
        if self.name in DRAWING and given.get("generator") is None:
            check_in_step(mesh)
        with _disabled():
            made = torch.empty(out._layout.shape, dtype=out.dtype, device=out.device)
        self.func(*args, **given, out=made)
        layout = _fitting(self.name, out, tuple(made.shape))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has told of it already
            _resize(out, layout)
            overwrite(out, distribute_tensor(made, mesh, src_data_rank=None))
        return out.requires_grad_() if requires_grad else out


DRAWING = frozenset({"rand", "randn", "randint", "randperm", "normal"})


class _IntoOut:
    """The call without `out=`, and its results copied there. Whatever refuses does so before anything is written."""

    __slots__ = ("func", "fitting", "name")

    def __init__(self, func: Callable, name: str) -> None:
        self.func, self.name = func, name
        self.fitting: set[tuple] = set()  # dtypes that go together

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        given = dict(kwargs or {})
        out = given.pop("out")
        targets = [out] if isinstance(out, Tensor) else list(out)
        _check_gradients(self.name, (*flat_tensors((args, given)), *targets))
        _refuse_overlap(self.func, args, kwargs or {})
        if self.name in COMPUTED_AS_OUT and given.get("dtype") is None:
            with _disabled():
                given["dtype"] = targets[0].dtype
        self._check_dtypes(args, given, out)
        results = self.func(*args, **given)
        layouts = self._check(args, given, out, targets, flat_tensors(results))
        with torch.no_grad():
            for target, result, layout in zip(targets, flat_tensors(results), layouts, strict=True):
                _resize(target, layout)
                overwrite(target, result)
        if isinstance(out, Tensor):
            return out
        return None if self.name in RETURNING_NOTHING else _named(results, targets)

    def _check_dtypes(self, args: tuple, given: dict[str, Any], out: Any) -> None:
        """Before anything runs, where kernels for meta tensors tell the dtypes of the results."""
        with _disabled():
            dtypes = tuple(x.dtype for x in flat_tensors((args, given, out)))
        if dtypes in self.fitting:
            return
        try:
            with torch.no_grad():
                results = flat_tensors(self.func(*map_tensors(args, meta), **map_tensors(given, meta)))
        except Exception:  # as in `_foresee`
            results = []
        if any(x.dtype != y.dtype for x, y in zip(flat_tensors(out), results)):
            self._let_torch_look_at(args, given, out)
        if len(self.fitting) < MOST:
            self.fitting.add(dtypes)

    def _check(
        self, args: tuple, given: dict[str, Any], out: Any, targets: Sequence[Any], results: Sequence[Any]
    ) -> list[Layout]:
        """That every result can be written to its target, and how that will lie."""
        with _disabled():
            same_dtypes = all(x.dtype == y.dtype for x, y in zip(targets, results, strict=True))
        if not same_dtypes:
            self._let_torch_look_at(args, given, out)
        return [_fitting(self.name, x, y._layout.shape) for x, y in zip(targets, results, strict=True)]

    def _let_torch_look_at(self, args: tuple, given: dict[str, Any], out: Any) -> None:
        """Raises what torch raises where results of these dtypes cannot be written to `out`."""
        few = sum(x.numel() for x in flat_tensors((args, given, out))) < MANY
        make = filled if few else meta  # kernels for meta tensors have words of their own
        try:
            self.func(*map_tensors(args, make), **map_tensors(given, make), out=map_tensors(out, make))
        except NotImplementedError:  # it has no kernel for meta tensors
            return


def _named(results: Any, targets: Sequence[Tensor]) -> Any:
    """The targets as torch returns them: in a tuple, with the names of the results if they have any."""
    return getattr(torch.return_types, f"{type(results).__name__}_out", tuple)(targets)
