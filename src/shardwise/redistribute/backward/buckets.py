"""Buckets: gradients of many parameters are reduced by few collectives, which run while the backward pass goes on.

A gradient is put in the bucket of its mesh axes, dtype and device. A full bucket is reduced at once, the others when
the pass ends, before `backward` returns; then the parameters get their gradients. Gradients arrive in the order of the
program, and sizes are counted alike on all ranks, so all ranks fill and start the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

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
_flatten: Any = torch._C._nn.flatten_dense_tensors
_unflatten: Any = torch._C._nn.unflatten_dense_tensors

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
    known = _passes.get(_task())
    now = known() if known is not None else None
    if now is None:
        now = _Pass(_task())
        _queue_callback(now.finish)
    now.add(parameter, move, grads, owned)


class _Pass:
    """One backward pass, known by the engine's number. The engine's callback holds it: one that raises is let go of
    with it."""

    def __init__(self, task: int) -> None:
        self.filling: dict[Key, _Bucket] = {}
        self.started: list[_Bucket] = []
        _passes[task] = ref(self, lambda _: _passes.pop(task, None))

    def add(self, parameter: nn.Parameter, move: Move, grads: Sequence[Tensor], owned: bool) -> None:
        grad = grads[0]
        key = (move.collective, grad.dtype, grad.device)
        bucket = self.filling.get(key)
        if bucket is None:
            bucket = self.filling[key] = _Bucket(move, owned)
        bucket.parameters.append(parameter)
        bucket.grads.append(grads)
        bucket.num_bytes += move.target.layout.largest_numel * grad.element_size()
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


_passes: dict[int, ref[_Pass]] = {}


class _Bucket:
    """Gradients that are moved by one collective. Only reductions to all ranks are joined."""

    def __init__(self, move: Move, owned: bool) -> None:
        self.move = move
        self.owned = owned
        self.parameters: list[nn.Parameter] = []
        self.grads: list[Sequence[Tensor]] = []
        self.num_bytes = 0
        self.cause: Cause | None = cause()[0] if listeners else None

    def start(self) -> None:
        with gradient_of(self.cause, len(self.grads)):
            self.handle = self._started()

    def _started(self) -> Handle[list[Tensor]]:
        move, mesh, shards = self.move, self.move.source.layout.mesh, self.grads[0]
        if len(self.grads) > 1:
            shards = [_flatten(of_rank) for of_rank in zip(*self.grads, strict=True)]
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
    """The parts of a flat tensor that some tensors were joined to. Of empty ones torch's function forgets the shape."""
    return [part if part.numel() else torch.empty_like(x) for part, x in zip(_unflatten(flat, like), like, strict=True)]
