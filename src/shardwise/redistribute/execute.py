"""Running moves on local tensors, with their gradients read off the table.

A local tensor is a plain tensor under torchrun and a `Ranked` one in the simulator; both go through here alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from shardwise.comm.cause import inherited, is_moving, listeners, mark_again, moved
from shardwise.comm.ranked import ranked
from shardwise.layout import Layout
from shardwise.redistribute.averages import finish, prepare
from shardwise.redistribute.backward.buckets import FIRST
from shardwise.redistribute.backward.deferred_gradients import SECOND_ORDER, deferred, is_parameter, leaf_of
from shardwise.redistribute.backward.double_backward import anchored, left_behind
from shardwise.redistribute.backward.ownership import bare_function, is_ours, own_node
from shardwise.redistribute.backward.reach import PREPARED
from shardwise.redistribute.cost import group_size
from shardwise.redistribute.dim_order import copy_format, in_order
from shardwise.redistribute.kernels import KERNELS, STARTS, run_move
from shardwise.redistribute.masks import masking
from shardwise.redistribute.move_cache import forget
from shardwise.redistribute.transitions import Move, Typed

_disabled = torch._C.DisableTorchFunctionSubclass
_grad_enabled = torch._C.is_grad_enabled
_size = torch._C.TensorBase.size


def run_path(x: Tensor, moves: Sequence[Move]) -> Tensor:
    """Run moves one after the other on a local tensor. Plain in, plain out; `Ranked` in, `Ranked` out."""
    if not moves:
        return x
    if listeners and not is_moving(moves):
        return moved(moves, x, partial(run_path, x, moves))
    with _disabled():
        peers = x.__dict__.get("_peers")
        shards: Sequence[Tensor] = (x,) if peers is None else (x, *peers)
        for move in moves:
            shards = transition(move, shards)
    return shards[0] if peers is None else ranked(_fresh(shards, x))


def _fresh(shards: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
    return shards if shards[0] is not x else [shard.view_as(shard) for shard in shards]


def transition(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """One move on the held shards, differentiable to any order."""
    if move.is_linear:
        if _grad_enabled():
            for x in shards:
                if x.requires_grad:
                    return _linear(move, shards)
        return shards if move.keeps_value else in_order(move, shards, run_move(move, shards))
    return _general(move, shards)


def _general(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    if move.kind == "mask":
        # Equal values already have the right average, maximum or minimum: each rank's copy becomes its term.
        varying = Typed(move.source.layout, move.source.varying.union(move.axes))
        return transition(Move(move.source, varying, move.axes), shards)
    if not (_grad_enabled() and any(x.requires_grad for x in shards)):
        return finish(move, _unrecorded(move, prepare(move, shards)), shards[0].dtype)
    if move.communicates and move.wire_op != "sum" and move.source.at(move.axes[0]) == "P":
        return _nonlinear(move, shards)
    return finish(move, _linear(move, prepare(move, shards)), shards[0].dtype)


def _unrecorded(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    if move.kind == "all_reduce" and move.wire_op == "sum" and hasattr(move.source.layout.mesh.port, "reducer"):
        return (differentiable(move)(*shards),)  # with everything looked up beforehand
    return in_order(move, shards, run_move(move, shards))


def _linear(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    if move.is_identity:
        return shards
    out = differentiable(move)(*shards)
    # The simulator's shards are several results of one node. After a write to a view of such a result, torch looks for
    # the gradient that it retains in the place of the first one, and dies. Of the first, too, or `torch.autograd.grad`
    # would hand out what its hooks returned where that of other ranks is what they were given.
    return tuple(map(own_node, out)) if out.__class__ is tuple else (out,)


def node_of_move(x: Tensor, num_ranks: int) -> Any:
    """The node of the move that a tensor is the result of."""
    node: Any = x.grad_fn
    return node if num_ranks == 1 else node.next_functions[0][0]


def differentiable(move: Move) -> Callable[..., Any]:
    """A linear move as a function of the held shards that autograd knows; made once per move."""
    function = move.__dict__.get("_function")
    return function if function is not None else _make_function(move)


def _make_function(move: Move) -> Callable[..., Any]:
    function = _in_cpp(move) if hasattr(move.source.layout.mesh.port, "reducer") else None
    if function is None:
        function = partial(applied(_NAMED[move.kind]), move)
    move.__dict__["_function"] = function
    return function


# What row-parallel layers do, on one rank without a node of ours: a copy whose own node passes the gradient on as it
# is. It costs no Python in the backward pass. Only where that gradient is differentiated again must it be given its
# type: see `second_order`.


def _in_cpp(move: Move) -> Callable[[Tensor], Tensor] | None:
    if move.kind == "nothing" and move.dual.kind == "all_reduce":
        return _alias(move)
    if move.kind == "all_reduce" and move.dual.keeps_value:
        return _settling(move)
    if move.kind == "mask" and move.dual.keeps_value:
        return masking(move)
    return None


def _settling(move: Move) -> Callable[[Tensor], Tensor]:
    """P → R."""
    mesh, dual = move.source.layout.mesh, move.dual
    reduce = mesh.port.reducer(mesh, move.axes, move.wire_op)
    thin = move.source.layout.thinness > 0

    def settle(x: Tensor) -> Tensor:
        out = x.clone(memory_format=copy_format(x, thin))
        wire = out if out.is_contiguous() else out.detach().contiguous()
        reduce(wire)  # behind autograd's back
        if wire is not out:
            out.data.copy_(wire)
        if (node := out.grad_fn) is not None:
            node.metadata[SECOND_ORDER] = dual  # type: ignore[index]
        return out

    return settle


def in_place(move: Move) -> Callable[[Tensor], Tensor]:
    """P → R of a fresh result that nobody else has seen, and that the op that made it does not keep for its backward:
    reduced where it is. Its own node passes the gradient on, as `_settling`'s copy would."""
    mesh, dual = move.source.layout.mesh, move.dual
    if not (hasattr(mesh.port, "reducer") and move.kind == "all_reduce" and move.is_linear and dual.keeps_value):
        return lambda x: run_path(x, (move,))
    reduce, settle = mesh.port.reducer(mesh, move.axes, move.wire_op), differentiable(move)
    path = (move,)

    def reduce_in_place(x: Tensor) -> Tensor:
        if listeners and not is_moving(path):
            return moved(path, x, partial(reduce_in_place, x))
        node = x.grad_fn
        if not x.is_contiguous():
            return settle(x) if node is not None else run_path(x, (move,))
        reduce(x)
        if node is not None:
            node.metadata[SECOND_ORDER] = dual  # type: ignore[index]
            if listeners:
                mark_again(node)
        return x

    return reduce_in_place


_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def second_order(nodes: Sequence[Any]) -> list[Tensor]:
    """Prepare the graph below some nodes for a backward pass that will itself be differentiated.

    Every P → R in it will pass its gradient on as varying, R → V, whose own backward is the all-reduce that first-order
    gradients do without; every R → P, as V → R. Returns the leaves of the graph.
    """
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        dual = node.metadata.pop(SECOND_ORDER, None)
        if dual is not None:
            node.metadata[PREPARED] = True
            node.register_prehook(_marking(dual))
        if node.__class__ is _Leaf:
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return leaves


def _marking(dual: Move) -> Callable[[Any], Any]:
    def mark(grads: tuple[Tensor | None, ...]) -> Any:
        found = [grad for grad in grads if grad is not None]  # a function of users' may give none back, on all ranks
        return tuple(recorded(dual, found)) if found and _grad_enabled() else None

    return mark


def recorded(move: Move, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """A move of gradients, in a backward pass that will itself be differentiated."""
    with _disabled():
        out = left_behind(transition(move, anchored(grads)))
        if listeners:
            inherited(out, grads)
        return out


class Moved(torch.autograd.Function):
    """Forward is the move, backward its dual, run through here again when it must itself be differentiable."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, move: Move, *shards: Tensor) -> Any:
        ctx.move = move
        out = in_order(move, shards, run_move(move, shards))
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if grads[0] is None:
            return None, *grads
        dual = ctx.move.dual
        forget(dual.source.layout.mesh)
        if _grad_enabled():
            return None, *recorded(dual, grads)
        if dual.keeps_value:
            return None, *grads
        with _disabled():
            return None, *(deferred(leaf_of(ctx.next_functions[0][0]), dual, grads) or run_move(dual, grads))


NAMES = {kind: "".join(map(str.capitalize, kind.split("_"))) for kind in (*KERNELS, *STARTS)}
"""Of classes, one for each kind of move: what users see in their graphs."""

_NAMED = {kind: type(name, (Moved,), {}) for kind, name in NAMES.items()}


def _alias(move: Move) -> Callable[[Tensor], Tensor]:
    """R → V on one rank, whose backward is what tensor-parallel layers do: a class for each move, so that nothing is
    looked up while it runs."""
    dual, mesh = move.dual, move.source.layout.mesh
    reduce = mesh.port.reducer(mesh, dual.axes, dual.wire_op)

    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return shard.detach()

    def backward(ctx: Any, *grads: Tensor) -> Any:
        forget(mesh)
        if _grad_enabled():
            return tuple(recorded(dual, grads))
        (grad,) = grads
        if grad.is_contiguous():
            out = grad if is_ours(grad) else grad.clone()
        else:
            out = grad.clone(memory_format=torch.contiguous_format)
        reduce(out)
        return out

    def forward_of_leaf(ctx: Any, shard: Tensor) -> Tensor:
        ctx.leaf = shard if shard.is_leaf else leaf_of(shard.grad_fn)
        return shard.detach()

    def backward_to_leaf(ctx: Any, *grads: Tensor) -> Any:
        forget(mesh)
        if _grad_enabled():
            return tuple(recorded(dual, grads))
        (grad,) = grads
        with _disabled():
            # Whether it may be overwritten. Small ones of parameters are copied in any case, to be reduced together.
            asked = grad.nbytes >= FIRST or not is_parameter(ctx.leaf)
            owned = asked and grad.is_contiguous() and is_ours(grad)
            found = deferred(ctx.leaf, dual, grads, owned=owned)
            if found is not None:
                return tuple(found)
            out = grad if owned else grad.clone(memory_format=torch.contiguous_format)
        reduce(out)
        return out

    of_result = bare_function(forward, backward, "Varying", joins_ranks=True)
    of_leaf = bare_function(forward_of_leaf, backward_to_leaf, "Varying", joins_ranks=True)
    return lambda x: of_leaf(x) if x.is_leaf or leaf_of(x.grad_fn) is not None else of_result(x)


def applied(function: Any) -> Callable[..., Any]:
    """`apply` itself, without the detour for functorch's transforms, which have no business with shards."""
    return super(_SingleLevelFunction, function).apply


# Extrema and products, with gradients. Not linear in the shards, so they keep what they need to be differentiated.


def _nonlinear(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    shards = prepare(move, shards)
    if move.wire_op == "product":
        return _product(move, shards)
    out = _Extremum.apply(move, *shards)
    return tuple(map(own_node, out)) if out.__class__ is tuple else (out,)


class _Extremum(torch.autograd.Function):
    """The gradient goes to the ranks that hold the extremum, in equal shares where several do."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, move: Move, *shards: Tensor) -> Any:
        out = in_order(move, shards, run_move(move, shards))
        ctx.move, ctx.num_ranks = move, len(shards)
        if any(ctx.needs_input_grad):  # nothing that may be written to before the gradient comes
            scattered = move.kind == "reduce_scatter"  # then what a rank gets is not what it is to be compared with
            # Kept beside what autograd saves: torch keeps nothing here, and a checkpoint would recompute it.
            ctx.kept = [x.clone() for x in (*shards, *out)] if scattered else [*map(_attains, shards, out)]
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forget(ctx.move.source.layout.mesh)
        move, kept = ctx.move, ctx.kept
        with _disabled():
            pending = move.source.dual()  # what the gradient of a pending value is: one copy per rank
            back = Move(move.target.dual(), pending, move.axes)
            if move.kind == "reduce_scatter":
                kept = [*map(_attains, kept[: ctx.num_ranks], run_move(back, kept[ctx.num_ranks :]))]
            spread = recorded(back, grads) if _grad_enabled() else transition(back, grads)
            hits = [hit.to(g.dtype) for hit, g in zip(kept, spread, strict=True)]
            mesh = move.source.layout.mesh
            ties = mesh.port.all_reduce(hits, mesh, move.axes, "sum")
            return None, *(g * hit / tie for g, hit, tie in zip(spread, hits, ties, strict=True))


def _attains(x: Tensor, extremum: Tensor) -> Tensor:
    return (x == extremum) | (x.isnan() & extremum.isnan())


def _product(move: Move, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gather every rank's factor along a new dim and multiply there: torch knows the gradient, zeros included."""
    source = move.source.layout
    ranks = group_size(source.mesh, move.axes)
    settled = [None if axis in move.axes else p for axis, p in enumerate(source.pending)]
    stacked = Layout(
        source.mesh,
        (ranks, *source.shape),
        (move.axes, *source.splits),
        settled,
        (None, *source.sizes),
    )
    whole = stacked.with_(splits=((), *source.splits), sizes=(None, *source.sizes))
    gather = Move(Typed(stacked, move.source.varying), Typed(whole, move.target.varying), move.axes)
    if move.kind == "reduce_scatter":
        gather = Move(gather.source, Typed(whole, move.source.varying.union(move.axes)), move.axes)
    gathered = transition(gather, [x.unsqueeze(0) for x in shards])
    products = [x.prod(0) for x in gathered]
    if move.kind != "reduce_scatter":
        return products
    after = Move(Typed(source.with_(pending=settled), move.source.varying.union(move.axes)), move.target, move.axes)
    return transition(after, products)
