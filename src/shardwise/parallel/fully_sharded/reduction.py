"""Gradients of what was gathered on their way to the shards: one reduce-scatter, under way while the pass goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.comm import Handle, as_mesh
from shardwise.comm.cause import caused
from shardwise.comm.port import done
from shardwise.parallel.fully_sharded.collectives import Held, Joint
from shardwise.parallel.fully_sharded.group import Entry, Group

Gradients = list[tuple[Entry, Held]]


class Reduction:
    """Gradients of some parameters of a group, of one dtype, under way to their shards. They are added up, and divided
    by `divisor`."""

    def __init__(self, group: Group, joint: Joint, entries: Sequence[Entry], handle: Handle, divisor: float) -> None:
        self.group, self.joint, self.entries, self.divisor = group, joint, entries, divisor
        self._scattered: Handle | None = handle
        self._reduced: Handle | None = None

    def advance(self) -> None:
        """Wait for the first of two collectives, and start the second: shards are added up over their replicas."""
        if self._scattered is None:
            return
        flat, self._scattered = self._scattered.wait(), None
        mesh, waiting = as_mesh(self.group.data.mesh), self.group.scattered
        if mesh.ndim == 1:
            self._reduced = done(flat)
        elif self.group.options.all_reduce:
            for entry, shards in self._by_entry(flat):
                for shard, so_far in zip(shards, waiting.pop(entry, ())):
                    shard.add_(so_far)
            start = partial(mesh.port.start_all_reduce, flat, mesh, (0,), "sum")
            self._reduced = caused("fully_shard", "gradients reduced over replicas", start)
        else:
            for entry, shards in self._by_entry(flat):
                before = waiting.get(entry, [torch.zeros_like(shard) for shard in shards])
                waiting[entry] = [a + b for a, b in zip(before, shards, strict=True)]

    def _by_entry(self, flat: Held) -> Iterable[tuple[Entry, list[Tensor]]]:
        return zip(self.entries, self.joint.shards(flat), strict=True)

    def wait(self) -> Gradients:
        """The shards' gradients; none, if these wait for others before they are added up over replicas."""
        self.advance()
        if self._reduced is None:
            return []
        flat = self._reduced.wait()
        if self.divisor != 1:
            flat = [x.div_(self.divisor) for x in flat]
        hook = self.group.options.all_reduce_hook
        if hook is not None:
            for x in flat:
                hook(x)
        return [(entry, [_like(entry.param, x) for x in held]) for entry, held in self._by_entry(flat)]


def _like(param: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the dtype, and on the device, of the shards that it is for."""
    if grad.dtype == param.dtype and grad.device == param.device:
        return grad
    return grad.to(param.device, param.dtype)


def start(group: Group, gradients: Gradients, divisor: float) -> list[Reduction]:
    """Start to reduce gradients of whole parameters: one collective for each dtype."""
    by_dtype: dict[torch.dtype, Gradients] = {}
    for entry, grads in gradients:
        by_dtype.setdefault(group.options.policy.reduced(grads[0].dtype), []).append((entry, grads))
    started = []
    for dtype, some in by_dtype.items():
        entries = [entry for entry, _ in some]
        joint = group.joint(entries)
        before, after = _divisors(divisor, dtype)
        handle = joint.start_reduce([grads for _, grads in some], dtype, before)
        started.append(Reduction(group, joint, entries, handle, after))
    return started


def _divisors(divisor: float, dtype: torch.dtype) -> tuple[float, float]:
    """By what to divide before and after gradients are added up: half precision overflows, or loses small ones, where
    all of it is done at one end."""
    if dtype is not torch.float16:
        return 1, divisor
    before = 2.0 ** (math.frexp(divisor)[1] // 2)
    return before, divisor / before
