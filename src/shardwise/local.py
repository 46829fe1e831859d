"""Local tensors: what the ranks held here have. A plain tensor under torchrun, a `Ranked` one in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked, ranked
from shardwise.comm.cause import is_moving, listeners, moved
from shardwise.comm.rendezvous import expect
from shardwise.errors import MixedTensorError, PlacementError
from shardwise.layout import Layout, Mesh, Replicate
from shardwise.redistribute import Move, own_node

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_numel = torch._C.TensorBase.numel
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


def on_shards(local: Tensor, function: Callable[[Sequence[Tensor]], Any], moves: Sequence[Move] = ()) -> Tensor:
    """Apply a function of all held shards to a local tensor. `moves` are those that it makes, or its gradient does."""
    if listeners and moves and not is_moving(moves):
        return moved(moves, local, partial(on_shards, local, function, moves))
    with _disabled():
        out = function((local, *local.__dict__.get("_peers", ())))
        if type(local) is not Ranked:
            return out[0] if isinstance(out, tuple) else out
        return ranked(out if isinstance(out, tuple) else (out,))


def single(local: Tensor) -> Tensor:
    """A replicated local tensor as one plain tensor."""
    if type(local) is not Ranked:
        return local
    with _disabled():
        return _OneOfAll.apply(local, *local._peers)


def is_leaf(x: Tensor) -> bool:
    """Whether a tensor is a leaf of the graph. Of a view made under no_grad and written to there, torch does not say:
    it would have to be part of a graph, and is of none."""
    try:
        return x.is_leaf
    except RuntimeError:
        return False


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a parameter of a module, or another leaf that is trained."""
    return getattr(x, "_is_param", False) or (x.requires_grad and is_leaf(x))


def plain_alias(shard: Tensor, mesh: Mesh) -> Tensor:
    """The same shard as a plain tensor. What needs no gradient is no view to autograd: it may become a leaf, and of
    views of a view autograd looks for the history in what they all are views of."""
    return mesh.port.alias(shard, Tensor) if shard.requires_grad else shard.detach()


def empty_gradient(shard: Tensor) -> Tensor | None:
    """The gradient of a shard that holds nothing, which torch may take for a constant while those of others are not."""
    if _numel(shard) == 0:
        _set_grad(shard, torch.zeros_like(shard, requires_grad=False))
    return _get_grad(shard)


def give_strides(shards: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Give gradients the strides of their shards, as torch does but along dims of one index, where it takes any: ranks
    that hold more of such a dim would not agree with this one on what is a view."""
    for shard, grad in zip(shards, grads, strict=True):
        sizes, steps, wanted = grad.size(), grad.stride(), shard.stride()
        if steps != wanted and all(a == b or n <= 1 for a, b, n in zip(steps, wanted, sizes, strict=True)):
            with torch.no_grad():
                grad.as_strided_(sizes, wanted)


def part_held(layout: Layout) -> str:
    """What the first rank held here has of a tensor in a layout: `shard at dp=0: `, or nothing if it has the whole."""
    mesh = layout.mesh
    apart = [f"{mesh.names[i]}={mesh.held[0][i]}" for i, p in enumerate(layout.placements) if p != Replicate()]
    kinds = [kind for kind, there in (("pending term", layout.has_pending), ("shard", any(layout.splits))) if there]
    return f"{' of the '.join(kinds)} at {', '.join(apart)}: " if apart else ""


def part(x: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box cut out of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


def check_strided(x: Tensor) -> Tensor:
    """The tensor, unless it cannot be cut along its dims."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a DTensor is made of a torch.Tensor, not of a {type(x).__name__}; see torch.as_tensor")
    if type(x).__module__.startswith(("torch.distributed.tensor", "torch.distributed._shard")):
        raise MixedTensorError(
            f"a {type(x).__name__} of torch's is laid out already, and not known here: give its full_tensor(), or its "
            f"to_local() to DTensor.from_local; a program has its DTensors, styles and fully_shard from one library"
        )
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").replace("_", " ")
        raise PlacementError(
            f"a {kind} tensor cannot be a DTensor: only dense tensors have shards; convert it first (to_dense(), "
            f"to_padded_tensor()), or keep it a plain tensor"
        )
    return x


def spread(plain: Tensor, mesh: Mesh) -> Tensor:
    """A plain tensor as the local tensor that every rank holds alike."""
    if len(mesh.held) == 1:
        return plain
    with _disabled():
        if plain.requires_grad and torch.is_grad_enabled():
            return ranked(_AllOfOne.apply(len(mesh.held), plain))
        return ranked(_copies(plain, len(mesh.held)))


def _copies(x: Tensor, num_ranks: int) -> tuple[Tensor, ...]:
    return (x.view_as(x), *(x.clone() for _ in range(1, num_ranks)))  # a write must reach each rank once


class _OneOfAll(torch.autograd.Function):
    """All ranks' equal tensors → one of them; each rank gets the gradient."""

    joins_ranks = True

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Tensor:
        ctx.num_ranks = len(shards)
        return shards[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        expect([ctx])
        return tuple(map(own_node, _AllOfOne.apply(ctx.num_ranks, grad)))  # those it keeps may be written to


class _AllOfOne(torch.autograd.Function):
    """One tensor → the same on all ranks. The ranks' gradients agree; one of them is it."""

    @staticmethod
    def forward(ctx: Any, num_ranks: int, x: Tensor) -> Any:
        return _copies(x, num_ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _OneOfAll.apply(*grads)
