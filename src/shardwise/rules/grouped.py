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
from shardwise.rules.notation import einsum
from shardwise.rules.registry import register
from shardwise.rules.spatial import connected_zeros
from shardwise.rules.types import Call, HeldValues, Local, Rule, Strategy, replicated

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
    """Also where all is whole, since moving something changes how it lies."""
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
    if offs is None or (groups is None and cut is None):
        return _product(a, b, offs, dtype)
    ends = offs if cut is None else (offs - cut[0]).clamp(0, cut[1])
    match a.dim(), b.dim():
        case 2, 3:
            return _product_of_rows(a, b, ends, groups, dtype)
        case 3, 2:
            return _product_of_rows(b.t(), a.mT, ends, groups, dtype).t().contiguous()
    return _product(_in_rows(a.t()).t(), _in_rows(b), ends, dtype)


def _product_of_rows(x: Tensor, w: Tensor, ends: Tensor, groups: Piece | None, dtype: Any) -> Tensor:
    """Of some groups, and zeros in the rows of others. Where ours begin and end only the device knows, and nobody waits
    for it: all rows are rolled until ours come first. What torch makes of the rows behind them, also as their gradient,
    may be anything."""
    if groups is None:
        return _product(_in_rows(x), w, ends, dtype)
    first, count = groups
    begin = ends[first - 1] if first else torch.zeros_like(ends[0])
    places = torch.arange(len(x), device=x.device)
    ours = (places < ends[first + count - 1] - begin)[:, None]
    x = torch.where(ours, x[(places + begin) % len(x)], 0)
    out = torch.where(ours, _product(_in_rows(x), w, ends[first : first + count] - begin, dtype), 0)
    return out[(places - begin) % len(x)]


# Torch wants rows to begin at multiples of 16 bytes, which shards' may not, and so groups: in a piece they begin
# anywhere, so numbers must not lie side by side along the dim that is cut


def _product(a: Tensor, b: Tensor, ends: Tensor | None, dtype: Any) -> Tensor:
    out = torch._grouped_mm(_in_line(a), _in_line(b), offs=ends, out_dtype=dtype)
    if out.grad_fn is not None:  # the gradient is a factor as well
        out.grad_fn.register_prehook(lambda grads: tuple(None if grad is None else _in_line(grad) for grad in grads))
    return out.contiguous()


def _in_line(x: Tensor) -> Tensor:
    return x if _has_rows(x.mT) else _in_rows(x)


def _in_rows(x: Tensor) -> Tensor:
    if _has_rows(x):
        return x
    width = x.shape[-1]
    return F.pad(x, (0, -width % _step(x))).contiguous()[..., :width]


def _has_rows(x: Tensor) -> bool:
    """Whether rows lie one after the other, each beginning at a multiple of 16 bytes."""
    down, right = x.stride()[-2:]
    return right == 1 and down >= x.shape[-1] and down % _step(x) == 0


def _step(x: Tensor) -> int:
    return 16 // x.element_size()


register("_grouped_mm", rule=Rule(_ways, _local))
