"""What a tensor remembers of where it came from, so that where it is used as varying, less is sent for its gradient: of
a gathered one it is reduce-scattered; of rows of a smaller tensor it is added up to that tensor's, and then reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.cause import handed_on, moved
from shardwise.layout import Layout
from shardwise.redistribute.execute import Moved, node_of_move, recorded
from shardwise.redistribute.kernels import run_move
from shardwise.redistribute.masks import placeholder
from shardwise.redistribute.move_cache import forget
from shardwise.redistribute.transitions import Move, Typed

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


class Gathered:
    """What a gathered tensor remembers of where it came from, so that its use as varying, R → V, is S → V after all:
    the gradient is reduce-scattered, not reduced everywhere and then sliced. Unless the gradient of the gathered tensor
    itself is `observed`, by a hook, or because it is kept or asked for: then it goes that way.

    It keeps the place of the shards in the graph, by tensors that take no memory, not the shards.
    """

    __slots__ = ("axes", "move", "places", "version", "way")

    def __init__(self, move: Move, shards: Sequence[Tensor], whole: Tensor) -> None:
        self.axes = move.axes
        varying = Typed(move.target.layout, move.target.varying.union(move.axes))
        self.move, self.way = Move(move.source, varying, move.axes), _Way(Move(move.target, varying, move.axes))
        self.version = whole._version
        self.places = [placeholder(x) for x in shards]
        node_of_move(whole, len(shards)).materialize_grads = False  # most often nothing comes back there

    def serves(self, move: Move, version: int) -> bool:
        return move.kind == "nothing" and move.axes == self.axes and version == self.version

    def observe(self) -> None:
        self.way.observed = True

    def as_varying(self, whole: Sequence[Tensor], move: Move) -> Sequence[Tensor]:
        with _disabled():
            out = _Regathered.apply(self.move, self.way, *self.places, *whole)
        return (out,) if isinstance(out, Tensor) else out

    def tell(self, whole: Tensor, varying: Sequence[Tensor]) -> None:
        """Those who watch, what their gradient is communicated for: for what the gather was."""
        handed_on(whole, varying, (self.move,))


class _Way:
    """Whether the gradient of a gathered tensor is observed, and the move that leads there."""

    __slots__ = ("move", "observed")

    def __init__(self, move: Move) -> None:
        self.move, self.observed = move, False


class _Regathered(Moved):
    """The shards' places and what was gathered from them → the latter, with the gradient of a gather, or of a use."""

    @staticmethod
    def forward(ctx: Any, move: Move, way: _Way, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.move, ctx.way = move, way
        whole = [x.detach() for x in tensors[len(tensors) // 2 :]]
        return whole[0] if len(whole) == 1 else tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        nothing = (None,) * len(grads)
        if not ctx.way.observed:
            return None, *Moved.backward(ctx, *grads), *nothing
        dual = ctx.way.move.dual
        forget(dual.source.layout.mesh)
        with _disabled():
            return None, None, *nothing, *(recorded(dual, grads) if _grad_enabled() else run_move(dual, grads))


class LookedUp:
    """What `x[index]` remembers of `x`, both replicated, if it is larger: used as varying, its gradient becomes that of
    `x` before it is reduced. Unless it is `observed` itself. It keeps the place of `x` in the graph."""

    __slots__ = ("indices", "layout", "move", "observed", "places", "version")

    def __init__(self, layout: Layout, shards: Sequence[Tensor], indices: Sequence[Tensor], rows: Tensor) -> None:
        self.layout, self.indices, self.version = layout, indices, rows._version
        self.places = [placeholder(x) for x in shards]
        self.observed = False

    def serves(self, move: Move, version: int) -> bool:
        return move.kind == "nothing" and version == self.version

    def observe(self) -> None:
        self.observed = True

    def as_varying(self, rows: Sequence[Tensor], move: Move) -> Sequence[Tensor]:
        source, target = (Typed(self.layout, end.varying) for end in (move.source, move.target))
        self.move = Move(source, target, move.axes)
        with _disabled():
            out = _FromSource.apply(self.move, self, move, *self.places, *rows)
        return (out,) if isinstance(out, Tensor) else out

    def tell(self, rows: Tensor, varying: Sequence[Tensor]) -> None:
        """Those who watch, what their gradient is communicated for: for this use."""
        moved((self.move,), rows, lambda: varying)


class _FromSource(Moved):
    """The places of what has rows, and the rows that were found → the rows, with the gradient of either."""

    @staticmethod
    def forward(ctx: Any, move: Move, lookup: LookedUp, of_rows: Move, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.move, ctx.lookup, ctx.of_rows = move, lookup, of_rows
        ctx.save_for_backward(*lookup.indices)
        rows = [x.detach() for x in tensors[len(tensors) // 2 :]]
        return rows[0] if len(rows) == 1 else tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        nothing = (None,) * len(grads)
        if ctx.lookup.observed:
            dual = ctx.of_rows.dual
            forget(dual.source.layout.mesh)
            with _disabled():
                whole = recorded(dual, grads) if _grad_enabled() else run_move(dual, grads)
            return None, None, None, *nothing, *whole
        with _disabled():
            shape = ctx.lookup.layout.shape
            added = [
                grad.new_zeros(shape).index_put((index,), grad, accumulate=True)
                for index, grad in zip(ctx.saved_tensors, grads, strict=True)
            ]
        return None, None, *Moved.backward(ctx, *added), *nothing
