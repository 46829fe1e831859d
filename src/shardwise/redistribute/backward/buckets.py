"""Buckets: gradients of many parameters are reduced by few collectives, which run while the backward pass goes on.

A gradient is put in the bucket of its mesh axes, dtype and device. A full bucket is reduced at once, the others when
the pass ends, before `backward` returns; then the parameters get their gradients. Gradients arrive in the order of the
program, and sizes are counted alike on all ranks, so all ranks fill and start the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardwise.comm.cause import Cause, cause, gradient_of, listeners
from shardwise.comm.port import Handle
from shardwise.redistribute.kernels import start_move
from shardwise.redistribute.transitions import Move

FIRST, LARGEST = 2**20, 25 * 2**20
"""Bytes at which the first bucket of a pass is full, so that something is under way early, and all others."""

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]
_task = torch._C._current_graph_task_id
_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback

Key = tuple[Any, ...]


def held(parameter: Tensor) -> Sequence[Tensor]:
    """The shards of the ranks that this process holds."""
    return (parameter, *parameter.__dict__.get("_peers", ()))


def accumulate(parameter: Tensor, grads: Sequence[Tensor]) -> None:
    for x, grad in zip(held(parameter), grads, strict=True):
        sum_so_far = _get_grad(x)
        _set_grad(x, grad) if sum_so_far is None else sum_so_far.add_(grad)


def add_to_bucket(parameter: nn.Parameter, move: Move, grads: Sequence[Tensor], owned: bool) -> None:
    """In a backward pass: have gradients moved, and added to those of a parameter when the pass ends. `owned` ones are
    contiguous and nobody else's."""
    now = _passes.get(_task())
    if now is None:
        now = _passes[_task()] = _Pass()
        _queue_callback(now.finish)
    now.add(parameter, move, grads, owned)


class _Pass:
    """One backward pass."""

    def __init__(self) -> None:
        self.filling: dict[Key, _Bucket] = {}
        self.started: list[_Bucket] = []

    def add(self, parameter: nn.Parameter, move: Move, grads: Sequence[Tensor], owned: bool) -> None:
        key = _key(move, grads)
        bucket = self.filling.get(key)
        if bucket is None:
            bucket = self.filling[key] = _Bucket(move, owned)
        bucket.add(parameter, move, grads)
        if bucket.num_bytes >= (LARGEST if self.started else FIRST) or move.kind != "all_reduce":
            self._start(key)

    def _start(self, key: Key) -> None:
        bucket = self.filling.pop(key)
        bucket.start()
        self.started.append(bucket)

    def finish(self) -> None:
        with _disabled(), torch.no_grad():
            for key in list(self.filling):
                self._start(key)
            for bucket in self.started:
                bucket.finish()


_passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()
"""By the engine's number. The callback holds a pass: one that raises is let go of with it."""


def _key(move: Move, grads: Sequence[Tensor]) -> Key:
    return (move.source.layout.mesh, move.kind, move.axes, move.wire_op, grads[0].dtype, grads[0].device)


class _Bucket:
    """Gradients that are moved by one collective. Only reductions to all ranks are joined."""

    def __init__(self, move: Move, owned: bool) -> None:
        self.move = move
        self.owned = owned
        self.parameters: list[nn.Parameter] = []
        self.grads: list[Sequence[Tensor]] = []
        self.num_bytes = 0
        self.cause: Cause | None = None

    def add(self, parameter: nn.Parameter, move: Move, grads: Sequence[Tensor]) -> None:
        if listeners and not self.grads:
            self.cause = cause()[0]
        self.parameters.append(parameter)
        self.grads.append(grads)
        self.num_bytes += move.target.layout.largest_numel * grads[0].element_size()

    def start(self) -> None:
        with gradient_of(self.cause, len(self.grads)):
            self.handle = self._started()

    def _started(self) -> Handle[list[Tensor]]:
        move, mesh, shards = self.move, self.move.source.layout.mesh, self.grads[0]
        if len(self.grads) > 1:
            shards = [torch.cat([grad.reshape(-1) for grad in of_rank]) for of_rank in zip(*self.grads, strict=True)]
        elif not self.owned:
            return start_move(move, shards)
        return mesh.port.start_all_reduce(shards, mesh, move.axes, move.wire_op, owned=True)

    def finish(self) -> None:
        found = self.handle.wait()
        if len(self.grads) == 1:
            accumulate(self.parameters[0], found)
            return
        parts = [_apart(flat, of_rank) for flat, of_rank in zip(found, zip(*self.grads, strict=True), strict=True)]
        for parameter, *grads in zip(self.parameters, *parts, strict=True):
            accumulate(parameter, grads)


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor that some tensors were joined to."""
    return [part.view(x.shape) for x, part in zip(like, flat.split([x.numel() for x in like]), strict=True)]
