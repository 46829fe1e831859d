"""The passes over rows, and what is computed of their numbers, as Triton programs.

A program has a row, or some rows where these lie side by side in memory; a long row is shared by several programs where
there are few rows. Rows may have any strides. All is computed in single precision; double is left to torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.rules.nn import row_numbers, row_passes

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))

LONGEST = 32768
"""Bytes that a program looks at together; more, one part after the other."""

SIDE_BY_SIDE, FEW = 32, 64
"""Rows, and classes, that a program looks at together where neighbours in memory are of different rows."""

ENOUGH = 512
"""So many programs keep a device busy. Where there are fewer rows, each is shared by several."""

ROWS_OF_NUMBERS = 512
"""Rows whose numbers a program computes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where rows are in some tensors, and how many rows and classes a program looks at together."""

    num_rows: int
    num_classes: int
    sizes: tuple[int, int]  # of the inner two of three batch dims
    strides: tuple[tuple[int, int, int, int], ...]  # of each tensor: along the batch dims, and along the row
    rows: int
    classes: int

    @staticmethod
    def of(dim: int, *tensors: Tensor) -> Layout | None:
        """None if it is left to torch: in double precision, or if more than three numbers find a row."""
        batch = [d for d in range(tensors[0].ndim) if d != dim]
        sizes, steps = [tensors[0].shape[d] for d in batch], [[x.stride(d) for d in batch] for x in tensors]
        at = 0
        while at + 1 < len(sizes):  # two dims that are one in all tensors
            if all(step[at] == step[at + 1] * sizes[at + 1] for step in steps):
                sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
                steps = [[*step[:at], *step[at + 1 :]] for step in steps]
            else:
                at += 1
        if len(sizes) > 3 or any(x.dtype == torch.float64 for x in tensors):
            return None
        missing = 3 - len(sizes)
        strides: Any = [(*[0] * missing, *step, x.stride(dim)) for step, x in zip(steps, tensors, strict=True)]
        sizes = [1] * missing + sizes
        num_classes, lies_together = tensors[0].shape[dim], all(stride[3] == 1 for stride in strides)
        longest, most = triton.next_power_of_2(max(num_classes, 1)), LONGEST // max(x.itemsize for x in tensors)
        rows, classes = (1, min(longest, most)) if lies_together else (SIDE_BY_SIDE, min(longest, FEW))
        return Layout(math.prod(sizes), num_classes, (sizes[1], sizes[2]), tuple(strides), rows, classes)

    @property
    def blocks_of_rows(self) -> int:
        return triton.cdiv(self.num_rows, self.rows)

    @property
    def tiles(self) -> tuple[int, int]:
        """Programs, if each looks at one tile."""
        return self.blocks_of_rows, triton.cdiv(self.num_classes, self.classes)

    @property
    def shares(self) -> tuple[int, int]:
        """By how many programs a row is shared, and how many classes each has."""
        parts = triton.cdiv(self.num_classes, self.classes)
        wanted = min(parts, triton.cdiv(ENOUGH, max(self.blocks_of_rows, 1)))
        share = triton.cdiv(parts, max(wanted, 1)) * self.classes
        return max(1, triton.cdiv(self.num_classes, share)), share

    @property
    def options(self) -> dict[str, Any]:
        of_a_warp = 1024 if self.rows == 1 else 512
        num_warps = max(1, min(16, self.rows * self.classes // of_a_warp))
        return {"ROWS": self.rows, "CLASSES": self.classes, "num_warps": num_warps}


@triton.jit
def _beginning(row, size_1, size_2, step_0, step_1, step_2):
    """How far from the first element a row begins."""
    outer = row // size_2
    return (outer // size_1) * step_0 + (outer % size_1) * step_1 + (row % size_2) * step_2


@triton.jit
def _exponential(x):
    return tl.exp2(x * LOG2_E)


# Sums


@triton.jit
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
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """For each row and each part of it: the largest logit and the sum of exponentials, renewed whenever there is a
    larger one; the target's logit; with smoothing, the weighted sum of logits, and of the weights."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1).to(tl.int64)
    exists = row < num_rows
    begin = x + _beginning(row, size_1, size_2, step_0, step_1, step_2)
    first = part * share
    last = tl.minimum(first + share, num_classes)
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    logits = tl.zeros([ROWS], tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    for at in range(first, last, CLASSES):
        column = at + tl.arange(0, CLASSES)
        is_there = exists[:, None] & (column < last)[None, :]
        some = tl.load(begin[:, None] + column[None, :] * step, mask=is_there, other=-float("inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(some, 1))
        shift, less = largest - now, some - now[:, None]
        total = total * _exponential(shift) + tl.sum(_exponential(less), 1)
        if SMOOTHED:
            if WEIGHT:
                each = tl.load(weight + column, mask=column < last, other=0.0).to(tl.float32)
            else:
                each = tl.where(column < last, 1.0, 0.0)
            logits += shift * weights + tl.sum(tl.where(is_there, less * each[None, :], 0.0), 1)
            weights += tl.sum(each, 0)
        largest = now
    out = sums + part * NUM_SUMS * num_rows + row
    tl.store(out, largest, mask=exists)
    tl.store(out + num_rows, total, mask=exists)
    if TARGET:
        local = tl.load(target + row, mask=exists, other=0).to(tl.int64) - start
        is_here = exists & (local >= first) & (local < last)
        picked = tl.load(begin + local * step, mask=is_here, other=0.0).to(tl.float32)
        tl.store(out + 2 * num_rows, picked, mask=exists)
    if SMOOTHED:
        tl.store(out + (2 + TARGET) * num_rows, logits, mask=exists)
        if NUM_SUMS > 3 + TARGET:
            tl.store(out + (3 + TARGET) * num_rows, weights, mask=exists)


@triton.jit
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
    """The sums of rows from those of their parts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    picked = tl.zeros([ROWS], tl.float32)
    logits = tl.zeros([ROWS], tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    for part in range(num_parts):
        of_part = parts + part * NUM_SUMS * num_rows + row
        found = tl.load(of_part, mask=exists, other=0.0)
        now = tl.maximum(largest, found)
        total = total * _exponential(largest - now)
        total += tl.load(of_part + num_rows, mask=exists, other=0.0) * _exponential(found - now)
        if TARGET:
            picked += tl.load(of_part + 2 * num_rows, mask=exists, other=0.0)
        if SMOOTHED:
            more = tl.load(of_part + (3 + TARGET) * num_rows, mask=exists, other=0.0)
            logits += (largest - now) * weights + (found - now) * more
            logits += tl.load(of_part + (2 + TARGET) * num_rows, mask=exists, other=0.0)
            weights += more
        largest = now
    out = sums + row
    tl.store(out, largest, mask=exists)
    tl.store(out + num_rows, total, mask=exists)
    if TARGET:
        tl.store(out + 2 * num_rows, picked, mask=exists)
    if SMOOTHED:
        tl.store(out + (2 + TARGET) * num_rows, logits, mask=exists)


def row_sums(x: Tensor, target: Tensor | None, start: int, dim: int, weight: Tensor | None, smoothed: bool) -> Tensor:
    layout = Layout.of(dim, x)
    if layout is None or not layout.num_rows or not layout.num_classes:
        return row_passes.row_sums.function(x, target, start, dim, weight, smoothed)
    num_sums, (parts, share) = 2 + (target is not None) + smoothed, layout.shares
    of_parts = num_sums + (smoothed and parts > 1)
    batch = (*x.shape[:dim], *x.shape[dim + 1 :])
    found = torch.empty((parts, of_parts, *batch), dtype=torch.float32, device=x.device)
    kinds: dict[str, Any] = {"TARGET": target is not None, "SMOOTHED": smoothed, "NUM_SUMS": of_parts}
    given = x, x if target is None else target.contiguous(), x if weight is None else weight.contiguous(), found
    sizes = layout.num_rows, layout.num_classes, start, share, *layout.sizes, *layout.strides[0]
    _sums[layout.blocks_of_rows, parts](*given, *sizes, **kinds, WEIGHT=weight is not None, **layout.options)
    if parts == 1:
        return found[0]
    sums = torch.empty((num_sums, *batch), dtype=torch.float32, device=x.device)
    _joined[_of_numbers(layout.num_rows)](found, sums, layout.num_rows, parts, **kinds, ROWS=ROWS_OF_NUMBERS)
    return sums


# Gradients of losses


@triton.jit
def _gradient(
    kept,
    out,
    less,
    norm,
    mass,
    grad,
    weight,
    target,
    at_target,
    num_rows,
    num_classes,
    start,
    ignore,
    part,
    grad_step,
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
    LESS: tl.constexpr,
    MASS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """A tile: probabilities times their factor, less what smoothing takes; but the target's."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    is_there = exists[:, None] & (column < num_classes)[None, :]
    begin = kept + _beginning(row, size_1, size_2, step_0, step_1, step_2)
    some = tl.load(begin[:, None] + column[None, :] * step, mask=is_there, other=0.0).to(tl.float32)
    named = tl.load(target + row, mask=exists, other=ignore).to(tl.int64)
    upstream = tl.load(grad + row * grad_step, mask=exists, other=0.0).to(tl.float32)
    upstream = tl.where(named == ignore, 0.0, upstream)
    factor = tl.load(norm + row, mask=exists, other=0.0) * upstream
    if MASS:
        factor *= tl.load(mass + row, mask=exists, other=0.0)
    if LESS:
        some = _exponential(some - tl.load(less + row, mask=exists, other=0.0)[:, None])
    found = some * factor[:, None]
    if SMOOTHED:
        each = (upstream * part)[:, None]
        if WEIGHT:
            each = each * tl.load(weight + column, mask=column < num_classes, other=0.0).to(tl.float32)[None, :]
        found -= each
    of_target = tl.load(at_target + row, mask=exists, other=0.0) * upstream
    found = tl.where((column[None, :] == (named - start)[:, None]), of_target[:, None], found)
    begin = out + _beginning(row, size_1, size_2, out_0, out_1, out_2)
    tl.store(begin[:, None] + column[None, :] * out_step, found.to(out.dtype.element_ty), mask=is_there)


def row_gradient(
    kept: Tensor,
    out: Tensor,
    less: Tensor | None,
    norm: Tensor,
    mass: Tensor | None,
    grad: Tensor,
    share: float,
    weight: Tensor | None,
    target: Tensor,
    at_target: Tensor,
    ignore: int,
    start: int,
    dim: int,
) -> None:
    layout = Layout.of(dim, kept, out)
    if layout is None:
        of_targets = target, at_target, ignore, start, dim
        return row_passes.row_gradient.function(kept, out, less, norm, mass, grad, share, weight, *of_targets)
    if not (layout.num_rows and layout.num_classes):
        return None
    one_for_all = not any(grad.stride())  # that of a sum, or of a mean
    grad = grad if one_for_all else grad.contiguous()
    rows = [x if x is None else x.contiguous() for x in (less, norm, mass)]
    given = [
        kept,
        out,
        *(kept if x is None else x for x in rows),
        grad,
        kept if weight is None else weight.contiguous(),
    ]
    sizes = layout.num_rows, layout.num_classes, start, ignore, share, int(not one_for_all), *layout.sizes
    kinds = {"LESS": less is not None, "MASS": mass is not None, "SMOOTHED": bool(share), "WEIGHT": weight is not None}
    _gradient[layout.tiles](
        *given,
        target.contiguous(),
        at_target.contiguous(),
        *sizes,
        *layout.strides[0],
        *layout.strides[1],
        **kinds,
        **layout.options,
    )
    return None


# Softmax


@triton.jit
def _softmax(
    x,
    out,
    less,
    total,
    num_rows,
    num_classes,
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
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    is_there = exists[:, None] & (column < num_classes)[None, :]
    begin = x + _beginning(row, size_1, size_2, step_0, step_1, step_2)
    some = tl.load(begin[:, None] + column[None, :] * step, mask=is_there, other=0.0).to(tl.float32)
    some -= tl.load(less + row, mask=exists, other=0.0)[:, None]
    whole = tl.load(total + row, mask=exists, other=1.0)
    if LOG:
        found = some - tl.log(whole)[:, None]
    else:
        found = _exponential(some) * (1.0 / whole)[:, None]
    begin = out + _beginning(row, size_1, size_2, out_0, out_1, out_2)
    tl.store(begin[:, None] + column[None, :] * out_step, found.to(out.dtype.element_ty), mask=is_there)


def row_softmax(x: Tensor, out: Tensor, less: Tensor, total: Tensor, dim: int, log: bool) -> None:
    layout = Layout.of(dim, x, out)
    if layout is None:
        return row_passes.row_softmax.function(x, out, less, total, dim, log)
    if layout.num_rows and layout.num_classes:
        rows = less.contiguous(), total.contiguous(), layout.num_rows, layout.num_classes
        places = *layout.sizes, *layout.strides[0], *layout.strides[1]
        _softmax[layout.tiles](x, out, *rows, *places, LOG=log, **layout.options)
    return None


@triton.jit
def _products(
    grad,
    known,
    sums,
    num_rows,
    num_classes,
    share,
    size_1,
    size_2,
    step_0,
    step_1,
    step_2,
    step,
    known_0,
    known_1,
    known_2,
    known_step,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1).to(tl.int64)
    exists = row < num_rows
    begin = grad + _beginning(row, size_1, size_2, step_0, step_1, step_2)
    beside = known + _beginning(row, size_1, size_2, known_0, known_1, known_2)
    total = tl.zeros([ROWS], tl.float32)
    for at in range(part * share, tl.minimum(part * share + share, num_classes), CLASSES):
        column = at + tl.arange(0, CLASSES)
        is_there = exists[:, None] & (column < tl.minimum(part * share + share, num_classes))[None, :]
        some = tl.load(begin[:, None] + column[None, :] * step, mask=is_there, other=0.0).to(tl.float32)
        if not LOG:
            some *= tl.load(beside[:, None] + column[None, :] * known_step, mask=is_there, other=0.0).to(tl.float32)
        total += tl.sum(some, 1)
    tl.store(sums + part * num_rows + row, total, mask=exists)


def row_products(grad: Tensor, known: Tensor, dim: int, log: bool) -> Tensor:
    layout = Layout.of(dim, grad, known)
    if layout is None or not (layout.num_rows and layout.num_classes):
        return row_passes.row_products.function(grad, known, dim, log)
    parts, share = layout.shares
    sums = torch.empty((parts, *grad.shape[:dim], *grad.shape[dim + 1 :]), dtype=torch.float32, device=grad.device)
    places = layout.num_rows, layout.num_classes, share, *layout.sizes, *layout.strides[0], *layout.strides[1]
    _products[layout.blocks_of_rows, parts](grad, known, sums, *places, LOG=log, **layout.options)
    return sums[0] if parts == 1 else sums.sum(0)


@triton.jit
def _softmax_gradient(
    grad,
    known,
    out,
    total,
    num_rows,
    num_classes,
    size_1,
    size_2,
    step_0,
    step_1,
    step_2,
    step,
    known_0,
    known_1,
    known_2,
    known_step,
    out_0,
    out_1,
    out_2,
    out_step,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    is_there = exists[:, None] & (column < num_classes)[None, :]
    begin = grad + _beginning(row, size_1, size_2, step_0, step_1, step_2)
    beside = known + _beginning(row, size_1, size_2, known_0, known_1, known_2)
    some = tl.load(begin[:, None] + column[None, :] * step, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(beside[:, None] + column[None, :] * known_step, mask=is_there, other=0.0).to(tl.float32)
    whole = tl.load(total + row, mask=exists, other=0.0)[:, None]
    if LOG:
        found = some - _exponential(y) * whole
    else:
        found = (some - whole) * y
    begin = out + _beginning(row, size_1, size_2, out_0, out_1, out_2)
    tl.store(begin[:, None] + column[None, :] * out_step, found.to(out.dtype.element_ty), mask=is_there)


def row_softmax_gradient(grad: Tensor, known: Tensor, out: Tensor, total: Tensor, dim: int, log: bool) -> None:
    layout = Layout.of(dim, grad, known, out)
    if layout is None:
        return row_passes.row_softmax_gradient.function(grad, known, out, total, dim, log)
    if layout.num_rows and layout.num_classes:
        places = layout.num_rows, layout.num_classes, *layout.sizes, *(s for steps in layout.strides for s in steps)
        _softmax_gradient[layout.tiles](grad, known, out, total.contiguous(), *places, LOG=log, **layout.options)
    return None


# Numbers of rows


def _of_numbers(num_rows: int) -> tuple[int]:
    return (triton.cdiv(num_rows, ROWS_OF_NUMBERS),)


@triton.jit
def _judged(target, verdict, num_rows, ignore, num_classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    named = tl.load(target + row, mask=row < num_rows, other=ignore).to(tl.int64)
    is_bad = (named != ignore) & ((named < 0) | (named >= num_classes))
    if tl.max(is_bad.to(tl.int32), 0) > 0:
        tl.store(verdict, 0)


def are_classes(target: Tensor, ignore: int, num_classes: int) -> Tensor:
    verdict = torch.ones((), dtype=torch.int32, device=target.device)
    if num_rows := target.numel():
        _judged[_of_numbers(num_rows)](
            target.contiguous(), verdict, num_rows, ignore, num_classes, BLOCK=ROWS_OF_NUMBERS
        )
    return verdict


@triton.jit
def _ordered(x, out, count, BLOCK: tl.constexpr):
    """The bits of x, which are integers to this program, with those of negative floats in reverse order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < count, other=0)
    tl.store(out + at, bits ^ ((bits >> 31) & 0x7FFFFFFF), mask=at < count)


def in_order(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.int32) or not x.numel():
        return row_numbers.in_order.function(x)
    bits = x.contiguous().view(torch.int32)
    out = torch.empty_like(bits)
    _ordered[_of_numbers(bits.numel())](bits, out, bits.numel(), BLOCK=ROWS_OF_NUMBERS)
    return out.view(torch.int32 if x.dtype == torch.float32 else torch.float32)


@triton.jit
def _terms(sums, top, of_classes, num_rows, last, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    shift = tl.load(sums + row, mask=exists, other=0.0) - tl.load(top + row, mask=exists, other=0.0)
    total = tl.load(sums + num_rows + row, mask=exists, other=0.0)
    tl.store(sums + num_rows + row, total * _exponential(shift), mask=exists)
    if SMOOTHED:
        logits = tl.load(sums + last * num_rows + row, mask=exists, other=0.0)
        logits += shift * tl.load(of_classes).to(tl.float32)
        tl.store(sums + last * num_rows + row, logits, mask=exists)


def row_terms(sums: Tensor, top: Tensor, of_classes: Tensor | None) -> None:
    num_rows = top.numel()
    if sums.dtype != torch.float32 or not sums.is_contiguous() or not num_rows:
        return row_numbers.row_terms.function(sums, top, of_classes)
    given = sums, top.contiguous(), top if of_classes is None else of_classes, num_rows, len(sums) - 1
    _terms[_of_numbers(num_rows)](*given, SMOOTHED=of_classes is not None, BLOCK=ROWS_OF_NUMBERS)
    return None


@triton.jit
def _losses(
    sums,
    top,
    largest,
    target,
    weights,
    of_classes,
    losses,
    counts,
    numbers,
    num_rows,
    last,
    ignore,
    smoothing,
    part,
    num_classes,
    z_loss,
    LARGEST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `row_numbers.row_losses` gives for each row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    counted = tl.load(target + row, mask=exists, other=0).to(tl.int64) != ignore
    highest = tl.load(top + row, mask=exists, other=0.0)
    total = tl.load(sums + row, mask=exists, other=1.0)
    picked = tl.load(sums + num_rows + row, mask=exists, other=0.0) - highest
    log_total = tl.log(total)
    if WEIGHTED:
        count = tl.load(weights + row, mask=exists, other=0.0).to(tl.float32)
        of_all = tl.load(of_classes).to(tl.float32) if SMOOTHED else 0.0
    else:
        count = tl.where(counted, 1.0, 0.0)
        of_all = num_classes
    loss = log_total - picked
    if WEIGHTED:
        loss *= count
    if SMOOTHED:
        loss = (1 - smoothing) * loss
        loss += part * (log_total * of_all - tl.load(sums + last * num_rows + row, mask=exists, other=0.0))
    if Z_LOSS:
        loss += z_loss * (log_total + highest) * (log_total + highest)
    tl.store(losses + row, tl.where(counted, loss, 0.0), mask=exists)
    tl.store(counts + row, count, mask=exists)
    if NUMBERS:
        norm = 1.0 / total
        chance = _exponential(picked) * norm
        if LARGEST:
            norm *= _exponential(tl.load(largest + row, mask=exists, other=0.0) - highest)
        tl.store(numbers + row, norm, mask=exists)
        if NUMBERS == 2:
            tl.store(numbers + num_rows + row, chance - 1.0, mask=exists)
        else:
            mass = (1 - smoothing) * count + 2.0 * z_loss * (log_total + highest)
            if SMOOTHED:
                mass += part * of_all
            tl.store(numbers + num_rows + row, chance * mass - (1 - smoothing + part) * count, mask=exists)
            tl.store(numbers + 2 * num_rows + row, mass, mask=exists)
            tl.store(numbers + 3 * num_rows + row, log_total + highest, mask=exists)


def row_losses(
    sums: Tensor,
    top: Tensor,
    largest: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    of_classes: Tensor | None,
    ignore: int,
    smoothing: float,
    num_classes: int,
    z_loss: float,
    for_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = top.numel()
    if sums.dtype != torch.float32 or not num_rows or (of_classes is not None and of_classes.ndim):
        options = ignore, smoothing, num_classes, z_loss, for_gradient
        return row_numbers.row_losses.function(sums, top, largest, target, weights, of_classes, *options)
    losses, counts = torch.empty_like(top), torch.empty_like(top)
    plain = weights is None and not smoothing and not z_loss
    numbers = top.new_empty((2 if plain else 4, *top.shape) if for_gradient else 0)
    optional = (x if x is None else x.contiguous() for x in (largest, target, weights, of_classes))
    given = [sums.contiguous(), top.contiguous(), *(top if x is None else x for x in optional), losses, counts, numbers]
    sizes = num_rows, len(sums) - 1, ignore, smoothing, smoothing / num_classes, num_classes, z_loss
    kinds: dict[str, Any] = {"LARGEST": largest is not None, "WEIGHTED": weights is not None}
    kinds |= {"SMOOTHED": smoothing > 0, "Z_LOSS": z_loss > 0, "NUMBERS": len(numbers), "BLOCK": ROWS_OF_NUMBERS}
    _losses[_of_numbers(num_rows)](*given, *sizes, **kinds)
    return losses, counts, numbers
