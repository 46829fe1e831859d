"""Softmax over a sharded dim, and its gradient, as Triton programs: what is written once the sums of rows are known."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from shardwise.rules.rows import row_passes
from shardwise.rules.rows.triton_layout import WORDS, beginning, exponential, layout_of, places, read
from shardwise.rules.rows.triton_program import program


@program()
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
    column = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    begin = x + beginning(row, size_1, size_2, step_0, step_1, step_2)
    found = read(begin, column, step, exists, num_classes, 0.0, ROWS)
    found -= tl.load(less + row, mask=exists, other=0.0)[:, None]
    whole = tl.load(total + row, mask=exists, other=1.0)
    if LOG:
        found -= tl.log(whole)[:, None]
    else:
        found = exponential(found) * (1.0 / whole)[:, None]
    begin = out + beginning(row, size_1, size_2, out_0, out_1, out_2)
    is_there = exists[:, None] & (column < num_classes)[None, :]
    tl.store(places(begin, column, out_step, ROWS), found.to(out.dtype.element_ty), mask=is_there)


def row_softmax(x: Tensor, out: Tensor, less: Tensor, total: Tensor, dim: int, log: bool) -> None:
    layout = layout_of(dim, x, out)
    if layout is None:
        return row_passes.row_softmax.function(x, out, less, total, dim, log)
    if layout.num_rows and layout.num_classes:
        given = x, out, less.contiguous(), total.contiguous()
        sizes, which = (layout.num_rows, layout.num_classes, *layout.places), (log, layout.rows, layout.classes)
        _softmax((layout, log), layout.tiles, layout.tile_warps, given, (*sizes, *which))
    return None


@program()
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
    part = tl.program_id(1)
    exists = row < num_rows
    begin = grad + beginning(row, size_1, size_2, step_0, step_1, step_2)
    beside = known + beginning(row, size_1, size_2, known_0, known_1, known_2)
    last = tl.minimum(part * share + share, num_classes)
    total = tl.zeros([ROWS, CLASSES], tl.float32)
    for at in range(part * share, last, CLASSES):
        column = at + tl.arange(0, CLASSES)
        some = read(begin, column, step, exists, last, 0.0, ROWS)
        if not LOG:
            some *= read(beside, column, known_step, exists, last, 0.0, ROWS)
        total += some
    tl.store(sums + part.to(tl.int64) * num_rows + row, tl.sum(total, 1), mask=exists)


def row_products(grad: Tensor, known: Tensor, dim: int, log: bool) -> Tensor:
    layout = layout_of(dim, grad, known)
    if layout is None or not (layout.num_rows and layout.num_classes):
        return row_passes.row_products.function(grad, known, dim, log)
    parts = layout.shares[1]
    sums = torch.empty((parts, *grad.shape[:dim], *grad.shape[dim + 1 :]), dtype=torch.float32, device=grad.device)
    key, sizes = (layout, log), (layout.num_rows, layout.num_classes, layout.share)
    tile = layout.rows, WORDS * layout.lanes
    others = *sizes, *layout.places, log, *tile
    _products(key, layout.shares, layout.num_warps, (grad, known, sums), others)
    return sums[0] if parts == 1 else sums.sum(0)


@program()
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
    column = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    exists = row < num_rows
    begin = grad + beginning(row, size_1, size_2, step_0, step_1, step_2)
    beside = known + beginning(row, size_1, size_2, known_0, known_1, known_2)
    some = read(begin, column, step, exists, num_classes, 0.0, ROWS)
    y = read(beside, column, known_step, exists, num_classes, 0.0, ROWS)
    whole = tl.load(total + row, mask=exists, other=0.0)[:, None]
    if LOG:
        found = some - exponential(y) * whole
    else:
        found = (some - whole) * y
    begin = out + beginning(row, size_1, size_2, out_0, out_1, out_2)
    is_there = exists[:, None] & (column < num_classes)[None, :]
    tl.store(places(begin, column, out_step, ROWS), found.to(out.dtype.element_ty), mask=is_there)


def row_softmax_gradient(grad: Tensor, known: Tensor, out: Tensor, total: Tensor, dim: int, log: bool) -> None:
    layout = layout_of(dim, grad, known, out)
    if layout is None:
        return row_passes.row_softmax_gradient.function(grad, known, out, total, dim, log)
    if layout.num_rows and layout.num_classes:
        given = grad, known, out, total.contiguous()
        sizes, which = (layout.num_rows, layout.num_classes, *layout.places), (log, layout.rows, layout.classes)
        _softmax_gradient((layout, log), layout.tiles, layout.tile_warps, given, (*sizes, *which))
    return None
