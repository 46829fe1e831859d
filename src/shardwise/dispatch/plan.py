"""Plans: a call as it runs on the shards. Making one took thought; running one takes none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.layout import Layout
from shardwise.redistribute import Move, run_path
from shardwise.tensor import DTensor, localise, spread

Plan = Callable[[tuple, dict[str, Any] | None], Any]

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled


class Mover:
    """Brings one argument into the layout its call needs.

    The result of a differentiable move is remembered on the tensor, by a weak reference, so that several uses share
    one collective, forward and backward; what is computed from it keeps it alive (see `keep`).
    """

    __slots__ = ("moves", "only_gradient")

    def __init__(self, moves: tuple[Move, ...]) -> None:
        self.moves = moves
        self.only_gradient = all(move.kind == "nothing" for move in moves)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` is a DTensor, or a plain tensor taken as replicated; under `_disabled`."""
        if not (_grad_enabled() and x.requires_grad):
            return x if self.only_gradient else run_path(local_of(x, self.moves), self.moves)
        kept = x.__dict__.get("_moved")
        version = x._version
        if kept is not None:
            found = kept.get(self.moves)
            if found is not None and found[1] == version:
                moved = found[0]()
                if moved is not None:
                    return moved
        moved = run_path(local_of(x, self.moves), self.moves)
        if kept is None:
            kept = x._moved = {}
        kept[self.moves] = weakref.ref(moved), version
        return moved


def local_of(x: Tensor, moves: Sequence[Move]) -> Tensor:
    if x.__class__ is not DTensor:
        return spread(x, moves[0].source.layout.mesh)
    return localise(x) if "_peers" in x.__dict__ else x


def keep(out: Tensor, moved: list[Tensor]) -> None:
    """Let a result keep what was moved for it: exactly as long as the graph needs it."""
    node = out.grad_fn
    if node is not None:
        node.metadata["shardwise"] = moved


def wrap_fresh(out: Tensor, layout: Layout) -> Tensor:
    """A result of a local call as a DTensor; one that is its own argument is left as it is."""
    cls = out.__class__
    if cls is Tensor or cls is Ranked:
        out.__class__ = DTensor
        out._layout = layout
    elif out._layout is not layout:
        out = localise(out)
        out.__class__ = DTensor
        out._layout = layout
    return out


def direct(function: Callable, layout: Layout) -> Plan:
    """The function itself on the shards, one tensor out, nothing to move: the common case, and the fast one."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
        with _disabled():
            out = function(*args, **kwargs) if kwargs else function(*args)
            if out.__class__ is Tensor:
                out.__class__ = DTensor
                out._layout = layout
                return out
            return wrap_fresh(out, layout)

    return run


def moved_first(function: Callable, movers: Sequence[tuple[int, Mover]], layout: Layout) -> Plan:
    """The function on the shards after moving some positional arguments; one tensor out."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
        with _disabled():
            local = list(args)
            moved = []
            for position, mover in movers:
                x = args[position]
                if (y := mover(x)) is not x:
                    local[position] = y
                    moved.append(y)
            out = function(*local, **kwargs) if kwargs else function(*local)
            if moved and out.grad_fn is not None:
                out.grad_fn.metadata["shardwise"] = moved
            if out.__class__ is Tensor:
                out.__class__ = DTensor
                out._layout = layout
                return out
            return wrap_fresh(out, layout)

    return run


def localised(function: Callable, template: Sequence[Any], position: int, layout: Layout) -> Plan:
    """One function of one shard with constant local arguments (a view, say), nothing to move."""
    before, after = tuple(template[:position]), tuple(template[position + 1 :])

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
        with _disabled():
            out = function(*before, args[0], *after)
            if out.__class__ is Tensor:
                out.__class__ = DTensor
                out._layout = layout
                return out
            return wrap_fresh(out, layout)

    return run
