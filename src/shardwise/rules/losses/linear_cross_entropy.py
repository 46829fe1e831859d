"""Cross entropy of what a linear layer gives: where its classes and rows may be, and how many rows make a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.layout import Layout
from shardwise.rules.kit.registry import register_function
from shardwise.rules.kit.types import PROGRAM_COST, SUM, AxisPlacement, Call, Local, Rule, Strategy, replicated
from shardwise.rules.losses.chunked_head import Head, losses_of_head
from shardwise.rules.losses.class_losses import cross_entropy
from shardwise.rules.losses.class_rows import Loss

CHUNK_BYTES, CHUNK_BYTES_ON_GPU = 1 << 24, 1 << 25
"""The logits of a chunk take so many on a rank: however many rows there are, more logits are never there."""

FEWEST_ROWS = 256
"""In a chunk: products of matrices with fewer are slow."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
) -> Tensor:
    """The loss of DTensors, for targets that name classes; users' function is `parallel.linear_cross_entropy`."""
    given = (input, linear_weight, target, linear_bias, weight)
    options: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction}
    options |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "dtype": dtype}
    if not has_torch_function(given):
        return with_logits(input, linear_weight, target, **options)
    more: dict[str, Any] = {"chunk_size": chunk_size, "acc_dtype": acc_dtype}
    return handle_torch_function(linear_cross_entropy, given, input, linear_weight, target, **options, **more)


def with_logits(
    x: Tensor,
    layer: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    acc_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """What it stands for."""
    logits = F.linear(x, layer, linear_bias).to(dtype or x.dtype)
    if logits.ndim > 2:  # classes are the second dim
        logits, target = logits.movedim(-1, 1), target.movedim(-1, 1) if target.is_floating_point() else target
    return cross_entropy(logits, target, **options)


# The rule


def _ways(call: Call) -> list[Strategy]:
    """Rows, classes, or both. Sums and means over rows are pending sums; over classes, everything is reduced."""
    last, has_bias = call["input"].ndim - 1, call["linear_bias"] is not None
    bias: list[AxisPlacement] = [None] if has_bias else []
    weight: list[AxisPlacement] = [None] if call["weight"] is not None else []
    found = [replicated(call)]
    for dim in range(last):
        out: AxisPlacement = dim if call["reduction"] == "none" else SUM
        found.append(Strategy((dim, None, dim, *bias, *weight), (out,)))
    cut: list[AxisPlacement] = [0] if has_bias else []
    found.append(Strategy((None, 0, None, *cut, *weight), (None,), 2 * PROGRAM_COST))
    for dim in range(last):
        out = dim if call["reduction"] == "none" else None
        cost = 2 * PROGRAM_COST + 2 * call["input"].numel * call["input"].dtype.itemsize
        found.append(Strategy((dim, 0, dim, *cut, *weight), (out,), cost))
    return found


def _local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    x, layer = ins[:2]
    of_rows = tuple(axis for axes in x.splits[:-1] for axis in axes)
    of_classes = layer.splits[0]
    tokens = tuple(axis for axis in of_classes if axis in of_rows)
    rows = _chunk_rows(call, layer) // max(math.prod(x.mesh.shape[axis] for axis in tokens), 1) or 1
    most = math.prod(max(x.pieces(dim), default=0) for dim in range(len(x.shape) - 1))
    head = Head(
        _loss_of(call),
        call["input"].shape[-1],
        rows,
        max(1, -(-most // rows)),
        call["acc_dtype"],
        tokens,
        tuple(axis for axis in of_classes if axis not in of_rows),
        tuple(axis for axis in of_rows if axis not in of_classes),
    )
    names = ("input", "linear_weight", "target", "linear_bias", "weight")
    return Local(losses_of_head, [*(call[name] for name in names), head], groups=(of_classes,), always=True)


def _chunk_rows(call: Call, layer: Layout) -> int:
    if call["chunk_size"] is not None:
        return call["chunk_size"]
    row = max(max(layer.pieces(0), default=0), 1) * call["input"].dtype.itemsize
    room = CHUNK_BYTES if layer.mesh.device_type == "cpu" else CHUNK_BYTES_ON_GPU
    return max(FEWEST_ROWS, room // row // FEWEST_ROWS * FEWEST_ROWS)


def _loss_of(call: Call) -> Loss:
    num_classes = call["linear_weight"].shape[0]
    return Loss(
        call["reduction"],
        call["ignore_index"],
        max(call["label_smoothing"], 0.0),
        dim=1,
        num_classes=num_classes,
        num_rows=math.prod(call["input"].shape[:-1]),
        probabilities=False,
        split_classes=True,
        split_weight=False,
        dtype=call.outputs[0].dtype,
        z_loss=call["z_loss"],
    )


register_function(
    linear_cross_entropy,
    "Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? weight=None, "
    "str reduction='mean', int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
    "ScalarType? dtype=None, int? chunk_size=None, ScalarType? acc_dtype=None",
    rule=Rule(_ways, _local),
    meta=with_logits,
)
