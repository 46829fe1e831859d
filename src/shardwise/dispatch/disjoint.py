"""Calls on pending sums whose terms share no rows (`redistribute.disjoint`), as products of groups of rows make them.

A few functions take the terms as they are: those that compute row by row, and nothing from zeros. So experts that are
laid out on the ranks communicate nothing between their products. Everything else takes the sum, pending as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import local_tensor, shards_of
from shardwise.dispatch.plan import Plan
from shardwise.layout import SUM, Layout
from shardwise.redistribute import DISJOINT, Disjoint, Rows, as_sum
from shardwise.rules.math.grouped import Piece, product_of_own_groups
from shardwise.tensor import DTensor, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_inference = torch.is_inference_mode_enabled  # there nobody counts writes

ROW_BY_ROW = frozenset(
    {
        *(F.silu, F.gelu, F.relu, torch.relu, Tensor.relu, F.tanh, torch.tanh, Tensor.tanh, torch.mul, Tensor.mul),
    }
)
"""Of zeros they make zeros."""
PARTS = frozenset({torch.chunk, Tensor.chunk})
"""Views."""


def may_be_disjoint(func: Callable, plan: Plan, layouts: Sequence[Layout]) -> Plan:
    """The plan of a call that may be given such sums, or make one."""
    if func is torch._grouped_mm:
        return OwnGroups(plan)
    if not any(_is_sum(layout) for layout in layouts):
        return plan
    return OfRows(plan, func) if func in ROW_BY_ROW else PartsOfRows(plan, func) if func in PARTS else plan


def _is_sum(layout: Layout) -> bool:
    """Whether nothing is known of a tensor but that it is a sum: one that was reduced before is taken as whole."""
    return SUM in layout.pending and not any(layout.splits) and not layout.reduced


class OfRows:
    """A plan of a function that computes row by row."""

    __slots__ = ("func", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func = plan, func

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        found = _found(args, kwargs)
        if found is None:
            return self.plan(args, kwargs)
        local = [_terms(x, x_found) for x, x_found in zip(args, found)]
        out = self.func(*local, *args[len(found) :], **kwargs or {})
        return _sum_of(out, args[0]._layout, found[0].rows)

    def plan_for(self, args: tuple, kwargs: dict[str, Any] | None) -> Plan:
        """The plan that a call would run, for those who ask what it moves."""
        return self.plan if _found(args, kwargs) is None else _moves_nothing


class PartsOfRows(OfRows):
    """A plan of a function that makes views of parts of all rows."""

    __slots__ = ()

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        out = self.plan(args, kwargs)
        x = args[0]
        if x.__class__ is DTensor and (found := disjoint(x)) is not None and out[0].shape[:1] == x.shape[:1]:
            for part, terms in zip(out, self.func(_terms(x, found), *args[1:], **kwargs or {}), strict=True):
                _remember(part, Disjoint(found.rows, shards_of(terms), part._layout))
        return out

    def plan_for(self, args: tuple, kwargs: dict[str, Any] | None) -> Plan:
        return self.plan


class OwnGroups:
    """A plan of a product of groups of rows. Where ranks have some groups each, its result is such a sum."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        given = _groups_of(args, kwargs)
        if given is None:
            return self.plan(args, kwargs)
        x, matrices, ends, axes, groups = given
        if (found := given.found) is not None:
            out = _product(groups, _terms(x, found), localise(matrices), localise(ends))
            return _sum_of(out, x._layout.with_(shape=(x.shape[0], matrices.shape[2])), found.rows)
        out = self.plan(args, kwargs)
        layout = out._layout
        if x._layout.has_pending:  # along an axis of the groups, where these may have been gathered
            return out
        if any(layout.splits) or tuple(axis for axis, p in enumerate(layout.pending) if p == SUM) != axes:
            return out
        rows = Rows(axes, groups, ends, shards_of(localise(ends)), x.shape[0])
        return _sum_of(localise(out), layout, rows)

    def plan_for(self, args: tuple, kwargs: dict[str, Any] | None) -> Plan:
        given = _groups_of(args, kwargs)
        return self.plan if given is None or given.found is None else _moves_nothing


def _moves_nothing(args: tuple, kwargs: dict[str, Any] | None) -> None:
    """In the place of a plan that will not be asked."""


class _Given(NamedTuple):
    """Rows, matrices and ends of a product of which each rank has some groups; along which axes, and which groups."""

    x: DTensor
    matrices: DTensor
    ends: DTensor
    axes: tuple[int, ...]
    groups: list[Piece]

    @property
    def found(self) -> Disjoint | None:
        """What `x` remembers, if it is divided as the product will be."""
        found = disjoint(self.x)
        return found if found is not None and found.rows.are_of(self.axes, self.groups, self.ends) else None


def _groups_of(args: tuple, kwargs: dict[str, Any] | None) -> _Given | None:
    given = dict(zip(("self", "mat2", "offs", "bias", "out_dtype"), args)) | (kwargs or {})
    x, matrices, ends = (given.get(name) for name in ("self", "mat2", "offs"))
    if not (isinstance(x, DTensor) and isinstance(matrices, DTensor) and isinstance(ends, DTensor)):
        return None
    if (x.ndim, matrices.ndim) != (2, 3) or given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    layout = matrices._layout
    by_group, *others = layout.splits
    if not by_group or any(others) or layout.has_pending or any(x._layout.splits) or not ends._layout.replicated:
        return None
    if _inference() or ends.is_inference():
        return None
    groups = [(start, stop - start) for start, stop in layout.held_intervals(0)]
    return _Given(x, matrices, ends, tuple(sorted(by_group)), groups)


def _product(groups: Sequence[Piece], x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    held = zip(groups, shards_of(x), shards_of(matrices), shards_of(ends), strict=True)
    with _disabled():
        return local_tensor([product_of_own_groups(*own) for own in held])


def disjoint(x: Tensor) -> Disjoint | None:
    """What a sum remembers of its terms, unless it was written to since."""
    kept = None if _inference() else x.__dict__.get("_moved")
    found = None if kept is None else kept.get(DISJOINT)
    return found[0] if found is not None and found[1] == x._version else None


def _found(args: tuple, kwargs: dict[str, Any] | None) -> list[Disjoint] | None:
    """What the tensors among the arguments remember, if all are divided alike. They come first, and nothing is written
    in place."""
    found: list[Disjoint] = []
    for x in args:
        if isinstance(x, Tensor):
            if x.__class__ is not DTensor or (own := disjoint(x)) is None or x.shape != args[0].shape:
                return None
            found.append(own)
    named = kwargs or {}
    beside = (*args[len(found) :], *named.values())
    if not found or any(value is True or isinstance(value, (Tensor, float)) for value in beside):
        return None
    return found if all(own.rows is found[0].rows for own in found) else None


def _terms(x: DTensor, found: Disjoint) -> Tensor:
    return local_tensor(list(found.terms(shards_of(localise(x)))))


def _sum_of(terms: Tensor, layout: Layout, rows: Rows) -> DTensor:
    """The sum of terms, which remembers them."""
    own = shards_of(terms)
    out = wrap(local_tensor(as_sum(rows, own)), layout)
    _remember(out, Disjoint(rows, own, layout))
    return out


def _remember(x: DTensor, found: Disjoint) -> None:
    x.__dict__.setdefault("_moved", {})[DISJOINT] = found, x._version, ()
