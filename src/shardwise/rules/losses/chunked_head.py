"""The losses of what a linear layer gives, chunk by chunk of rows: the program that the ranks run.

A sum or a mean has one gradient for all rows, so each chunk's gradients are computed right after its losses: three
products of matrices, and nothing is computed twice. Gradients of single rows are not known before the backward pass,
which computes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.rules.kit.types import Collectives, Saved
from shardwise.rules.losses.class_losses import check_targets
from shardwise.rules.losses.class_rows import (
    Loss,
    RowGradient,
    comparable,
    graph_is_kept,
    is_listened_to,
    numbers_of_rows,
    own_part,
    weights_of,
)
from shardwise.rules.rows.row_numbers import asserts_itself, row_losses
from shardwise.rules.rows.row_passes import CACHED, row_sums, scale_by

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """A linear layer and a loss over what it gives: how many rows each rank brings to a chunk, in which dtype the
    layer's gradient is added up, if not its own, and which axes split rows and classes (`tokens`), classes only, and
    rows only."""

    loss: Loss
    width: int
    step: int
    num_chunks: int
    acc_dtype: torch.dtype | None
    tokens: Axes
    others: Axes
    batch: Axes

    @property
    def is_for_each(self) -> bool:
        """Whether every row has a loss of its own."""
        return self.loss.reduction == "none"


def losses_of_head(
    shards: Collectives,
    x: Tensor,
    layer: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    head: Head,
) -> Tensor:
    """A term of the loss of all rows, or the losses of this rank's rows."""
    loss, rows = head.loss, _Rows(shards, head)
    target = comparable(shards, target)
    check_targets(shards.along(head.batch + head.tokens), target, loss, own=asserts_itself(target))
    x = shards.along(head.others).vary(x.reshape(-1, head.width))
    inputs = [x, layer] if bias is None else [x, layer, bias]
    has_gradient = torch.is_grad_enabled() and any(given.requires_grad for given in inputs)
    with torch.no_grad():
        start, saved = shards.offset(1, 0), {"target": rows.together(target.reshape(-1), loss.ignore)}
        if weight is not None and loss.smoothing:
            saved["class_weights"] = shards.map(own_part, weight, layer.t(), start, loss)
        scale = _scale(shards.along(head.batch), saved["target"], weight, loss)
        gradient = _Gradient(head, start, may_overwrite=not is_listened_to())
        made = _Made(rows, inputs) if has_gradient and not head.is_for_each else None
        together = shards.tells_all((5 if loss.smoothing else 3) * rows.count)
        losses: list[Tensor] = []
        known: list[Tensor] = []
        for at in range(head.num_chunks):
            part, of_part = rows.chunk(x, at), rows.part(saved, at)
            logits = F.linear(part, layer, bias)
            given = of_part["target"], start, loss.dim, of_part.get("class_weights"), bool(loss.smoothing)
            sums = shards.map(row_sums, logits, *given)
            of_chunk = sums, of_part["target"], weight, start, loss
            each, numbers = row_losses(*numbers_of_rows(shards, *of_chunk, together=together), has_gradient)
            losses.append(each)
            known.append(numbers)
            if made is not None:
                gradient.of_rows.write(shards, scale, logits, logits, {**of_part, "numbers": numbers})
                made.add(at, part, logits)
            del logits  # before the next are made
        value, weights = torch.cat(losses, -1).unbind()
        value = rows.own(value, x).view_as(target) if head.is_for_each else value.sum() * scale
        value = value.to(loss.dtype)
        if weight is not None:
            saved["weights"] = weights
        if has_gradient:
            saved["numbers"] = torch.cat(known, -1)
        saved |= {"scale": scale} if made is None else {"scale": scale, **made.finished()}
    return shards.with_gradient(value, gradient, inputs, saved)


def _scale(batch: Collectives, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """What each row's loss is multiplied by in the end: one, or one over the weight of all targets."""
    weights = target != loss.ignore if weight is None else weights_of(weight, target, 0, loss)
    total = weights.sum(dtype=torch.float64 if loss.dtype == torch.float64 else torch.float32)
    return batch.reduce(total, "sum").reciprocal() if loss.reduction == "mean" else torch.ones_like(total)


class _Rows:
    """The rows of a head, chunk by chunk, which all ranks that share its classes look at together. Where these ranks
    have different rows, each brings as many to every chunk, filled up with rows that do not count."""

    __slots__ = ("count", "head", "sizes", "tokens")

    def __init__(self, shards: Collectives, head: Head) -> None:
        self.head, self.tokens = head, shards.along(head.tokens)
        self.sizes = [head.step] * self.tokens.size
        self.count = sum(self.sizes)

    def together(self, values: Tensor, fill: int = 0) -> Tensor:
        """Something of each row of all ranks, in the order of the chunks."""
        if not self.head.tokens:
            return values
        filled = self.tokens.map(_filled, values, self.head.num_chunks * self.head.step, fill)
        each = filled.unflatten(0, (self.head.num_chunks, 1, self.head.step))
        return self.tokens.gather(each, 1, [1] * self.tokens.size).flatten(0, 2)

    def own(self, values: Tensor, x: Tensor) -> Tensor:
        """The part of these that belongs to the rows `x` of this rank."""
        if not self.head.tokens:
            return values
        each = values.unflatten(0, (self.head.num_chunks, self.tokens.size, self.head.step))
        return self.tokens.map(_own_rows, each, self.tokens.index(), x)

    def apart(self, gradients: Tensor, x: Tensor) -> Tensor:
        """The sums over the ranks of what each has computed for all rows; of these, those of the rows `x`."""
        if not self.head.tokens:
            return gradients
        each = gradients.unflatten(0, (self.head.num_chunks, self.tokens.size, self.head.step))
        return self.tokens.map(_own_rows, self.tokens.scatter(each, 1, [1] * self.tokens.size), 0, x)

    def chunk(self, x: Tensor, at: int) -> Tensor:
        """The rows of one chunk."""
        part = x[at * self.head.step : (at + 1) * self.head.step]
        if not self.head.tokens:
            return part
        return self.tokens.gather(self.tokens.map(_filled, part, self.head.step), 0, self.sizes)

    def part(self, saved: Saved, at: int) -> dict[str, Tensor]:
        """Of what is saved, that of the rows of one chunk, and that which is of no row."""
        here = slice(at * self.count, (at + 1) * self.count)
        return {name: x if name in _OF_NO_ROW else x[..., here] for name, x in saved.items()}

    def put(self, out: Tensor, at: int, of_logits: Tensor, layer: Tensor) -> None:
        """Write the gradient of the rows of one chunk."""
        into = out[at * self.head.step : (at + 1) * self.head.step]
        if not self.head.tokens:
            torch.mm(of_logits, layer, out=into)
        else:
            self.tokens.map(_copied_to, into, self.tokens.scatter(of_logits @ layer, 0, self.sizes))


INPUTS = ("input", "layer", "bias")
_OF_NO_ROW = frozenset({"class_weights", "scale", *INPUTS})


def _filled(x: Tensor, size: int, fill: int = 0) -> Tensor:
    short = size - len(x)
    return torch.cat([x, x.new_full((short, *x.shape[1:]), fill)]) if short else x


def _own_rows(each: Tensor, me: int, x: Tensor) -> Tensor:
    return each[:, me].flatten(0, 1)[: len(x)]


def _copied_to(into: Tensor, x: Tensor) -> None:
    into.copy_(x[: len(into)])


class _Made:
    """Gradients of the inputs that need one, added up over the chunks."""

    __slots__ = ("inputs", "rows", "sums")

    def __init__(self, rows: _Rows, inputs: Sequence[Tensor]) -> None:
        self.rows, self.inputs = rows, inputs
        acc_dtype = rows.head.acc_dtype if rows.head.num_chunks > 1 else None
        named = [(name, x) for name, x in zip(INPUTS, inputs, strict=False) if x.requires_grad]
        self.sums = {name: _room_for(x, None if name == "input" else acc_dtype) for name, x in named}

    def add(self, at: int, part: Tensor, of_logits: Tensor) -> None:
        """What one chunk adds: its rows, and the gradient of their logits."""
        if "input" in self.sums:
            self.rows.put(self.sums["input"], at, of_logits, self.inputs[1])
        if "layer" in self.sums:
            self.rows.tokens.map(_add_product, self.sums["layer"], of_logits.t(), part, at > 0)
        if "bias" in self.sums:
            found = of_logits.sum(0, dtype=self.sums["bias"].dtype)
            self.sums["bias"].copy_(found if at == 0 else self.sums["bias"] + found)

    def finished(self) -> dict[str, Tensor]:
        each = zip(INPUTS, self.inputs, strict=False)
        return {name: self.sums[name].to(x.dtype) for name, x in each if name in self.sums}


def _room_for(x: Tensor, acc_dtype: torch.dtype | None) -> Tensor:
    """Room for sums of what is of the size of `x`, at least as exact as that."""
    return torch.empty_like(x, dtype=None if acc_dtype is None else torch.promote_types(x.dtype, acc_dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_begun: bool) -> None:
    """Add a product of matrices, perhaps to numbers of a wider dtype; or begin with it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=int(is_begun))
    elif total.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=int(is_begun), out=total)
    else:
        b, step = b.to(total.dtype), max(1, CACHED // max(a.shape[1], 1))
        for rows, some in zip(total.split(step), a.split(step), strict=True):
            rows.addmm_(some.to(total.dtype), b, beta=int(is_begun))


@dataclass(frozen=True, slots=True)
class _Gradient:
    """That of the inputs: made beside the loss, and to be multiplied by its gradient; where rows have gradients of
    their own, made now."""

    head: Head
    start: Any
    may_overwrite: bool

    @property
    def of_rows(self) -> RowGradient:
        return RowGradient(self.head.loss, self.start, may_overwrite=True)

    def __call__(
        self, shards: Collectives, grad: Tensor, inputs: Sequence[Tensor], saved: Saved
    ) -> Sequence[Tensor | None]:
        if torch.is_grad_enabled():
            return self._differentiable(shards, grad, inputs, saved)
        if self.head.is_for_each:
            made = self._computed_again(shards, grad, inputs, saved)
        elif self.may_overwrite and not graph_is_kept():
            made = {name: saved[name] for name in INPUTS if name in saved}
            for gradient in made.values():
                shards.map(scale_by, gradient, grad)
        else:
            made = {name: saved[name] * grad for name in INPUTS if name in saved}
        return [made.get(name) for name, _ in zip(INPUTS, inputs, strict=False)]

    def _computed_again(
        self, shards: Collectives, grad: Tensor, inputs: Sequence[Tensor], saved: Saved
    ) -> dict[str, Tensor]:
        rows = _Rows(shards, self.head)
        made, grads = _Made(rows, inputs), rows.together(grad.reshape(-1))
        for at in range(self.head.num_chunks):
            part, of_part = rows.chunk(inputs[0], at), rows.part({**saved, "grad": grads}, at)
            logits = F.linear(part, *inputs[1:])
            self.of_rows.write(shards, of_part["grad"], logits, logits, of_part)
            made.add(at, part, logits)
            del logits
        return made.finished()

    def _differentiable(
        self, shards: Collectives, grad: Tensor, inputs: Sequence[Tensor], saved: Saved
    ) -> Sequence[Tensor | None]:
        """The same in ordinary functions, of all rows at once."""
        rows, (x, layer, *_) = _Rows(shards, self.head), inputs
        whole = rows.together(x)
        logits = F.linear(whole, *inputs[1:])
        if self.head.is_for_each:  # gathered rows are varying by now
            grad = shards.along(self.head.others).vary(rows.together(grad.reshape(-1)))
        else:
            grad = (shards.vary(grad) * saved["scale"]).expand_as(saved["target"])
        of_logits = self.of_rows.differentiable(shards, grad, logits, saved)
        found = [rows.apart(of_logits @ layer, x), of_logits.t() @ whole, of_logits.sum(0)]
        return [each if given.requires_grad else None for each, given in zip(found, inputs, strict=False)]
