"""Products of groups of rows, each with a matrix of its own: mixtures of experts.

Rows, sorted by expert, are groups that end where `offs` says. Every rank sees all of `offs` and takes from it what
concerns its rows and its experts: rows may be sharded (every rank has part of some groups), and so may the experts (a
rank leaves zeros in the rows of others, and the sum is pending).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros
from shardwise.rules.kit.notation import einsum
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, HeldValues, Local, Rule, Strategy, replicated

_disabled = torch._C.DisableTorchFunctionSubclass

FORMS = {
    (2, 3): "rk,gkn->rn",
    (3, 2): "gmk,kr->mr",
    (2, 2): "mr,rn->Gmn",  # what the gradient of the matrices is
    (3, 3): "gmk,gkn->gmn",
}
"""By the number of dims of both: g are the groups, and r the dim that they cut."""

WAYS = {
    ndims: einsum(form if ndims == (3, 3) else form.replace("->", ",O->"), linear=[{0}, {1}]).strategies
    for ndims, form in FORMS.items()
}


Piece = tuple[int, int]
"""Start and size."""


def _ndims(call: Call) -> tuple[int, int]:
    return call["self"].ndim, call["mat2"].ndim


def _ways(call: Call) -> list[Strategy]:
    return WAYS[_ndims(call)](call) if call["bias"] is None else [replicated(call)]


def _local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Also of replicated operands: the strides of one that was moved may be such that torch refuses it."""
    if call["bias"] is not None:
        return None
    form, shapes = FORMS[_ndims(call)], outs[0].held_shapes
    groups, cut = (_pieces(form, letter, ins) for letter in "gr")
    own = HeldValues(list(zip(groups, cut, shapes, strict=True)))
    return Local(_own_product, [own, call["self"], call["mat2"], call["offs"], call["out_dtype"]])


def _pieces(form: str, letter: str, ins: Sequence[Layout]) -> list[Piece | None]:
    """Start and size, on every held rank, of the dim that a letter names, where it is sharded."""
    for layout, term in zip(ins, form.split("->")[0].split(","), strict=False):
        dim = term.find(letter)
        if dim >= 0 and layout.splits[dim]:
            return [(starts[dim], sizes[dim]) for starts, sizes in map(layout.box, layout.mesh.held)]
    return [None] * len(ins[0].mesh.held)


def _own_product(own: Any, a: Tensor, b: Tensor, offs: Tensor | None, dtype: Any) -> Tensor:
    groups, cut, shape = own
    if 0 in (*a.shape, *b.shape):
        return connected_zeros(a, shape, b).to(dtype or a.dtype)
    ends = offs if offs is None or cut is None else (offs - cut[0]).clamp(0, cut[1])
    if ends is None or groups is None:
        return _Product.apply(a, b, ends, dtype)
    if a.dim() == 3:
        return _product_of_some(b.t(), a.mT, ends, groups, dtype).t().contiguous()
    return _product_of_some(a, b, ends, groups, dtype)


def product_of_own_groups(groups: Piece, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """On one rank: its groups of rows, each times a matrix, and zeros in the rows of others."""
    if 0 in (*x.shape, *w.shape):
        return connected_zeros(x, (x.shape[0], w.shape[2]), w)
    return _product_of_some(x, w, ends, groups, None)


def _product_of_some(x: Tensor, w: Tensor, ends: Tensor, groups: Piece, dtype: Any) -> Tensor:
    """The product of some groups of rows, and zeros in the rows of others. Where ours begin and end only the device
    knows, and nobody waits for it: all rows are rolled until ours come first. Torch does not define the rows behind
    them, nor their gradient."""
    first, count = groups
    begin = ends[first - 1] if first else torch.zeros_like(ends[0])
    places = torch.arange(len(x), device=x.device)
    ours = (places < ends[first + count - 1] - begin)[:, None]
    x = torch.where(ours, x[(places + begin) % len(x)], 0)
    out = torch.where(ours, _Product.apply(x, w, ends[first : first + count] - begin, dtype), 0)
    return out[(places - begin) % len(x)]


class _Product(torch.autograd.Function):
    """Torch's product, of operands with the strides that it takes. Gradients are such products too, of any order."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, ends: Tensor | None, dtype: Any) -> Tensor:
        ctx.save_for_backward(a, b, ends)
        return _product(a, b, ends, dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, ends = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad[:2]
        with _disabled():
            grad = grad.to(a.dtype)
            found = _Product.apply(grad, b.mT, ends, None) if of_a else None
            return found, _Product.apply(a.mT, grad, ends, None) if of_b else None, None, None


# Torch wants rows, and groups, to begin at multiples of 16 bytes. In a shard groups begin anywhere, so the dim that
# they cut must not be the contiguous one, in operands and result


def _product(a: Tensor, b: Tensor, ends: Tensor | None, dtype: Any) -> Tensor:
    match a.dim(), b.dim():
        case 2, 3:
            a, b = _row_major(a), _strided(b)
        case 2, 2:
            a, b = _row_major(a.t()).t(), _row_major(b)
        case 3, 2:
            return torch._grouped_mm(_row_major(b.t()), _strided(a.mT), offs=ends, out_dtype=dtype).t()
        case _:
            a, b = _strided(a), _strided(b)
    return torch._grouped_mm(a, b, offs=ends, out_dtype=dtype)


def _strided(x: Tensor) -> Tensor:
    return x if _is_row_major(x.mT) else _row_major(x)


def _row_major(x: Tensor) -> Tensor:
    if _is_row_major(x):
        return x
    width = x.shape[-1]
    return F.pad(x, (0, -width % _step(x))).clone(memory_format=torch.contiguous_format)[..., :width]


def _is_row_major(x: Tensor) -> bool:
    """Whether rows are contiguous, each beginning at a multiple of 16 bytes."""
    down, right = x.stride()[-2:]
    return right == 1 and down >= x.shape[-1] and down % _step(x) == 0


def _step(x: Tensor) -> int:
    return 16 // x.element_size()


register("_grouped_mm", rule=Rule(_ways, _local))
