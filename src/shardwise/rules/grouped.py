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


def _pieces(form: str, letter: str, ins: Sequence[Layout]) -> list[tuple[int, int] | None]:
    """Start and size, on every held rank, of the dim that a letter names."""
    for layout, term in zip(ins, form.split("->")[0].split(","), strict=False):
        dim = term.find(letter)
        if dim >= 0:
            return [(starts[dim], sizes[dim]) for starts, sizes in map(layout.box, layout.mesh.held)]
    return [None] * len(ins[0].mesh.held)


def _own_product(own: Any, a: Tensor, b: Tensor, offs: Tensor | None, dtype: Any) -> Tensor:
    groups, cut, shape = own
    if 0 in (*a.shape, *b.shape):
        return connected_zeros(a, shape, b).to(dtype or a.dtype)
    if offs is None:
        return _product(a, b, None, dtype)
    start, size = cut
    ends = (offs - start).clamp(0, size)
    if groups is None or groups[1] == len(offs):
        return _product(a, b, ends, dtype)
    return _product_of_some(a, b, ends, groups, dtype)


def _product_of_some(a: Tensor, b: Tensor, ends: Tensor, groups: tuple[int, int], dtype: Any) -> Tensor:
    """Of some groups, and zeros for the others. Where ours begin and end only the device knows, and nobody waits for
    it: all rows are rolled until ours come first. What torch makes of the rows behind them, also as their gradient,
    may be anything."""
    first, count = groups
    begin = ends[first - 1] if first else torch.zeros_like(ends[0])
    rows, dim = (a, 0) if a.dim() == 2 else (b, 1)
    places = torch.arange(rows.shape[dim], device=rows.device)
    ours = places < ends[first + count - 1] - begin
    ours = ours[:, None] if dim == 0 else ours
    rows = torch.where(ours, rows.index_select(dim, (places + begin) % len(places)), 0)
    a, b = (rows, b) if dim == 0 else (a, rows)
    out = torch.where(ours, _product(a, b, ends[first : first + count] - begin, dtype), 0)
    return out.index_select(dim, (places - begin) % len(places))


def _product(a: Tensor, b: Tensor, ends: Tensor | None, dtype: Any) -> Tensor:
    """Torch wants rows, and those of the gradient, to begin at multiples of 16 bytes, which shards' may not."""
    step = 16 // a.element_size()
    width = b.shape[-1]
    k, n = -a.shape[-1] % step, -width % step
    a = F.pad(a, (0, k)) if k else a
    b = F.pad(b, (0, n, 0, k)) if k or n else b
    out = torch._grouped_mm(_lying_well(a, step), _lying_well(b, step), offs=ends, out_dtype=dtype)
    return out[..., :width].contiguous() if n else out


def _lying_well(x: Tensor, step: int) -> Tensor:
    """Rows or columns one after the other, with nothing shared and each where torch wants it."""
    (height, width), (down, right) = x.shape[-2:], x.stride()[-2:]
    in_rows = right == 1 and down >= width and down % step == 0
    in_columns = down == 1 and right >= height and right % step == 0
    return x if in_rows or in_columns else x.clone(memory_format=torch.contiguous_format)


register("_grouped_mm", rule=Rule(_ways, _local))
