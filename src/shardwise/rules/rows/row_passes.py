"""Passes over the part that one rank has of rows: sums for softmax and for losses over classes, and gradients.

A pass goes through its tensors block by block. What it computes on the way stays in the processor's cache, and nothing
as large as they are is made beside what it returns. Half precision is computed in single, double in double. Rows lie
along `dim`, and are numbered by all other dims. Of classes, those that are here begin at `start`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.rules.kit.kernels import has_kernel, is_traced, one_pass

MAXIMUM, TOTAL, PICKED, LOGITS, WEIGHT = range(5)
"""What `row_sums` gives for each row: the largest logit; the sum of the exponentials of all logits less that; if there
are targets, the logit that the row's names, or zero if that is not here; where labels are smoothed, the weighted sum of
all logits less the largest, and what they weigh."""

LARGEST, NORM, AT_TARGET, MASS, LOG_SUM = range(5)
"""What the gradient of a row is made of: the largest logit of all ranks; what makes probabilities of exponentials; the
gradient at the target; what probabilities are multiplied by in it, if that is not one; and the logarithm of the sum of
all exponentials, by which that changes with a z-loss."""

CACHED = 1 << 19
"""Elements of a block on a CPU, two megabytes: the cache still holds them, and to begin a block costs little beside."""

LARGE = 1 << 22
"""Elements of a block elsewhere."""

_LOG2_E = math.log2(math.e)

Block = tuple[slice, ...]


def keeps_logits(device: str) -> bool:
    """Whether the gradient is computed from the logits again, as kernels do, who wait for memory and not for
    exponentials. Otherwise the exponentials are kept, and the gradient is written over them."""
    return has_kernel(row_sums, device)


@one_pass("(Tensor x, Tensor? target, int start, int dim, Tensor? weight, bool smoothed) -> Tensor")
def row_sums(x: Tensor, target: Tensor | None, start: int, dim: int, weight: Tensor | None, smoothed: bool) -> Tensor:
    """What the losses of rows are made of, as far as it is here."""
    return _sums(x, None, target, start, dim, weight, smoothed)


@one_pass("(Tensor x, Tensor? target, int start, int dim, Tensor? weight, bool smoothed) -> (Tensor, Tensor)")
def row_exponentials(
    x: Tensor, target: Tensor | None, start: int, dim: int, weight: Tensor | None, smoothed: bool
) -> tuple[Tensor, Tensor]:
    """The same, and the exponentials of the logits less the largest of their row."""
    kept = torch.empty_like(x)
    return _sums(x, kept, target, start, dim, weight, smoothed), kept


def _sums(
    x: Tensor, kept: Tensor | None, target: Tensor | None, start: int, dim: int, weight: Tensor | None, smoothed: bool
) -> Tensor:
    num_sums, dtype = 2 + (target is not None) + 2 * smoothed, _wide(x.dtype)
    sums = torch.empty((num_sums, *x.shape[:dim], *x.shape[dim + 1 :]), dtype=dtype, device=x.device)
    least = torch.finfo(dtype).min  # also of rows in which all logits are -inf, or that have none here
    if not x.shape[dim]:
        sums.zero_()[MAXIMUM] = least
        return sums
    each, spare = sums.unbind(), _Spare(x)
    for block in blocks(x, dim):
        row, part = _row(block, dim), _of(x, block)
        into = spare.like(part) if kept is None or kept.dtype != dtype else _of(kept, block)
        if part.dtype != dtype:
            part = into.copy_(part)
        largest = torch.amax(part, dim, out=_of(each[MAXIMUM], row)).clamp_(least)
        torch.sub(part, largest.unsqueeze(dim), out=into)
        if smoothed:
            torch.sum(into if weight is None else into * _along(weight, x, dim), dim, out=_of(each[LOGITS], row))
        torch.sum(exponential_(into), dim, out=_of(each[TOTAL], row))
        if kept is not None and kept.dtype != dtype:
            kept[block] = into
    if smoothed:
        sums[WEIGHT] = x.shape[dim] if weight is None else weight.sum()
    if target is not None:
        elsewhere, index = _here(x, target, start, dim)
        each[PICKED].copy_(x.take(places_of(x, index, dim))).masked_fill_(elsewhere, 0)
    return sums


@one_pass(
    "(Tensor kept, Tensor(a!) out, bool of_logits, Tensor numbers, Tensor grad, Tensor? total, float share, "
    "Tensor? weight, Tensor target, int ignore, int start, int dim) -> ()"
)
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
    """Write the gradient of logits to `out`, which may be `kept`, given those of their rows' losses, or that of all of
    these over `total`. What is kept are exponentials, or logits."""
    if not kept.shape[dim]:
        return
    grad = grad if total is None else grad / total  # NaN, that of a mean over nothing
    grad = grad.masked_fill(target == ignore, 0)  # first: rows whose logits are no numbers have no gradient either way
    scale, at_target = (numbers[NORM:MASS] * grad).unbind()
    if numbers.shape[0] > MASS:
        scale.mul_(numbers[MASS])
    smooth = grad * share if share else None
    spare, dtype = _Spare(kept), _wide(kept.dtype)
    for block in blocks(kept, dim):
        row, part = _row(block, dim), _of(kept, block)
        into = _of(out, block) if out.dtype == dtype else spare.like(part)
        if part.dtype != dtype:
            part = into.copy_(part)
        if of_logits:
            part = exponential_(torch.sub(part, numbers[LARGEST][row].unsqueeze(dim), out=into))
        torch.mul(part, _of(scale, row).unsqueeze(dim), out=into)
        if smooth is not None:
            each = smooth[row].unsqueeze(dim)
            into.sub_(each) if weight is None else into.addcmul_(each, _along(weight, kept, dim), value=-1)
        if out.dtype != dtype:
            out[block] = into
    elsewhere, index = _here(out, target, start, dim)
    places = places_of(out, index, dim)
    out.put_(places, torch.where(elsewhere, out.take(places), at_target.to(out.dtype)))


@one_pass("(Tensor x, Tensor(a!) out, Tensor less, Tensor total, int dim, bool log) -> ()")
def row_softmax(x: Tensor, out: Tensor, less: Tensor, total: Tensor, dim: int, log: bool) -> None:
    """Write the softmax of rows to `out`, or its logarithm, given their largest element and their total."""
    spare, dtype, factor = _Spare(x), _wide(x.dtype), total.log() if log else total.reciprocal()
    for block in blocks(x, dim):
        row, part = _row(block, dim), x[block]
        into = out[block] if out.dtype == dtype else spare.like(part)
        torch.sub(part if part.dtype == dtype else into.copy_(part), less[row].unsqueeze(dim), out=into)
        each = factor[row].unsqueeze(dim)
        _ = into.sub_(each) if log else exponential_(into).mul_(each)
        if out.dtype != dtype:
            out[block] = into


@one_pass("(Tensor grad, Tensor known, int dim, bool log) -> Tensor")
def row_products(grad: Tensor, known: Tensor, dim: int, log: bool) -> Tensor:
    """What the gradient of each row has in common: the sum of the gradients of its softmax, each times the softmax; or
    of those of its logarithm."""
    sums = torch.empty((*grad.shape[:dim], *grad.shape[dim + 1 :]), dtype=_wide(known.dtype), device=grad.device)
    if not grad.shape[dim]:
        return sums.zero_()
    spare = _Spare(known)
    for block in blocks(grad, dim):
        part, row = grad[block], _row(block, dim)
        if not log:
            part = spare.like(part).copy_(part).mul_(known[block])
        torch.sum(part, dim, dtype=sums.dtype, out=sums[row])
    return sums


@one_pass("(Tensor grad, Tensor known, Tensor(a!) out, Tensor total, int dim, bool log) -> ()")
def row_softmax_gradient(grad: Tensor, known: Tensor, out: Tensor, total: Tensor, dim: int, log: bool) -> None:
    """Write the gradient of rows to `out`, given that of their softmax, or of its logarithm, and what it has in
    common."""
    spare, dtype = _Spare(known), _wide(known.dtype)
    for block in blocks(grad, dim):
        each, part, y = total[_row(block, dim)].unsqueeze(dim), grad[block], known[block]
        into = out[block] if out.dtype == dtype else spare.like(part)
        if log:
            torch.sub(part, exponential_(into.copy_(y)).mul_(each), out=into)
        else:
            torch.sub(into.copy_(part), each, out=into).mul_(y)
        if out.dtype != dtype:
            out[block] = into


@one_pass("(Tensor(a!) x, Tensor factor) -> ()")
def scale_by(x: Tensor, factor: Tensor) -> None:
    """Multiply all of `x` by a number, which is mostly one: then a kernel does not touch it."""
    x.mul_(factor)


def exponential_(x: Tensor) -> Tensor:
    """In place. Powers of two take the CPU a fourth of the time, and in single precision err no more than `x` does."""
    return x.mul_(_LOG2_E).exp2_() if x.dtype == torch.float32 and x.device.type == "cpu" else x.exp_()


def _here(x: Tensor, target: Tensor, start: int, dim: int) -> tuple[Tensor, Tensor]:
    """Which rows' targets are not here; and where they are, or somewhere."""
    local = target - start
    index = local.clamp(0, x.shape[dim] - 1)
    return index != local, index.long()


def places_of(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """An index along a dim for each row, as one into all elements."""
    size, inner = x.shape[dim], math.prod(x.shape[dim + 1 :])
    if inner == 1:
        return torch.arange(0, x.numel(), size, device=index.device).view(index.shape).add_(index)
    rows = torch.arange(index.numel(), device=index.device).view(index.shape)
    return (rows // inner * size + index) * inner + rows % inner


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    """Class weights in a shape that broadcasts over the rows."""
    return weight.to(_wide(x.dtype)).reshape([-1] + [1] * (x.ndim - 1 - dim))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


# Blocks


def blocks(x: Tensor, dim: int) -> Iterator[Block]:
    """Parts of a tensor that have all of `dim`, and else as few elements as are to be looked at at once."""
    most, count = _block_size(x), x.numel()
    if count <= most:
        yield ()
        return
    sizes, steps = list(x.shape), list(x.shape)
    for d, size in enumerate(sizes):
        if d != dim and count > most:
            count //= size
            steps[d] = max(1, most // count)
            count *= steps[d]
    starts = [range(0, size, step) for size, step in zip(sizes, steps, strict=True)]
    for begin in itertools.product(*starts):
        yield tuple(slice(at, at + step) for at, step in zip(begin, steps, strict=True))


def _block_size(x: Tensor) -> int:
    if x.is_meta or is_traced():  # there is no cache; or a tracer looks on, who wants one op of a kind
        return x.numel()
    return CACHED if x.device.type == "cpu" else LARGE


def _of(x: Tensor, block: Block) -> Tensor:
    """A block, but not as a view if it is all there is."""
    return x[block] if block else x


def _row(block: Block, dim: int) -> Block:
    return block and block[:dim] + block[dim + 1 :]


class _Spare:
    """Memory for one block of a tensor, in the precision that it is computed in; the first block is the largest."""

    __slots__ = ("_dtype", "_memory")

    def __init__(self, x: Tensor) -> None:
        self._memory: Tensor | None = None
        self._dtype = _wide(x.dtype)

    def like(self, part: Tensor) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(part.numel(), dtype=self._dtype, device=part.device)
        return self._memory[: part.numel()].view(part.shape)
