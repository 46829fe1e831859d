"""Products of matrices, distances, attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.proof.fuzz.draw import Draw, Refused


def matmul(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    inner = x.shape[-1]
    shape = d.pick((inner,), (inner, d.size()), (inner, d.size()), (*x.shape[:-2], inner, d.size()))
    return d.way("{x} @ {y} | torch.matmul({x}, {y}) | ({x} @ {y}) * 0.5").format(x=x, y=d.fit(shape, x.dtype))


def mm(d: Draw) -> str:
    x = d.tensor(2)
    y = d.fit((x.shape[1], d.size()), x.dtype)
    added = d.fit(d.pick((y.shape[1],), (x.shape[0], y.shape[1])), x.dtype)
    way = d.way("torch.mm({x}, {y}) | torch.addmm({b}, {x}, {y}) | torch.addmm({b}, {x}, {y}, beta=0.5, alpha=2)")
    return way.format(x=x, y=y, b=added)


def gram(d: Draw) -> str:
    way = d.way("{x} @ {x}.t() * 0.3 | {x}.t() @ {x} | torch.outer({x}[0], {x}[:, 0]) | torch.mv({x}, {x}[0])")
    return way.format(x=d.tensor(2))


def bmm(d: Draw) -> str:
    x = d.tensor(3)
    y = d.fit((x.shape[0], x.shape[2], d.size()), x.dtype)
    added = d.fit((x.shape[0], x.shape[1], y.shape[2]), x.dtype)
    return d.way("torch.bmm({x}, {y}) | torch.baddbmm({b}, {x}, {y}) | {x} @ {y}").format(x=x, y=y, b=added)


def linear(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    out = d.size()
    weight = d.fit((out, x.shape[-1]), x.dtype, new=0.6)
    bias = f", {d.fit((out,), x.dtype, new=0.6)}" if d.likely(0.7) else ""
    return f"F.linear({x}, {weight}{bias})"


def einsum(d: Draw) -> str:
    x = d.tensor(2, 3)
    shapes: Sequence[tuple[int, ...]]
    if x.ndim == 2:
        way, shape = d.pick(("ij,jk->ik", 1), ("ij,ij->i", 0), ("ij,kj->ki", 2), ("ij,ij->", 0), ("ij,j->i", 3))
        shapes = (x.shape, (x.shape[1], d.size()), (d.size(), x.shape[1]), (x.shape[1],))
    else:
        way, shape = d.pick(("bij,bjk->bik", 1), ("bij,bij->bi", 0), ("bij,kj->bki", 2), ("bij,bj->ib", 3))
        shapes = (x.shape, (x.shape[0], x.shape[2], d.size()), (d.size(), x.shape[2]), (x.shape[0], x.shape[2]))
    return f"torch.einsum({way!r}, {x}, {d.fit(shapes[shape], x.dtype)})"


def cdist(d: Draw) -> str:
    x = d.tensor(2)
    y = d.leaf((d.size(), x.shape[1]), x.dtype)
    if ((x.value[:, None] - y.value[None]).abs() < 1e-3).any():
        raise Refused("a distance along a dim is nothing")
    return f"torch.cdist({x}, {y}, p={d.pick(1.0, 2.0, 2.0, 3.0)})"


def attention(d: Draw) -> str:
    batch, heads, length, width = d.size(), d.size(), d.size(), d.size()
    if not heads and torch.__version__ < "2.13":
        raise Refused("plain torch dies of a division by zero")
    q = d.fit((batch, heads, length, width), new=0.5)
    other = d.size()
    k, v = d.fit((batch, heads, other, width)), d.fit((batch, heads, other, width))
    option = d.pick("", ", is_causal=True", ", scale=0.5", f", attn_mask={d.leaf((length, other))}")
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{option})"


def multi_head(d: Draw) -> str:
    heads, width, length, batch = d.pick(1, 2), d.pick(1, 2), d.size(), d.pick(1, 2, 3)
    model = heads * width
    x = d.fit((length, batch, model), new=0.5)
    inner, bias = d.leaf((3 * model, model)), d.leaf((3 * model,))
    outer, end = d.leaf((model, model)), d.leaf((model,))
    return (
        f"F.multi_head_attention_forward({x}, {x}, {x}, {model}, {heads}, {inner}, {bias}, None, None, False, 0.0, "
        f"{outer}, {end}, need_weights={d.likely(0.5)})"
    )


CALLS = (*[matmul] * 4, mm, mm, gram, bmm, bmm, *[linear] * 4, einsum, einsum, cdist, attention, attention, multi_head)
