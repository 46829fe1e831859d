"""Programs that recompute: each is run on plain tensors and on DTensors, and must give the same.

A checkpoint counts the tensors that autograd saves, compares them with those saved when
it recomputes, begins to do so when the first one is asked for and stops at the last one; ranks that save at different
places communicate in different orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from bodies import R, S, doubles
from bodies_uneven_ranks import Program, add_program, program


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The result and the gradients; the function is also new to us, so that planning takes place within."""
    sw.clear_cache()
    out: Any = checkpoint(function, *tensors, use_reentrant=False)
    out.square().sum().backward()
    grads = [x.grad.clone() for x in tensors if x.grad is not None]
    for x in tensors:
        x.grad = None
    return [out.detach(), *grads]


torch.manual_seed(0)


@program(3, x=(doubles(5, 4), [S(0)]))
def recomputed_results_without_a_gradient(x: Tensor) -> list[Tensor]:
    """Autograd saves the indices, and a checkpoint keeps them as they are: by then they are those of the whole."""
    return [
        *recomputed(lambda x: x.topk(2, -1)[0].sin(), x),
        *recomputed(lambda x: x.sort(-1)[0].sin(), x),
        *recomputed(lambda x: x.max(-1)[0].sin(), x),
        *recomputed(lambda x: x.cummax(-1)[0].sin(), x),
    ]


@program(3, x=(doubles(5, 4), [S(0)]))
def recomputed_calls_that_were_planned_in_between(x: Tensor) -> list[Tensor]:
    """Torch is asked about a call while it is planned; a checkpoint must not hear what autograd saves of that."""
    return [
        *recomputed(lambda x: x[x[:, 0] > 0], x),
        *recomputed(lambda x: torch.where(x > 0, x.sin(), x * 2), x),
        *recomputed(lambda x: x.gather(1, x.argsort(1)) * x, x),
        *recomputed(lambda x: F.cross_entropy(x, x.argmax(1)), x),
        *recomputed(lambda x: x.index_add(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0]), x),
    ]


def mixed(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function with something to communicate before it, in both directions."""
    return lambda x, w: function((x * w.sum()).tanh() @ w, w)


def kernel(w: Tensor) -> Tensor:
    return w[:3, :3, None, None].expand(3, 3, 2, 2) * 1


IMAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": lambda y, w: F.max_pool2d(y, 2, 1),
    "average": lambda y, w: F.avg_pool2d(y, 2, 1),
    "convolution": lambda y, w: F.conv2d(y, kernel(w)),
    "transposed_convolution": lambda y, w: F.conv_transpose2d(y, kernel(w)),
    "group_norm": lambda y, w: F.group_norm(y, 3, w[0, :3], w[1, :3]),
    "attention": lambda y, w: F.scaled_dot_product_attention(y, y * 2, y.sin()),
    "upsampling": lambda y, w: F.interpolate(y, size=(1, 2), mode="nearest"),
}


def recomputed_images(name: str) -> Program:
    """A rank with nothing to do for an operator saves something of it if the others do, and only then."""
    return lambda *args: [out for x in args[:-1] for out in recomputed(mixed(IMAGES[name]), x, args[-1])]


for name in IMAGES:
    x, w = doubles(2, 3, 2, 4), doubles(4, 4)
    lying = *((x, [S(dim)]) for dim in range(4)), (w, [S(1)])
    add_program(f"recomputed_{name}_where_some_shards_are_empty", (3,), recomputed_images(name), lying)


@program(3, x=(doubles(5, 4), [S(0)]), w=(doubles(3, 4), [R]))
def gradients_zeroed_in_place_while_some_are_kept_aside(x: Tensor, w: Tensor) -> list[Tensor]:
    """What was to be added to them later is gone as well."""
    layer = nn.Linear(4, 3, bias=False)
    layer.weight = nn.Parameter(w.detach())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    found = []
    for zero in (
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: layer.zero_grad(set_to_none=False),
        lambda: layer.weight.grad.zero_(),  # type: ignore[union-attr]
        lambda: setattr(layer.weight, "grad", torch.ones_like(layer.weight)),
    ):
        with sw.parallel.no_sync():
            layer(x).sin().sum().backward()
        zero()
        with sw.parallel.no_sync():
            layer(x * 2).sin().sum().backward()
        layer(x * 3).sin().sum().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return found
