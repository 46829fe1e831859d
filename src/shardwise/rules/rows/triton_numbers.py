"""What is computed of a few numbers of each row, as Triton programs."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from shardwise.rules.rows import row_numbers
from shardwise.rules.rows.row_passes import WEIGHT
from shardwise.rules.rows.triton_layout import MOST_ROWS, ceil_div, exponential
from shardwise.rules.rows.triton_program import kinds, program
from shardwise.rules.rows.triton_rows import combined

BLOCK_OF_ROWS = 128
"""Rows whose numbers a program computes."""

ROWS_OF_ONE = 2048
"""Rows that a program adds up at once if it is the only one."""

MOST_OF_ONE = 1 << 16
"""More rows than these are added up by several."""


@program()
def _terms(sums, top, num_rows, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    shift = tl.load(sums + row, mask=exists, other=0.0) - tl.load(top + row, mask=exists, other=0.0)
    total = tl.load(sums + num_rows + row, mask=exists, other=0.0)
    tl.store(sums + num_rows + row, total * exponential(shift), mask=exists)
    if SMOOTHED:
        weights = tl.load(sums + 4 * num_rows + row, mask=exists, other=0.0)
        logits = tl.load(sums + 3 * num_rows + row, mask=exists, other=0.0)
        tl.store(sums + 3 * num_rows + row, logits + shift * weights, mask=exists)


def row_terms(sums: Tensor, top: Tensor) -> None:
    num_rows = top.numel()
    if not (_is_taken(sums, num_rows) and sums.is_contiguous()):
        return row_numbers.row_terms.function(sums, top)
    top, smoothed = top.contiguous(), sums.size(0) > WEIGHT
    key = num_rows, smoothed, kinds(sums, top)
    _terms(key, _blocks(num_rows), 4, sums, top, num_rows, smoothed, BLOCK_OF_ROWS)
    return None


@program(debug=True)  # so that what is asserted is looked at
def _losses(
    sums,
    top,
    largest,
    target,
    weights,
    of_classes,
    found,
    numbers,
    num_rows,
    num_ranks,
    ignore,
    smoothing,
    part,
    num_classes,
    z_loss,
    TOP: tl.constexpr,
    LARGEST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NUMBERS: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `row_numbers.row_losses` gives for each row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    named = tl.load(target + row, mask=exists, other=ignore).to(tl.int64)
    counted = named != ignore
    tl.device_assert((named >= 0) & (named < num_classes) | (named == ignore) | ~exists, "a target names no class")
    if TOP:
        highest = tl.load(top + row, mask=exists, other=0.0)
        total = tl.load(sums + num_rows + row, mask=exists, other=1.0)
        picked = tl.load(sums + 2 * num_rows + row, mask=exists, other=0.0)
        logits = tl.load(sums + 3 * num_rows + row, mask=exists, other=0.0) if SMOOTHED else total
    else:
        highest, total, picked, logits, _ = combined(sums, row, exists, num_rows, num_ranks, True, SMOOTHED, NUM_SUMS)
    picked -= highest
    log_total = tl.log(total)
    if WEIGHTED:
        count = tl.load(weights + row, mask=exists & counted, other=0.0).to(tl.float32)
        of_all = tl.load(of_classes).to(tl.float32) if SMOOTHED else 0.0
    else:
        count = tl.where(counted, 1.0, 0.0)
        of_all = num_classes
    loss = log_total - picked
    if WEIGHTED:
        loss *= count
    if SMOOTHED:
        loss = (1 - smoothing) * loss + part * (log_total * of_all - logits)
    if Z_LOSS:
        loss += z_loss * (log_total + highest) * (log_total + highest)
    tl.store(found + row, tl.where(counted, loss, 0.0), mask=exists)
    tl.store(found + num_rows + row, count, mask=exists)
    if NUMBERS:
        norm = 1.0 / total
        chance = exponential(picked) * norm
        if LARGEST:
            norm *= exponential(tl.load(largest + row, mask=exists, other=0.0) - highest)
        tl.store(numbers + row, highest, mask=exists)
        tl.store(numbers + num_rows + row, norm, mask=exists)
        if NUMBERS == 3:
            tl.store(numbers + 2 * num_rows + row, chance - 1.0, mask=exists)
        else:
            mass = (1 - smoothing) * count + 2.0 * z_loss * (log_total + highest)
            if SMOOTHED:
                mass += part * of_all
            at_target = chance * mass - (1 - smoothing + part) * count
            tl.store(numbers + 2 * num_rows + row, at_target, mask=exists)
            tl.store(numbers + 3 * num_rows + row, mass, mask=exists)
            tl.store(numbers + 4 * num_rows + row, log_total + highest, mask=exists)


def row_losses(
    sums: Tensor,
    top: Tensor | None,
    largest: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    of_classes: Tensor | None,
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, batch = target.numel(), target.shape
    if not _is_taken(sums, num_rows):
        options = ignore, smoothing, num_classes, z_loss, for_gradient
        return row_numbers.row_losses.function(sums, top, largest, target, weights, of_classes, *options)
    found = sums.new_empty((2, *batch))
    plain = weights is None and not smoothing and not z_loss
    numbers = sums.new_empty(((3 if plain else 5), *batch) if for_gradient else 0)
    given = [x if x is None else x.contiguous() for x in (sums, top, largest, target, weights, of_classes)]
    num_ranks, num_sums = sums.size(0), sums.size(1)
    sizes = num_rows, num_ranks, ignore, float(smoothing), smoothing / num_classes, num_classes, float(z_loss)
    which: Any = top is not None, largest is not None, weights is not None, smoothing > 0, z_loss > 0, numbers.size(0)
    key = num_rows, num_ranks, num_sums, ignore, num_classes, which, kinds(*given)
    tensors = [found if x is None else x for x in given]
    tile = num_sums, BLOCK_OF_ROWS
    _losses(key, _blocks(num_rows), 4, *tensors, found, numbers, *sizes, *which, *tile, sanitize_overflow=False)
    return found, numbers


@program()
def _loss(rows, value, total, num_rows, MEAN: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    losses = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for at in range(0, num_rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        losses += tl.load(rows + row, mask=row < num_rows, other=0.0)
        if MEAN:
            weights += tl.load(rows + num_rows + row, mask=row < num_rows, other=0.0)
    found = tl.sum(losses, 0)
    if MEAN:
        weight = tl.sum(weights, 0)
        tl.store(total, weight)
        found /= weight
        if SMOOTHED:
            found = tl.where(weight == 0.0, float("nan"), found)
    tl.store(value, found.to(value.dtype.element_ty))


def loss_of_rows(rows: Tensor, mean: bool, smoothed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows = rows.numel() // 2
    if not (_is_taken(rows, num_rows, MOST_OF_ONE) and rows.is_contiguous()):
        return row_numbers.loss_of_rows.function(rows, mean, smoothed, dtype)
    value, total = rows.new_empty((), dtype=dtype), rows.new_empty(())
    key, options = (num_rows, mean, smoothed, dtype, kinds(rows)), (mean, smoothed, ROWS_OF_ONE)
    _loss(key, (1, 1), 8, rows, value, total, num_rows, *options)
    return value, total


def _is_taken(numbers: Tensor, num_rows: int, most: int = MOST_ROWS) -> bool:
    """Whether it is not left to torch: double precision, and too many rows or none, are."""
    return numbers.dtype == torch.float32 and 0 < num_rows <= most


def _blocks(num_rows: int) -> tuple[int, int]:
    return ceil_div(num_rows, BLOCK_OF_ROWS), 1
