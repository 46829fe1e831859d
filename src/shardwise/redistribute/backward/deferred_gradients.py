"""Gradients of parameters, on their way from the graph: kept, or reduced in buckets while the backward pass goes on.

Moving a gradient is linear, so gradients of several backward passes may be added up first and moved once. Inside a
`no_sync` block the backward of a parameter's move keeps what arrives; the first backward pass outside adds its own.

Backward passes run on threads of the engine's, where the context of the thread that began them is unknown: what is
kept, and whether to, is one fact for the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from shardwise.comm.captured import noters
from shardwise.comm.rendezvous import PLACES
from shardwise.errors import UnreducedGradientError
from shardwise.layout import Mesh
from shardwise.redistribute.backward.buckets import accumulate, add_to_bucket, held
from shardwise.redistribute.kernels import run_move
from shardwise.redistribute.transitions import Move

_disabled = torch._C.DisableTorchFunctionSubclass
_size = torch._C.TensorBase.size
_hooks = torch._C.TensorBase._backward_hooks.__get__  # type: ignore[union-attr]
_post_hooks = torch._C.TensorBase._post_accumulate_grad_hooks.__get__  # type: ignore[attr-defined]

SECOND_ORDER = "shardwise.second_order"
"""Under this name a node of torch's that stands for a move knows what it does to gradients that are differentiated."""

blocks: list[str] = []
"""Open blocks, the innermost last: in it gradients are "kept", "reduced" with those kept before, or left "alone"."""

unreduced: dict[int, ref[Tensor]] = {}
"""Parameters with gradients that are kept, by their ids, in the order of the first one kept."""


@contextmanager
def no_sync(*, enabled: bool = True) -> Iterator[None]:
    """Inside, backward passes do not reduce gradients of parameters but keep them; the first one outside reduces them.

    For gradient accumulation: all passes but the last run inside. `enabled=False` makes a block that changes nothing.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("dp",))
    >>> weight = torch.nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [sw.Replicate()]))
    >>> batch = sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)])
    >>> for step in range(3):
    ...     with sw.debug.CommDebugMode() as comms, sw.parallel.no_sync(enabled=step < 2):
    ...         (batch * weight).sum().backward()
    ...     print(comms.get_total_counts())
    0
    0
    1
    >>> weight.grad.full_tensor()
    tensor([12., 12., 12.])
    """
    with _block("kept" if enabled else blocks[-1] if blocks else "reduced"):
        yield


def is_keeping() -> bool:
    """Whether gradients are kept, now or since before."""
    return bool(unreduced) or (bool(blocks) and blocks[-1] == "kept")


@contextmanager
def alone() -> Iterator[None]:
    """Inside, a backward pass is asked for the gradients of its own outputs: nothing is kept, nothing added."""
    with _block("alone"):
        yield


@contextmanager
def reduced_apart() -> Iterator[None]:
    """While a program is captured: what it keeps it must reduce, or it would be lost. What was kept before stays."""
    before = dict(unreduced)
    parameters = [parameter for found in before.values() if (parameter := found()) is not None]
    aside = [(parameter, parameter.__dict__.pop("_kept")) for parameter in parameters]
    unreduced.clear()
    try:
        with _block("reduced"):
            yield
    finally:
        left = [parameter for found in unreduced.values() if (parameter := found()) is not None]
        for parameter in left:
            drop(parameter)
        for parameter, kept in aside:
            parameter.__dict__["_kept"] = kept
        unreduced.update(before)
    if left:
        raise UnreducedGradientError(
            "a program that is captured ends with gradients that no_sync() kept: run its last backward pass outside of "
            "that block, inside of the program"
        )


@contextmanager
def _block(mode: str) -> Iterator[None]:
    blocks.append(mode)
    try:
        yield
    finally:
        blocks.pop()


def deferred(
    leaf: Tensor | None, move: Move, grads: Sequence[Tensor], *, owned: bool = False
) -> Sequence[Tensor | None] | None:
    """What a leaf gets for gradients that are to be moved on their way to it, if they are not just to be moved. Those
    of a parameter may be kept: then it gets zeros, so that the parameter has a gradient to reset and its hooks run in
    every pass. Or they are moved with others and added at the end of the pass: then it gets nothing. `owned` gradients
    are contiguous and nobody else's."""
    mode = blocks[-1] if blocks else "reduced"
    if mode == "alone" or not is_parameter(leaf):
        return None
    parameter: Any = leaf
    given = grads
    if unreduced or mode == "kept":
        kept: dict[int, tuple[Move, Sequence[Tensor]]] = parameter.__dict__.setdefault("_kept", {})
        if (before := kept.pop(id(move), None)) is not None:
            grads = [a + b for a, b in zip(before[1], grads, strict=True)]
        if mode == "kept":
            kept[id(move)] = move, grads
            if id(parameter) not in unreduced:
                unreduced[id(parameter)] = ref(parameter, partial(_gone, id(parameter)))
            return [grad.new_zeros(()).expand(_size(x)) for x, grad in zip(held(parameter), grads, strict=True)]
        if not kept:
            drop(parameter)
    if not move.communicates or grads[0].is_sparse or noters or is_watched(parameter):
        return None if grads is given else run_move(move, grads)
    add_to_bucket(parameter, move, grads, owned and grads is given)
    return [None] * len(grads)


def is_parameter(leaf: Tensor | None) -> bool:
    return leaf is not None and (leaf.__dict__.get("_is_param", False) or isinstance(leaf, nn.Parameter))


def is_watched(parameter: Tensor) -> bool:
    """Whether somebody looks at the gradient when it arrives: then it must be complete."""
    return PLACES in parameter.__dict__ or bool(_hooks(parameter) or _post_hooks(parameter))


def _gone(key: int, found: ref[Tensor]) -> None:
    unreduced.pop(key, None)


def leaf_of(node: Any) -> Tensor | None:
    """The leaf that a node's gradient is for, as it is. Moves whose backward does nothing may lie between: some ranks
    do without them, and all must find the same leaf. So may what the simulator puts there: an alias, as rank 0's shard
    is one, and the own nodes of what was moved."""
    while node is not None and node.__class__ not in _computing and _passes_on(node):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


_computing: set[type] = set()
"""Classes of nodes of torch's own, met before, that compute something: all results used as varying are asked about."""


def _passes_on(node: Any) -> bool:
    move = getattr(node, "move", None)
    if isinstance(move, Move):
        return move.dual.kind == "nothing"
    name = node.name()
    if not isinstance(node, BackwardCFunction) and name not in (*_COPIES, "AliasBackward0"):
        _computing.add(node.__class__)
        return False
    if name == "OwnNodeBackward" and isinstance(getattr(node.next_functions[0][0], "move", None), Move):
        return True
    return name == "AliasBackward0" or (name in _COPIES and SECOND_ORDER in node.metadata)


_COPIES = ("CloneBackward0", "OwnNodeBackward")
"""Nodes that stand for a move whose backward does nothing, where they are marked as such. (Others that are marked did
not only move something: they made what was then reduced in place.)"""


def flush(meshes: Sequence[Mesh]) -> None:
    """After a backward pass on some meshes: move what is kept for parameters on them that it did not reach. Other ranks
    made no such pass, so what is to be moved between them and these waits."""
    if blocks and blocks[-1] != "reduced":
        return
    parameters: list[Any] = [parameter for found in unreduced.values() if (parameter := found()) is not None]
    parameters = [x for x in parameters if all(any(m.is_within(mesh) for mesh in meshes) for m in _meshes_of(x))]
    for parameter in parameters:
        del unreduced[id(parameter)]
    with _disabled(), torch.no_grad():
        for parameter in parameters:
            for move, grads in parameter.__dict__.pop("_kept").values():
                accumulate(parameter, run_move(move, grads))


def _meshes_of(parameter: Any) -> list[Mesh]:
    return [move.source.layout.mesh for move, _ in parameter._kept.values()]


def drop(parameter: Tensor) -> None:
    """Forget what is kept for a parameter: its gradient starts afresh."""
    parameter.__dict__.pop("_kept", None)
    unreduced.pop(id(parameter), None)


def check_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Raise if gradients are still kept that an optimizer is about to use."""
    if not unreduced:
        return
    kept = sum(id(param) in unreduced for group in optimizer.param_groups for param in group["params"])
    if kept:
        raise UnreducedGradientError(
            f"gradients of {kept} parameter{'s' if kept > 1 else ''} were kept by no_sync() and never reduced: run the "
            f"last backward pass before an optimizer's step outside of it"
        )
