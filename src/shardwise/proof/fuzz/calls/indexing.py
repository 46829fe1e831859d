"""Looking up by tensors and masks, and writing so."""

from __future__ import annotations

from shardwise.proof.fuzz.calls.shapes import cut
from shardwise.proof.fuzz.draw import Draw

ALONG = """
{x}.gather({d}, {i}) | {x}.gather({d}, {i}) | torch.take_along_dim({x}, {i}, {d})
{x}.scatter_add({d}, {i}, {s}) | {x}.scatter({d}, {i}, 0.5) | {x}.scatter_reduce({d}, {i}, {s}, 'sum')
"""
ROWS = """
{x}.index_select({d}, {i}) | {x}.index_select({d}, {i}) | {x}.index_add({d}, {i}, {s}) | {x}.index_fill({d}, {i}, 0.5)
"""


def lookup(d: Draw) -> str:
    """By a tensor in one of the dims."""
    x = d.tensor(1, 2, 3)
    dim = d.chance.randrange(x.ndim)
    index = d.index(d.pick((), (d.size(),), (2, d.size())), x.shape[dim])
    cuts = [":"] * dim + [str(index)] + [cut(d, n) for n in x.shape[dim + 1 :] if d.likely(0.5)]
    return f"{x}[{', '.join(cuts)}]"


def strided(d: Draw) -> str:
    """One row, by a tensor without dims, of a slice."""
    x = d.tensor(2, 3)
    rows = (x.shape[0] + 1) // 2
    way = d.way("{x}[::2][{i}] | {x}[::2].select(0, int({i})) | {x}.t()[{j}]")
    return way.format(x=x, i=d.index((), rows), j=d.index((), x.shape[-1]))


def pairs(d: Draw) -> str:
    x = d.tensor(2, 3)
    count = d.size()
    return f"{x}[{d.index((count,), x.shape[0])}, {d.index((count,), x.shape[1])}]"


def masked(d: Draw) -> str:
    x = d.tensor(1, 2)
    return d.way("{x}[{m}] | torch.masked_select({x}, {m}) | {x}[{m}].sum()").format(x=x, m=d.mask(x.shape))


def along(d: Draw) -> str:
    """gather, and scatter of all kinds."""
    x = d.tensor(1, 2, 3)
    dim = d.chance.randrange(x.ndim)
    shape = [min(n, d.size()) if k != dim else d.size() for k, n in enumerate(x.shape)]
    index, source = d.index(shape, x.shape[dim]), d.fit(shape, x.dtype)
    return d.way(ALONG).format(x=x, d=dim, i=index, s=source)


def rows(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    dim = d.chance.randrange(x.ndim)
    index = d.index((d.size(),), x.shape[dim])
    source = d.fit((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), x.dtype)
    return d.way(ROWS).format(x=x, d=dim, i=index, s=source)


def put(d: Draw) -> str:
    x = d.tensor(1, 2)
    index = d.index((d.size(),), x.shape[0])
    source = d.fit((*index.shape, *x.shape[1:]), x.dtype)
    return f"{x}.index_put(({index},), {source}, accumulate=True)"


def take(d: Draw) -> str:
    x = d.tensor(1, 2)
    return f"{x}.take({d.index((d.size(),), x.value.numel())})"


def embedding(d: Draw) -> str:
    table = d.tensor(2)
    index = d.index(d.pick((d.size(),), (2, d.size())), table.shape[0])
    way = d.way("F.embedding({i}, {t}) | F.embedding({i}, {t}) | F.embedding_bag({i}.reshape(1, -1), {t})")
    return way.format(i=index, t=table)


def one_hot(d: Draw) -> str:
    high = d.size()
    return f"F.one_hot({d.index((d.size(),), high)}, {high}).double()"


CALLS = (lookup, lookup, strided, pairs, masked, along, along, rows, rows, put, take, embedding, embedding, one_hot)
