"""The transition table: everything about moving along one mesh axis, written once.

Along an axis a value has one of four types: `R` replicated, `S` sharded, `P` a pending sum, and `V`, a replicated
value *used as varying*: it is the same on every rank, but what each rank computes from it differs, so its gradient
arrives as one term per rank. Gradients have the dual type: S of S, R of R, P of V and V of P. The backward pass of a
transition is therefore the transition between the duals, the other way round, and the table is closed under it:
the backward of the backward needs no further entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.layout import SUM, Layout, Partial

DUAL = {"R": "R", "S": "S", "V": "P", "P": "V"}

TABLE: dict[tuple[str, str], str] = {
    ("R", "V"): "nothing",
    ("R", "S"): "slice",
    ("R", "P"): "mask",
    ("V", "R"): "nothing",
    ("V", "S"): "slice",
    ("V", "P"): "mask",
    ("S", "R"): "all_gather",
    ("S", "V"): "all_gather",
    ("S", "S"): "all_to_all",
    ("S", "P"): "pad",
    ("P", "R"): "all_reduce",
    ("P", "V"): "all_reduce",
    ("P", "S"): "reduce_scatter",
}
"""(from, to) → what the ranks do. `mask` keeps the value on coordinate 0 and zero elsewhere; `pad` surrounds a shard
with zeros."""

COMMUNICATES = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class Typed:
    """A layout, and the replicated axes on which the value is used as varying."""

    layout: Layout
    varying: frozenset[int] = frozenset()

    def at(self, axis: int) -> str:
        """The type along one axis."""
        if self.layout.pending[axis] is not None:
            return "P"
        if self.layout.axis_dims[axis] is not None:
            return "S"
        return "V" if axis in self.varying else "R"

    def dual(self) -> Typed:
        """The type of a gradient of such a value."""
        types = [DUAL[self.at(axis)] for axis in range(self.layout.mesh.ndim)]
        pending = [SUM if kind == "P" else None for kind in types]
        varying = frozenset(axis for axis, kind in enumerate(types) if kind == "V")
        return Typed(self.layout.with_(pending=pending), varying)


@dataclass(frozen=True)
class Move:
    """One transition along `axes`, all of the same kind: from `source` to `target`."""

    source: Typed
    target: Typed
    axes: tuple[int, ...]

    @cached_property
    def kind(self) -> str:
        if self.is_linear and _differ_on_one_rank_only(self.source.layout, self.target.layout):
            return "nothing"
        axis = self.axes[0]
        return TABLE[self.source.at(axis), self.target.at(axis)]

    @cached_property
    def pending(self) -> Partial:
        """The reduction that the move performs or begins."""
        axis = self.axes[0]
        return self.source.layout.pending[axis] or self.target.layout.pending[axis] or SUM

    @cached_property
    def dual(self) -> Move:
        """The move that the backward pass makes with the gradient."""
        return Move(self.target.dual(), self.source.dual(), self.axes)

    @cached_property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATES

    @cached_property
    def collective(self) -> tuple[Any, ...]:
        """What moves have in common that one collective can make for all of them."""
        return self.source.layout.mesh, self.kind, self.axes, self.wire_op

    @cached_property
    def wire_op(self) -> str:
        """The reduction on the wire: averages and norms travel as sums, or as extrema."""
        if self.pending.reduce_op == "norm":
            return {math.inf: "max", -math.inf: "min"}.get(self.pending.p or 0.0, "sum")
        return "sum" if self.pending.reduce_op == "avg" else self.pending.reduce_op

    @cached_property
    def is_linear(self) -> bool:
        """Whether the move is linear in the shards as they are: everything but averages, norms, extrema, products."""
        return self.pending.reduce_op == "sum"

    @cached_property
    def keeps_value(self) -> bool:
        """Whether every rank held here keeps exactly what it has."""
        if self.kind == "mask" and self.is_linear:
            return not any(at[axis] for at in self.source.layout.mesh.held for axis in self.axes)
        return self.kind == "nothing"

    @cached_property
    def is_identity(self) -> bool:
        """Whether the ranks held here keep both their values and their gradients. A mask is a move on the rank that
        keeps its value, too: there gradients must add up in the order in which they do on the others."""
        masked = self.kind == "mask" and any(self.source.layout.mesh.shape[axis] > 1 for axis in self.axes)
        return self.is_linear and self.keeps_value and self.dual.keeps_value and not masked

    @cached_property
    def shares_memory(self) -> bool:
        """Whether the result of the move may share memory with its source, on some ranks if not on all."""
        return self.kind in ("nothing", "mask")

    def __str__(self) -> str:
        names = ",".join(self.source.layout.mesh.names[axis] for axis in self.axes)
        return f"{self.kind}({names}): {self.source.layout} → {self.target.layout}"


def _differ_on_one_rank_only(a: Layout, b: Layout) -> bool:
    """Whether two layouts differ at most along axes of one rank, where a value is whole, a part, and a sum of one."""
    return 1 in a.mesh.shape and _on_several_ranks(a) == _on_several_ranks(b)


def _on_several_ranks(layout: Layout) -> tuple:
    extents = layout.mesh.shape
    splits = tuple(tuple(axis for axis in cut if extents[axis] > 1) for cut in layout.splits)
    return splits, tuple(p for p, extent in zip(layout.pending, extents, strict=True) if extent > 1), layout.sizes
