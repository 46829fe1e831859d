"""The passes over the logits of a loss as Triton programs. All is computed in single precision; double is left to
torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.rules.rows import row_passes
from shardwise.rules.rows.row_passes import MASS
from shardwise.rules.rows.triton_layout import THREADS, beginning, ceil_div, exponential, layout_of, places, read
from shardwise.rules.rows.triton_program import program

LEAST = tl.constexpr(torch.finfo(torch.float32).min)

FLAT = 8192
"""Elements that a program looks at where rows do not matter."""


# Sums


@triton.jit
def _weighed(weight, column, last, WEIGHT: tl.constexpr):
    """What classes weigh."""
    if WEIGHT:
        return tl.load(weight + column, mask=column < last, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.where(column < last, 1.0, 0.0)[None, :]


@program()
def _sums(
    x,
    target,
    weight,
    sums,
    num_rows,
    num_classes,
    start,
    share,
    size_1,
    size_2,
    step_0,
    step_1,
    step_2,
    step,
    TARGET: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHT: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """For each row and each part of it what `row_passes.row_sums` gives. Each lane has a largest logit of its own, and
    sums that are relative to it and renewed whenever it sees a larger one, for four at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    exists = row < num_rows
    begin = x + beginning(row, size_1, size_2, step_0, step_1, step_2)
    if SHARED:
        first = part * share
        last = tl.minimum(first + share, num_classes)
    else:
        first = 0
        last = num_classes
    lane = tl.arange(0, LANES)
    largest = tl.full([ROWS, LANES], LEAST, tl.float32)
    total = tl.zeros([ROWS, LANES], tl.float32)
    logits = tl.zeros([ROWS, LANES], tl.float32)
    weights = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(first, last, 4 * LANES):
        column = at + lane
        a = read(begin, column, step, exists, last, -float("inf"), ROWS)
        b = read(begin, column + LANES, step, exists, last, -float("inf"), ROWS)
        c = read(begin, column + 2 * LANES, step, exists, last, -float("inf"), ROWS)
        d = read(begin, column + 3 * LANES, step, exists, last, -float("inf"), ROWS)
        now = tl.maximum(largest, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        shift = largest - now
        a -= now
        b -= now
        c -= now
        d -= now
        total = total * exponential(shift) + (exponential(a) + exponential(b)) + (exponential(c) + exponential(d))
        if SMOOTHED:
            of_a = _weighed(weight, column, last, WEIGHT)
            of_b = _weighed(weight, column + LANES, last, WEIGHT)
            of_c = _weighed(weight, column + 2 * LANES, last, WEIGHT)
            of_d = _weighed(weight, column + 3 * LANES, last, WEIGHT)
            logits += tl.where(weights != 0, shift * weights, 0.0)
            logits += tl.where((column < last)[None, :], a * of_a, 0.0)
            logits += tl.where((column + LANES < last)[None, :], b * of_b, 0.0)
            logits += tl.where((column + 2 * LANES < last)[None, :], c * of_c, 0.0)
            logits += tl.where((column + 3 * LANES < last)[None, :], d * of_d, 0.0)
            weights += (of_a + of_b) + (of_c + of_d)
        largest = now
    top = tl.max(largest, 1)
    shift = largest - top[:, None]
    out = sums + part.to(tl.int64) * NUM_SUMS * num_rows + row
    tl.store(out, top, mask=exists)
    tl.store(out + num_rows, tl.sum(total * exponential(shift), 1), mask=exists)
    if TARGET:
        local = tl.load(target + row, mask=exists, other=0).to(tl.int64) - start
        is_here = exists & (local >= first) & (local < last)
        picked = tl.load(begin + local * step, mask=is_here, other=0.0).to(tl.float32)
        tl.store(out + 2 * num_rows, picked, mask=exists)
    if SMOOTHED:
        logits += tl.where(weights != 0, shift * weights, 0.0)
        tl.store(out + 3 * num_rows, tl.sum(logits, 1), mask=exists)
        tl.store(out + 4 * num_rows, tl.sum(weights, 1), mask=exists)


@triton.jit
def combined(
    parts, row, exists, num_rows, num_parts, TARGET: tl.constexpr, SMOOTHED: tl.constexpr, NUM_SUMS: tl.constexpr
):
    """The sums of rows from those of their parts."""
    largest = tl.full(row.shape, LEAST, tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    picked = tl.zeros(row.shape, tl.float32)
    logits = tl.zeros(row.shape, tl.float32)
    weights = tl.zeros(row.shape, tl.float32)
    for part in range(num_parts):
        of_part = parts + part * NUM_SUMS * num_rows + row
        found = tl.load(of_part, mask=exists, other=0.0)
        now = tl.maximum(largest, found)
        total *= exponential(largest - now)
        total += tl.load(of_part + num_rows, mask=exists, other=0.0) * exponential(found - now)
        if TARGET:
            picked += tl.load(of_part + 2 * num_rows, mask=exists, other=0.0)
        if SMOOTHED:
            more = tl.load(of_part + 4 * num_rows, mask=exists, other=0.0)
            logits += tl.where(weights != 0, (largest - now) * weights, 0.0)
            logits += tl.where(more != 0, (found - now) * more, 0.0)
            logits += tl.load(of_part + 3 * num_rows, mask=exists, other=0.0)
            weights += more
        largest = now
    return largest, total, picked, logits, weights


@program()
def _joined(
    parts,
    sums,
    num_rows,
    num_parts,
    TARGET: tl.constexpr,
    SMOOTHED: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    found = combined(parts, row, exists, num_rows, num_parts, TARGET, SMOOTHED, NUM_SUMS)
    largest, total, picked, logits, weights = found
    out = sums + row
    tl.store(out, largest, mask=exists)
    tl.store(out + num_rows, total, mask=exists)
    if TARGET:
        tl.store(out + 2 * num_rows, picked, mask=exists)
    if SMOOTHED:
        tl.store(out + 3 * num_rows, logits, mask=exists)
        tl.store(out + 4 * num_rows, weights, mask=exists)


def row_sums(x: Tensor, target: Tensor | None, start: int, dim: int, weight: Tensor | None, smoothed: bool) -> Tensor:
    layout = layout_of(dim, x)
    if layout is None or not layout.num_rows or not layout.num_classes:
        return row_passes.row_sums.function(x, target, start, dim, weight, smoothed)
    target, weight = (given if given is None else given.contiguous() for given in (target, weight))
    has_target, num_rows, parts = target is not None, layout.num_rows, layout.shares[1]
    num_sums, batch = 2 + has_target + 2 * smoothed, (*x.shape[:dim], *x.shape[dim + 1 :])
    shape = (num_sums, *batch) if parts == 1 else (parts, num_sums, *batch)
    found = torch.empty(shape, dtype=torch.float32, device=x.device)
    given = x, x if target is None else target, x if weight is None else weight, found
    sizes = num_rows, layout.num_classes, start, layout.share, *layout.places
    which = has_target, smoothed, weight is not None, num_sums, parts > 1, layout.rows, layout.lanes
    _sums((layout, start, which), layout.shares, layout.num_warps, given, (*sizes, *which))
    if parts == 1:
        return found
    sums, of_parts = found.new_empty(shape[1:]), (has_target, smoothed, num_sums, THREADS)
    sizes = num_rows, parts, *of_parts
    _joined((layout, *of_parts), (ceil_div(num_rows, THREADS), 1), 4, (found, sums), sizes)
    return sums


# Gradients


@program()
def _gradient(
    kept,
    out,
    numbers,
    grad,
    total,
    weight,
    target,
    num_rows,
    num_classes,
    start,
    ignore,
    part,
    grad_step,
    numbers_step,
    size_1,
    size_2,
    step_0,
    step_1,
    step_2,
    step,
    out_0,
    out_1,
    out_2,
    out_step,
    OF_LOGITS: tl.constexpr,
    TOTAL: tl.constexpr,
    MASS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Exponentials of logits, or what is kept of them, times their row's factor, less what smoothing takes; but the
    target's. The last rows first: those that were read last are still in the cache."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    begin = kept + beginning(row, size_1, size_2, step_0, step_1, step_2)
    found = read(begin, column, step, exists, num_classes, 0.0, ROWS)
    named = tl.load(target + row, mask=exists, other=ignore).to(tl.int64)
    upstream = tl.load(grad + row * grad_step, mask=exists, other=0.0).to(tl.float32)
    if TOTAL:
        upstream /= tl.load(total)
    upstream = tl.where(named == ignore, 0.0, upstream)
    of_row = numbers + row
    factor = tl.load(of_row + numbers_step, mask=exists, other=0.0) * upstream
    if MASS:
        factor *= tl.load(of_row + 3 * numbers_step, mask=exists, other=0.0)
    if OF_LOGITS:
        found = exponential(found - tl.load(of_row, mask=exists, other=0.0)[:, None])
    found *= factor[:, None]
    if SMOOTHED:
        found -= (upstream * part)[:, None] * _weighed(weight, column, num_classes, WEIGHT)
    of_target = tl.load(of_row + 2 * numbers_step, mask=exists, other=0.0) * upstream
    local = (named - start).to(tl.int32)
    found = tl.where(column[None, :] == local[:, None], of_target[:, None], found)
    begin = out + beginning(row, size_1, size_2, out_0, out_1, out_2)
    is_there = exists[:, None] & (column < num_classes)[None, :]
    tl.store(places(begin, column, out_step, ROWS), found.to(out.dtype.element_ty), mask=is_there)


def row_gradient(
    kept: Tensor,
    out: Tensor,
    of_logits: bool,
    numbers: Tensor,
    grad: Tensor,
    total: Tensor | None,
    share: float,
    weight: Tensor | None,
    target: Tensor,
    ignore: int,
    start: int,
    dim: int,
) -> None:
    layout = layout_of(dim, kept, out)
    if layout is None:
        of_classes = share, weight, target, ignore, start, dim
        return row_passes.row_gradient.function(kept, out, of_logits, numbers, grad, total, *of_classes)
    if not (layout.num_rows and layout.num_classes):
        return None
    one_for_all = not any(grad.stride())  # that of a sum, or of a mean
    if not one_for_all:
        grad = grad.contiguous()
    if not numbers.is_contiguous() and not numbers[0].is_contiguous():
        numbers = numbers.contiguous()
    target, weight = target.contiguous(), weight if weight is None else weight.contiguous()
    rows = kept, out, numbers, grad, numbers if total is None else total
    classes = kept if weight is None else weight, target
    sizes = layout.num_rows, layout.num_classes, start, ignore, share, int(not one_for_all), numbers.stride(0)
    which = of_logits, total is not None, numbers.size(0) > MASS, share != 0.0, weight is not None
    key = layout, start, ignore, sizes[-2:], which
    tile = layout.rows, layout.classes
    _gradient(key, layout.tiles, layout.tile_warps, (*rows, *classes), (*sizes, *layout.places, *which, *tile))
    return None


@program()
def _scaled(x, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * by
        tl.store(x + at, found.to(x.dtype.element_ty), mask=at < count)


def scale_by(x: Tensor, factor: Tensor) -> None:
    if x.dtype == torch.float64 or not x.is_contiguous() or not x.numel():
        return row_passes.scale_by.function(x, factor)
    count = x.numel()
    _scaled(count, (ceil_div(count, FLAT), 1), 8, (x, factor), (count, FLAT))
    return None
