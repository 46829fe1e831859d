"""What is computed of a few numbers of each row, as Triton programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.rules.rows import row_numbers
from shardwise.rules.rows.row_passes import WEIGHT
from shardwise.rules.rows.triton_layout import MOST_ROWS, ceil_div, exponential
from shardwise.rules.rows.triton_program import program
from shardwise.rules.rows.triton_rows import combined

BLOCK_OF_ROWS = 128
"""Rows whose numbers a program computes."""

ROWS_OF_ONE = 2048
"""Rows that a program looks at together if it is the only one."""

FEW_ROWS = 1 << 13
"""Up to so many rows a single program computes the losses as well: to launch another would take longer."""

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
    key = num_rows, smoothed
    _terms(key, _blocks(num_rows), 4, (sums, top), (num_rows, smoothed, BLOCK_OF_ROWS))
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
    value,
    whole,
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
    ONE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `row_numbers.row_losses` gives for each row; if this is the `ONE` program, the loss of all as well."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    last = num_rows if ONE else first + BLOCK
    losses = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for at in range(first, last, BLOCK):
        row = at + tl.arange(0, BLOCK)
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
            of_all_ranks = combined(sums, row, exists, num_rows, num_ranks, True, SMOOTHED, NUM_SUMS)
            highest, total, picked, logits, _ = of_all_ranks
        picked -= highest
        log_total = tl.log(total)
        if WEIGHTED:
            count = tl.load(weights + row, mask=exists & counted, other=0.0).to(tl.float32)
            of_all = tl.load(of_classes).to(tl.float32) if SMOOTHED else 0.0
        else:
            count = tl.where(counted & exists, 1.0, 0.0)
            of_all = num_classes
        loss = log_total - picked
        if WEIGHTED:
            loss *= count
        if SMOOTHED:
            loss = (1 - smoothing) * loss + part * (log_total * of_all - logits)
        if Z_LOSS:
            loss += z_loss * (log_total + highest) * (log_total + highest)
        loss = tl.where(counted & exists, loss, 0.0)
        losses += loss
        counts += count
        tl.store(found + row, loss, mask=exists)
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
    if ONE:
        _store_loss(value, whole, losses, counts, MEAN, SMOOTHED)


@triton.jit
def _store_loss(value, whole, losses, counts, MEAN: tl.constexpr, SMOOTHED: tl.constexpr):
    """The loss of all rows, and their weight, which are sums of these."""
    loss = tl.sum(losses, 0)
    count = tl.sum(counts, 0)
    tl.store(whole, count)
    if MEAN:
        loss /= count
        if SMOOTHED:
            loss = tl.where(count == 0.0, float("nan"), loss)
    tl.store(value, loss.to(value.dtype.element_ty))


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
    options = ignore, smoothing, num_classes, z_loss, for_gradient
    if not _is_taken(sums, target.numel()):
        return row_numbers.row_losses.function(sums, top, largest, target, weights, of_classes, *options)
    return _run_losses((sums, top, largest, target, weights, of_classes), *options)


def row_loss(
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
    mean: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, num_rows = (ignore, smoothing, num_classes, z_loss, for_gradient), target.numel()
    if not _is_taken(sums, num_rows, MOST_OF_ONE):
        of_ranks = sums, top, largest, target, weights, of_classes
        return row_numbers.row_loss.function(*of_ranks, *options, mean, dtype)
    value, whole = sums.new_empty((), dtype=dtype), sums.new_empty(())
    given = sums, top, largest, target, weights, of_classes
    if num_rows <= FEW_ROWS:
        return *_run_losses(given, *options, (value, whole), mean), value, whole
    rows, numbers = _run_losses(given, *options)
    key = others = num_rows, mean, smoothing > 0, ROWS_OF_ONE
    _loss(key, (1, 1), 8, (rows, value, whole), others)
    return rows, numbers, value, whole


def _run_losses(
    given: tuple[Tensor | None, ...],
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
    results: tuple[Tensor, ...] = (),
    mean: bool = False,
) -> tuple[Tensor, Tensor]:
    """Where there are `results`, for the loss of all rows and their weight, one program does it all."""
    sums, top, largest, target, weights, _ = given
    assert sums is not None and target is not None
    num_rows, batch = target.numel(), target.shape
    found = sums.new_empty((2, *batch))
    plain = weights is None and not smoothing and not z_loss
    numbers = sums.new_empty(((3 if plain else 5), *batch) if for_gradient else 0)
    num_ranks, num_sums = sums.size(0), sums.size(1)
    sizes = num_rows, num_ranks, ignore, float(smoothing), smoothing / num_classes, num_classes, float(z_loss)
    which: Any = top is not None, largest is not None, weights is not None, smoothing > 0, z_loss > 0, numbers.size(0)
    which += num_sums, bool(results), mean, ROWS_OF_ONE if results else BLOCK_OF_ROWS
    tensors = *(found if x is None else x.contiguous() for x in given), found, numbers, *(results or (found, found))
    grid, num_warps = ((1, 1), 32) if results else (_blocks(num_rows), 4)
    key = num_rows, num_ranks, ignore, num_classes, which
    _losses(key, grid, num_warps, tensors, (*sizes, *which), sanitize_overflow=False)
    return found, numbers


@program()
def _loss(rows, value, whole, num_rows, MEAN: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    losses = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for at in range(0, num_rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        losses += tl.load(rows + row, mask=row < num_rows, other=0.0)
        counts += tl.load(rows + num_rows + row, mask=row < num_rows, other=0.0)
    _store_loss(value, whole, losses, counts, MEAN, SMOOTHED)


def _is_taken(numbers: Tensor, num_rows: int, most: int = MOST_ROWS) -> bool:
    """Whether it is not left to torch: double precision, and too many rows or none, are."""
    return numbers.dtype == torch.float32 and 0 < num_rows <= most


def _blocks(num_rows: int) -> tuple[int, int]:
    return ceil_div(num_rows, BLOCK_OF_ROWS), 1
