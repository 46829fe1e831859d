"""Pending sums whose terms share no rows: each rank's term has the rows of its groups, and zeros elsewhere.

To whoever does not ask such a sum is like any other. But what is computed row by row, and makes nothing of zeros, can
be computed of the terms themselves, and nothing need be reduced before. So the sum remembers the terms as they were
before they became one. The gradient of a sum is whole on every rank; that of terms has each rank's rows, and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.redistribute.backward.ownership import bare_function
from shardwise.redistribute.execute import Moved, recorded
from shardwise.redistribute.kernels import run_move
from shardwise.redistribute.transitions import Move, Typed

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled

DISJOINT = "disjoint"
"""Under which a sum keeps what it remembers, among what it was moved to."""

Piece = tuple[int, int]
"""Start and size."""


class Rows:
    """Which rows are whose: those of the groups that a rank has, of which `ends` says where they end. Sums are divided
    alike if they have one of these in common."""

    __slots__ = ("axes", "ends", "groups", "masks", "version")

    def __init__(
        self, axes: tuple[int, ...], groups: Sequence[Piece], ends: Tensor, shards: Sequence[Tensor], num_rows: int
    ) -> None:
        """`shards` are what the ranks held here have of `ends`: the same."""
        self.axes, self.groups, self.ends, self.version = axes, tuple(groups), ends, ends._version
        places = [torch.arange(num_rows, device=own.device)[:, None] for own in shards]
        self.masks = tuple(map(_own_rows, groups, shards, places))

    def are_of(self, axes: tuple[int, ...], groups: Sequence[Piece], ends: Tensor) -> bool:
        same = self.axes == axes and self.groups == tuple(groups)
        return same and self.ends is ends and self.version == ends._version


def _own_rows(groups: Piece, ends: Tensor, places: Tensor) -> Tensor:
    first, count = groups
    if not count:
        return torch.zeros_like(places, dtype=torch.bool)
    own = places < ends[first + count - 1]
    return own & (places >= ends[first - 1]) if first else own


class Disjoint:
    """What such a sum remembers: its terms, and whose rows they are. Uses of the terms pass their gradient to them;
    where that of the sum is `observed`, by a hook, or because it is kept or asked for, it is reduced and goes there."""

    __slots__ = ("_terms", "_way", "rows")

    def __init__(self, rows: Rows, terms: Sequence[Tensor], layout: Layout) -> None:
        self.rows, self._terms = rows, tuple(terms)
        whole = Typed(layout.without_pending, frozenset(rows.axes))
        self._way = _Way(Move(Typed(layout), whole, rows.axes))

    def observe(self) -> None:
        self._way.observed = True

    def terms(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """The terms for one use. `sums` are the shards of the sum."""
        with _disabled():
            if not (_grad_enabled() and any(x.requires_grad for x in self._terms)):
                return self._terms
            out = _Used.apply(self._way, *self._terms, *sums)
        return (out,) if isinstance(out, Tensor) else out


def as_sum(rows: Rows, terms: Sequence[Tensor]) -> list[Tensor]:
    """Terms → the shards of their sum, in the same memory."""
    with _disabled():
        return [_summed(x, mask) for x, mask in zip(terms, rows.masks, strict=True)]


def _masked(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
    ctx.mask = mask
    ctx.set_materialize_grads(False)
    return x.detach()


def _own_rows_of_gradient(ctx: Any, grad: Tensor | None) -> Any:
    if grad is None:
        return None, None
    with _disabled():
        return torch.where(ctx.mask, grad, 0), None


_summed = bare_function(_masked, _own_rows_of_gradient, "Summed")


class _Way:
    """Whether the gradient of a sum is observed, and the move that makes it of rows."""

    __slots__ = ("move", "observed")

    def __init__(self, move: Move) -> None:
        self.move, self.observed = move, False


class _Used(Moved):
    """Terms, and the shards of their sum → the terms, for one use."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.way = way
        terms = [x.detach() for x in tensors[: len(tensors) // 2]]
        return terms[0] if len(terms) == 1 else tuple(terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        nothing = (None,) * len(grads)
        if not ctx.way.observed:
            return None, *grads, *nothing
        with _disabled():
            whole = recorded(ctx.way.move, grads) if _grad_enabled() else run_move(ctx.way.move, grads)
        return None, *nothing, *whole
