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
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

_size = torch._C.TensorBase.size
_anchors: dict[torch.device, Tensor] = {}
_trails: list[tuple[int, list[Tensor]]] = []  # of whose passes, by thread, the newest last


def anchors() -> tuple[Tensor, ...]:
    """The leaves that everything recorded leads to."""
    return tuple(_anchors.values())


def let_go() -> None:
    """Forget the anchors' own gradients: of no use, they would keep what they were computed from."""
    for anchor in anchors():
        anchor.grad = None


def anchored(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients, all of them part of the graph, and leading to an anchor."""
    return [_Tied.apply(g, _anchor(g.device)) for g in grads]


def left_behind(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Results of a recorded collective, noted for those who ask for the gradients of this pass."""
    if _trails:
        me = get_ident()  # or a device's own thread, which works for whoever came last
        own = next((noted for thread, noted in reversed(_trails) if thread == me), _trails[-1][1])
        own.extend(x for x in outputs if x.requires_grad)
    return outputs


@contextmanager
def trail() -> Iterator[list[Tensor]]:
    """What is recorded inside."""
    entry: tuple[int, list[Tensor]] = (get_ident(), [])
    _trails.append(entry)
    try:
        yield entry[1]
    finally:
        _trails[:] = [other for other in _trails if other is not entry]


def tied(grads: Sequence[Tensor], recorded: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients from which every collective that was recorded on the way to them can be reached."""
    with torch._C.DisableTorchFunctionSubclass():
        if not recorded:
            return anchored(grads)
        knot = _Knot.apply(*recorded)
        return [_Tied.apply(g, knot) for g in grads]


def _anchor(device: torch.device) -> Tensor:
    anchor = _anchors.get(device)
    if anchor is None:
        anchor = _anchors[device] = torch.zeros((), device=device, requires_grad=True)
    return anchor


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
