"""Plans: a call as it runs on the shards. Making one took thought; running one takes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import noters, ranked, shards_of
from shardwise.comm.cause import is_moving, listeners
from shardwise.comm.cause import moved as observed
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.layout import Layout, Mesh
from shardwise.local import is_leaf, spread
from shardwise.redistribute import (
    Gathered,
    LookedUp,
    Move,
    differentiable,
    forget,
    plan_moves,
    recall,
    remember,
    run_path,
    transition,
)
from shardwise.tensor import DTensor, localise, without_terms

Plan = Callable[[tuple, dict[str, Any] | None], Any]

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_grad_enabled = torch._C.is_grad_enabled
_listener = torch._C._autograd._top_saved_tensors_default_hooks


class Mover:
    """Brings one argument into the layout its call needs.

    The result of a differentiable move is remembered, so that several uses of a tensor share one collective, forward
    and backward (see `redistribute.move_cache`).
    """

    __slots__ = ("direct", "is_linear", "key", "mesh", "moves", "only", "only_gradient", "reduces")

    def __init__(self, moves: tuple[Move, ...]) -> None:
        self.moves = moves
        self.mesh = moves[0].source.layout.mesh
        self.key = id(moves)  # the planner gives equal paths as one object
        self.only_gradient = all(move.keeps_value for move in moves)
        self.is_linear = all(move.is_linear for move in moves)
        self.reduces = len(moves) == 1 and moves[0].kind == "all_reduce" and not moves[0].target.layout.has_pending
        in_cpp = runs_in_cpp(self.mesh)
        self.direct = DTensor if in_cpp else None  # the class of what goes to kernels as it is
        self.only = differentiable(moves[0]) if in_cpp and len(moves) == 1 and moves[0].is_linear else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` in the new layout. It is a DTensor, or a plain tensor taken as replicated; under `_disabled`."""
        facts = x.__dict__
        if not _grad_enabled():
            forget(self.mesh)
            if not self.reduces or x.requires_grad:  # what is not recorded is not for uses that are
                return x if self.only_gradient else self._moved(x, facts)
        elif not x.requires_grad and not self.reduces:
            return x if self.only_gradient else self._moved(x, facts)
        kept = facts.get("_moved")
        try:
            version = x._version
        except RuntimeError:  # inference tensors have none
            return x if self.only_gradient else self._moved(x, facts)
        if kept is None:
            kept = facts["_moved"] = {}
        elif (found := kept.get(self.key)) is not None and found[1] == version:
            moved = found[0]
            if moved.__class__ is int:
                moved = recall(moved, self.mesh)
            if moved is not None:
                return moved
        if "_gathered" in facts and facts["_gathered"].serves(self.moves[0], version):
            moved = self._regathered(x, facts["_gathered"])
        elif self.only is not None and x.__class__ is DTensor and "_peers" not in facts and not listeners:
            moved = self.only(x)
        else:
            moved = self._moved(x, facts)
        # A leaf would never be freed (copy, graph, leaf); what saves something is of no use after a backward pass.
        brief = x.requires_grad and (not self.is_linear or is_leaf(x))
        kept[self.key] = remember(moved, self.mesh) if brief else moved, version, self.moves
        if self.reduces and x.__class__ is DTensor and not brief:
            facts["_layout"] = facts["_layout"].once_reduced
        return moved

    def bound(self) -> Callable[[Tensor], Tensor]:
        """What runs, looked up once: a call of an object that is not a function takes a detour."""
        return self.__call__

    def _regathered(self, x: Tensor, gathered: Gathered | LookedUp) -> Tensor:
        local = localise(x)  # type: ignore[arg-type]
        shards = gathered.as_varying((local, *local.__dict__.get("_peers", ())), self.moves[0])
        for move in self.moves[1:]:
            shards = transition(move, shards)
        if listeners:
            gathered.tell(x, shards)
        return shards[0] if len(shards) == 1 else ranked(shards)

    def _moved(self, x: Tensor, facts: dict[str, Any]) -> Tensor:
        if listeners and not is_moving(self.moves):
            return observed(self.moves, x, partial(self._moved, x, facts))
        if x.__class__ is self.direct and "_peers" not in facts:
            shards: Sequence[Tensor] = (x,)
            for move in self.moves:
                shards = transition(move, shards)
            return shards[0]
        return run_path(local_of(x, self.moves), self.moves)


class NonlinearMover(Mover):
    """Moves that save something for their gradient. A checkpoint that begins in between must save it too, as it will
    when it recomputes: what was moved outside is of no use inside."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._moved(x, x.__dict__) if _listener(True) is not None else super().__call__(x)


class LocalMover(Mover):
    """Moves that communicate nothing, forward or backward (a bias that counts once): made anew for every use, which
    costs less than to share them."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._moved(x, x.__dict__) if self.only is None else self.only(x)

    def bound(self) -> Callable[[Tensor], Tensor]:
        return self.only or self.__call__


def local_of(x: Tensor, moves: Sequence[Move]) -> Tensor:
    if x.__class__ is not DTensor:
        return spread(x, moves[0].source.layout.mesh)
    return localise(x) if "_peers" in x.__dict__ or not runs_in_cpp(x._layout.mesh) else x


def runs_in_cpp(mesh: Mesh) -> bool:
    """Whether local calls can take DTensors as they are: not in the simulator, and not on meta shards, whose kernels
    are partly Python and would see the global shape."""
    return len(mesh.held) == 1 and mesh.device_type != "meta"


def mover_of(moves: tuple[Move, ...]) -> Mover | None:
    """How to make some moves; None where there is nothing to do for the ranks held here, gradient included."""
    return None if all(move.is_identity for move in moves) else mover_for(moves)


def mover_for(moves: tuple[Move, ...]) -> Mover:
    if not all(move.is_linear for move in moves):
        return NonlinearMover(moves)
    local = not any(move.communicates or move.dual.communicates for move in moves)
    return LocalMover(moves) if local else Mover(moves)


def wrap_fresh(out: Any, layout: Layout) -> DTensor:
    """A result of a local call as a DTensor; one that is its own argument is left as it is.

    Here and wherever speed matters the layout is put into the dict itself: CPython 3.11 reads attributes three times as
    fast from a dict that was filled like that as from one that belongs to a changed class.
    """
    if "_layout" not in out.__dict__:
        out.__class__ = DTensor
        out.__dict__["_layout"] = layout
    elif out._layout is not layout:
        if out._layout.unreduced is not layout:
            out = localise(out)
            out.__class__ = DTensor
        out.__dict__["_layout"] = layout
    return out


class Direct:
    """A function on the shards, one tensor out: so common that `dispatch` runs it inline. Most often it is the function
    that was called, and nothing moves; `labels` say what does (`dispatch.watch`)."""

    __slots__ = ("function", "labels", "layout")

    def __init__(self, function: Callable, layout: Layout) -> None:
        self.function = function
        self.layout = layout
        self.labels: tuple[Any, ...] = ()

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
        with _disabled():
            return wrap_fresh(self.function(*args, **(kwargs or {})), self.layout)


def direct_list(function: Callable, layouts: Sequence[Layout]) -> Plan:
    """The function itself on the shards, a list of tensors out, nothing to move."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        with _disabled():
            out = function(*args, **kwargs) if kwargs else function(*args)
            for x, layout in zip(out, layouts):
                x.__class__ = DTensor
                x.__dict__["_layout"] = layout
            return out

    return run


def moved_first(function: Callable, movers: Sequence[tuple[int | str, Mover]], num_args: int) -> Callable:
    """A function of shards, some of which are moved first. `movers` go by the positions of the arguments, or by their
    names."""
    if len(movers) == 1 and num_args == 3 and movers[0][0] != 1:  # a weight and a bias are among them
        ((position, mover),) = movers
        move = mover.bound()
        if position == 0:
            return lambda x, weight, bias: function(move(x), weight, bias)
        return lambda x, weight, bias: function(x, weight, move(bias))
    if num_args == 3 and [at for at, _ in movers] == [1, 2]:
        move_weight, move_bias = (mover.bound() for _, mover in movers)
        return lambda x, weight, bias: function(x, move_weight(weight), move_bias(bias))
    placed = [(at, mover.bound()) for at, mover in movers if isinstance(at, int)]
    named = [(name, mover.bound()) for name, mover in movers if isinstance(name, str)]

    def run(*args: Any, **kwargs: Any) -> Any:
        if placed:
            local = list(args)
            for position, move in placed:
                local[position] = move(local[position])
            args = tuple(local)
        for name, move in named:
            kwargs[name] = move(kwargs[name])
        return function(*args, **kwargs)

    return run if movers else function


def reduced_after(function: Callable, reduce: Callable[[Tensor], Tensor]) -> Callable:
    """A function of shards, whose fresh result is reduced."""

    return lambda *args, **kwargs: reduce(function(*args, **kwargs))


def localised(function: Callable, template: Sequence[Any], position: int, layout: Layout) -> Plan:
    """One function of one shard with constant local arguments (a view, say), nothing to move."""
    before, after = tuple(template[:position]), tuple(template[position + 1 :])

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Tensor:
        out: Any = _on_shard(function, (), before + args[:1] + after)  # type: ignore[call-arg]
        if out.__class__ is Tensor:
            out.__class__ = DTensor
            out.__dict__["_layout"] = layout
            return out
        return wrap_fresh(out, layout)

    return run


def has_terms(layout: Layout) -> bool:
    """Whether a tensor consists of the terms of a product or of a norm."""
    return layout.has_pending and without_terms(layout) is not layout.unreduced


def reduce_terms(x: DTensor, allowed: Callable[[Layout], Layout] = without_terms) -> None:
    """Reduce the product or the norm that a tensor consists of the terms of, or what else is not allowed. The shards of
    a pending value are as large as those of a reduced one, so it stays the same object. It must come before anyone
    shares its memory, is told what its gradient is, or writes to it: no value is taken apart into such terms."""
    if not x._layout.has_pending or (layout := allowed(x._layout)) is x._layout.unreduced:
        return
    moves = plan_moves(x._layout.unreduced, layout)
    with _disabled(), torch.no_grad():
        for shard, reduced in zip(shards_of(x), shards_of(run_path(localise(x), moves)), strict=True):
            own = reduced.clone()  # others may use it too
            if noters:
                noters[-1].set_data(shard, own)
            shard.data = own
    x.__dict__.pop("_moved", None)
    x.__dict__["_layout"] = layout


def reduced_first(function: Callable, positions: Sequence[int]) -> Plan:
    """A call that writes to tensors at `positions`, or makes views of them, which consist of such terms."""

    def run(args: tuple, kwargs: dict[str, Any] | None) -> Any:
        tensors: Any = flat_tensors((args, kwargs or {}))
        for position in positions:
            reduce_terms(tensors[position])
        return function(*args, **(kwargs or {}))

    return run
