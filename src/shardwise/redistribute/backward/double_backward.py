"""What keeps collectives of backward passes in the graph, on all ranks alike.

In a backward pass that will itself be differentiated, every rank must record the same collectives, and run all of them
in the next pass, or they would not meet. But what torch records may differ between ranks: of an empty shard it has
gradients for constants that are none elsewhere, which cuts off what comes before and what comes after; and of what
ranks gather, each may use another part. So each collective of such a pass is tied to a leaf that every later pass is
told to reach. Where ranks differ in what the gradients of the pass lead to (`reach`), these are tied to all collectives
that it recorded, and to all of the graph that it went through. The next pass goes through all of it, with zeros where
nothing else comes, on all ranks: leaves that it would not reach get those. Torch runs nodes in the reverse order of
their recording, so that they meet in order.

In the simulator a collective is one node for all ranks, which cannot miss each other. They are tied all the same: a
program communicates there what it communicates on ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor

_size = torch._C.TensorBase.size
_disabled = torch._C.DisableTorchFunctionSubclass


class Trail:
    """What a pass that will be differentiated records: the results of its collectives, of each those that are held
    here, and the leaves that they lead to."""

    __slots__ = ("anchors", "began", "recorded", "thread")

    def __init__(self) -> None:
        self.thread, self.began = get_ident(), torch.autograd._get_sequence_nr()
        self.recorded: list[list[Tensor]] = []
        self.anchors: dict[torch.device, Tensor] = {}

    def anchor(self, device: torch.device) -> Tensor:
        if device not in self.anchors:
            self.anchors[device] = made = torch.zeros((), device=device, requires_grad=True)
            _held[id(made)] = _Held(ref(made, partial(_forget, id(made))))
        return self.anchors[device]

    def needs_no_anchors(self) -> None:
        """All ranks find the same on the way from the gradients, and so does every pass that asks for nothing between
        these and what the pass went through."""
        for anchor in self.anchors.values():
            _held[id(anchor)].since = self.began


@dataclass
class _Held:
    """An anchor that later passes are to reach: all of them, or those that ask for what was there before a certain
    number was given to a node."""

    anchor: ref[Tensor]
    since: int | None = None


def _forget(key: int, anchor: ref[Tensor]) -> None:
    _held.pop(key, None)


_held: dict[int, _Held] = {}
_trails: list[Trail] = []  # the newest last
_untrailed = Trail()  # of passes that began at plain tensors


def anchors(asked: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """The leaves that a pass must reach to meet all recorded collectives that it has to, if it is asked for the
    gradients of some tensors; or all there are."""
    first = -1 if asked is None else min(map(_number_of, asked), default=-1)
    held = ((found.anchor(), found.since) for found in list(_held.values()))
    return tuple(anchor for anchor, since in held if anchor is not None and (since is None or first < since))


def _number_of(x: Tensor) -> float:
    """When a tensor became part of a graph. Leaves are at its end; on other devices threads count for themselves."""
    with _disabled():
        node = x.grad_fn
        return inf if node is None else node._sequence_nr() if x.device.type == "cpu" else -1


def let_go() -> None:
    """Forget the anchors' own gradients: of no use, they would keep what they were computed from."""
    for anchor in anchors():
        anchor.grad = None


def anchored(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients, all of them part of the graph, and leading to an anchor."""
    own = _trail()
    return [_Tied.apply(g, own.anchor(g.device)) for g in grads]


def left_behind(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Results of a recorded collective, noted for those who ask for the gradients of this pass."""
    if _trails:
        _trail().recorded.append([x for x in outputs if x.requires_grad])
    return outputs


def _trail() -> Trail:
    """That of the pass that goes on in this thread; or in a device's own, which works for whoever came last."""
    me = get_ident()
    return next((own for own in reversed(_trails) if own.thread == me), (_trails or [_untrailed])[-1])


@contextmanager
def trail() -> Iterator[Trail]:
    """What is recorded inside."""
    own = Trail()
    _trails.append(own)
    try:
        yield own
    finally:
        _trails[:] = [other for other in _trails if other is not own]


def tied(grads: Sequence[Tensor], recorded: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients from which every collective that was recorded on the way to them can be reached."""
    with _disabled():
        if not recorded:
            return [_Tied.apply(g, _untrailed.anchor(g.device)) for g in grads]
        knot = _Knot.apply(*recorded)
        return [_Tied.apply(g, knot) for g in grads]


class _Tied(torch.autograd.Function):
    """A tensor as it is, part of the graph of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.device = other.device
        return x.detach()  # a view could not be written to, as users do to gradients

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.needs_input_grad[0] else None, torch.zeros((), device=ctx.device)


class _Knot(torch.autograd.Function):
    """Zero, part of the graphs of some tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.kinds = [(_size(x), x.dtype, x.device) for x in tensors]  # of shards, even if they are DTensors
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.kinds)
