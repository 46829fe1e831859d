"""What losses over a sharded vocabulary send, on the recording port: how many collectives, and how many bytes, of each
option; and nothing in the backward pass of cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import cross_entropy, linear_cross_entropy

R, S = sw.Replicate(), sw.Shard
MESH = sw.recording((8,), ("tp",))
ROWS, VOCABULARY, WIDTH = 64, 1000, 32
NUMBER = 4 * ROWS  # the bytes of one number for each row, in single precision whatever the logits are in


def made(*shape: int, at: Any = R, dtype: torch.dtype = torch.float32) -> Tensor:
    return sw.DTensor.from_local(_shard(shape, at, dtype), MESH, [at], shape=shape)


def _shard(shape: tuple[int, ...], at: Any, dtype: torch.dtype) -> Tensor:
    local = [-(-size // 8) if at == S(dim) else size for dim, size in enumerate(shape)]
    return torch.empty(local, device="meta", dtype=dtype)


def sent(loss: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[str, int, bool]]:
    with CommDebugMode() as comm:
        out = loss(*(x.requires_grad_() for x in inputs))
        (out.sum() if out.ndim else out).backward()
    return [(c.kind, c.bytes, c.backward) for c in comm.comms]


def two_reductions(num_sums: int) -> list[tuple[str, int, bool]]:
    return [("all_reduce", NUMBER, False), ("all_reduce", num_sums * NUMBER, False)]


TARGET = made(ROWS, dtype=torch.long)
WHOLE, SPLIT = made(VOCABULARY), made(VOCABULARY, at=S(0))
SUMS: list[tuple[dict[str, Any], int]] = [
    ({}, 2),
    ({"ignore_index": 3}, 2),
    ({"z_loss": 0.1}, 2),
    ({"inplace_backward": True}, 2),
    ({"label_smoothing": 0.1}, 3),
    ({"weight": WHOLE}, 2),
    ({"weight": WHOLE, "label_smoothing": 0.1}, 3),
    ({"weight": SPLIT}, 3),
    ({"weight": SPLIT, "label_smoothing": 0.1, "z_loss": 0.1, "ignore_index": 3}, 5),
]
"""Options, and how many sums of each row they need."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    for options, num_sums in SUMS:
        loss = lambda x: cross_entropy(x, TARGET, reduction=reduction, **options)  # noqa: B023, E731
        assert sent(loss, made(ROWS, VOCABULARY, at=S(1), dtype=dtype)) == two_reductions(num_sums), options


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_probabilities(reduction: str) -> None:
    target = made(ROWS, VOCABULARY, at=S(1))
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"weight": WHOLE}, {"weight": SPLIT}):
        loss = lambda x: cross_entropy(x, target, reduction=reduction, **options)  # noqa: B023, E731
        assert sent(loss, made(ROWS, VOCABULARY, at=S(1))) == two_reductions(3), options


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax(function: Callable[..., Tensor]) -> None:
    spent = sent(lambda x: function(x, 1), made(ROWS, VOCABULARY, at=S(1)))
    assert spent == [*two_reductions(1), ("all_reduce", NUMBER, True)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction: str) -> None:
    """The chunks' sums, each chunk's at once where it is small; and once the gradient of the input."""
    of_input = ("all_reduce", 4 * ROWS * WIDTH, True)
    for options, num_sums in SUMS:
        if "inplace_backward" in options:
            continue
        options = {**options, "reduction": reduction}
        loss = lambda x, layer: linear_cross_entropy(x, layer, TARGET, **options)  # noqa: B023, E731
        at_once = sent(loss, made(ROWS, WIDTH), made(VOCABULARY, WIDTH, at=S(0)))
        options["chunk_size"] = ROWS // 4
        by_chunks = sent(loss, made(ROWS, WIDTH), made(VOCABULARY, WIDTH, at=S(0)))
        weights = [("all_gather", 4 * VOCABULARY // 8, False)] if options.get("weight") is SPLIT else []
        smoothed = 2 * ("label_smoothing" in options)
        a_chunk = ("all_gather", (3 + smoothed) * NUMBER // 4, False)
        assert by_chunks == [*weights, *[a_chunk] * 4, of_input], options
        assert at_once == [*weights, *two_reductions(num_sums if not weights else 2 + smoothed // 2), of_input], options


def test_sequence_parallelism() -> None:
    """Whether targets are in range, and the targets; then rows, sums and gradients chunk by chunk."""
    target = made(ROWS, at=S(0), dtype=torch.long)
    spent = sent(
        lambda x, layer: linear_cross_entropy(x, layer, target, chunk_size=16),
        made(ROWS, WIDTH, at=S(0)),
        made(VOCABULARY, WIDTH, at=S(0)),
    )
    rows = 4 * 16 * WIDTH
    a_chunk = [
        ("all_gather", rows // 8, False),
        ("all_gather", 3 * NUMBER // 4, False),
        ("reduce_scatter", rows, False),
    ]
    assert spent == [("all_reduce", 8, False), ("all_gather", 8 * ROWS // 8, False), *a_chunk * 4]
