"""Ops of one's own, to give rules to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sweep import normal
from torch import Tensor


def custom(schema: str, function: Callable, *, tags: Any = ()) -> Any:
    """A custom op that runs `function`, on meta tensors too; differentiable as its pieces are."""
    library = torch.library.Library("registertest", "FRAGMENT")
    name = library.define(schema, tags=tags)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    _libraries.append(library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.registertest, packet), overload or "default")


_libraries: list[torch.library.Library] = []  # an op lives as long as its library


@torch.library.custom_op("registertest::affine", mutates_args=())
def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


affine.register_fake(lambda x, w, b: x.new_empty(x.shape[0], w.shape[1]))
affine.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad, grad.sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)
AFFINE = (normal(5, 4), normal(4, 3), normal(3))


@torch.library.custom_op("registertest::positives", mutates_args=())
def _positives(x: Tensor) -> Tensor:
    return x[x > 0].clone()


positives: Any = torch.ops.registertest.positives
"""How many there are depends on the data, and nobody has said how it runs on shards."""
