"""Calls that read and write at indices: a function and its inputs, the target first, then indices, then sources."""

import torch
from sweep import normal


def at(*values, shape=None):
    index = torch.tensor(values)
    return index if shape is None else index.reshape(shape)


ROWS = at(4, 0, 3, 3, 1, 4)
WIDE = at(*(0, 4, 2, 1, 3, 3, 0, 4, 1, 1, 2, 0), shape=(4, 3))
SOME = at(1, 0, 0, 1, 1).bool()
put = torch.ops.aten.index_put.default

READS = {
    "gather": (lambda x, i: x.gather(0, i), normal(5, 3), WIDE),
    "gather last": (lambda x, i: x.gather(-1, i), normal(4, 5), WIDE),
    "gather longer": (lambda x, i: x.gather(0, i), normal(2, 3), WIDE % 2),
    "gather shorter": (lambda x, i: x.gather(0, i), normal(5, 7), WIDE),
    "gather shorter first": (lambda x, i: x.gather(1, i), normal(6, 5), WIDE),
    "gather 1-d": (lambda x, i: x.gather(0, i), normal(5), ROWS),
    "gather 0-d": (lambda x, i: x.gather(0, i), normal(1)[0], at(0)[0]),
    "gather nothing": (lambda x, i: x.gather(0, i), normal(5, 3), WIDE[:0]),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), normal(4, 5), WIDE - 5),
    "take_along_dim broadcast": (lambda x, i: x.take_along_dim(i, 0), normal(5, 3), WIDE[:, :1]),
    "take_along_dim flat": (lambda x, i: x.take_along_dim(i), normal(5, 3), ROWS * 3),
    "index_select": (lambda x, i: x.index_select(0, i), normal(5, 3), ROWS),
    "index_select last": (lambda x, i: x.index_select(-1, i), normal(3, 5), ROWS),
    "index_select one": (lambda x, i: x.index_select(1, i), normal(3, 5), at(4)[0]),
    "index_select nothing": (lambda x, i: x.index_select(0, i), normal(5, 3), ROWS[:0]),
    "take": (lambda x, i: x.take(i), normal(3, 4), WIDE * 3 - 12),
    "take 3-d": (lambda x, i: x.take(i), normal(3, 1, 5), ROWS * 3),
    "take nothing": (lambda x, i: x.take(i), normal(3, 4), ROWS[:0]),
    "index": (lambda x, i: x[i], normal(5, 3), ROWS - 5),
    "index 2-d": (lambda x, i: x[i], normal(5, 3), WIDE),
    "index 0-d": (lambda x, i: torch.ops.aten.index(x, [i]), normal(5, 3), at(3)[0]),
    "index nothing": (lambda x, i: x[i], normal(5, 3), ROWS[:0]),
    "index inside": (lambda x, i: x[:, i], normal(3, 5, 2), WIDE),
    "index of a slice": (lambda x, i: x[1:, None, i, 0], normal(3, 5, 2), ROWS),
    "index int32": (lambda x, i: x[:, i.int()], normal(3, 5), ROWS),
}

TWO = {
    "adjacent": (lambda x, i, j: x[:, i, j], normal(2, 5, 4), ROWS, ROWS % 4 - 4),
    "apart": (lambda x, i, j: x[i, :, j], normal(5, 2, 4), ROWS, ROWS % 4),
    "broadcast": (lambda x, i, j: x[i, j], normal(5, 4), ROWS[:, None], at(3, 0, -1)),
    "broadcast apart": (lambda x, i, j: x[i, :, j], normal(5, 2, 4), ROWS[:, None], at(3, 0, -1)),
}

SEQUENCE = normal(2, 7).sort().values
VALUES = torch.cat([normal(2, 4), SEQUENCE[:, 2:4], at(float("nan"), 9.0, shape=(2, 1))], 1)

SEARCHES = {
    "bucketize": (lambda v, s: torch.bucketize(v, s), VALUES, SEQUENCE[0]),
    "bucketize right": (lambda v, s: torch.bucketize(v, s, right=True, out_int32=True), VALUES, SEQUENCE[0]),
    "bucketize number": (lambda s: torch.bucketize(0.1, s), SEQUENCE[0]),
    "searchsorted": (lambda v, s: torch.searchsorted(s, v), VALUES, SEQUENCE),
    "searchsorted right": (lambda v, s: torch.searchsorted(s, v, side="right"), VALUES, SEQUENCE),
    "searchsorted 1-d": (lambda v, s: torch.searchsorted(s, v), VALUES, SEQUENCE[1]),
    "searchsorted number": (lambda s: torch.searchsorted(s, 0.1), SEQUENCE[1]),
    "sorter": (lambda v, s, o: torch.searchsorted(s, v, sorter=o), VALUES, normal(2, 7), normal(2, 7).argsort()),
    "sorter 1-d": (lambda v, s, o: torch.searchsorted(s, v, sorter=o), VALUES, normal(7), normal(7).argsort()),
}

SCATTERS = {
    "src": lambda x, i, s: x.scatter(0, i, s),
    "add": lambda x, i, s: x.scatter_add(0, i, s),
    "reduce=add": lambda x, i, s: x.detach().scatter(0, i, s.detach(), reduce="add"),
    "reduce=multiply": lambda x, i, s: x.detach().scatter(0, i, s.detach(), reduce="multiply"),
    **{
        f"{reduce}{'' if include else ' of sources'}": (
            lambda x, i, s, reduce=reduce, include=include: x.scatter_reduce(0, i, s, reduce, include_self=include)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
}

SHAPES = {
    "shorter": (lambda x, i, s: x.scatter_add(0, i, s), normal(5, 7), WIDE, normal(4, 3)),
    "shorter, later": (lambda x, i, s: x.scatter_add(1, i, s), normal(7, 5), WIDE, normal(4, 3)),
    "longer source": (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), normal(5, 3), WIDE, normal(6, 4)),
    "last dim": (lambda x, i, s: x.scatter(-1, i, s), normal(6, 5), WIDE, normal(4, 3)),
    "1-d": (lambda x, i, s: x.scatter_reduce(0, i, s, "mean"), normal(5), ROWS, normal(6)),
    "0-d": (lambda x, i, s: x.scatter(0, i, s), normal(1)[0], ROWS[1] * 0, normal(2)[1]),
    "nothing": (lambda x, i, s: x.scatter_add(0, i, s), normal(5, 3), WIDE[:0], normal(0, 3)),
}

INDEX_WRITES = {
    "index_add": lambda x, i, s: x.index_add(0, i, s, alpha=0.5),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    **{
        f"index_reduce {reduce}": lambda x, i, s, reduce=reduce: x.index_reduce(0, i, s, reduce, include_self=False)
        for reduce in ("prod", "mean", "amax", "amin")
    },
}

PUTS = {
    "rows": (lambda x, i, v, **k: x.index_put((i,), v, **k), normal(5, 3), ROWS - 5, normal(6, 3)),
    "one value": (lambda x, i, v, **k: x.index_put((i,), v, **k), normal(5, 3), WIDE, normal(1)[0]),
    "broadcast rows": (lambda x, i, v, **k: x.index_put((i,), v, **k), normal(5, 3), ROWS, normal(6, 1)),
    "columns": (lambda x, i, v, **k: put(x, [None, i], v, **k), normal(3, 5), ROWS, normal(6)),
    "places": (lambda x, i, v, **k: x.index_put((i, i - 5), v, **k), normal(5, 5), ROWS, normal(6)),
    "apart": (lambda x, i, v, **k: put(x, [i, None, i % 2], v, **k), normal(5, 3, 2), ROWS, normal(6, 3)),
    "nothing": (lambda x, i, v, **k: x.index_put((i,), v, **k), normal(5, 3), ROWS[:0], normal(1, 3)),
    "put": (lambda x, i, v, **k: x.put(i, v, **k), normal(3, 4), WIDE * 2 - 4, normal(12)),
    "put alike": (lambda x, i, v, **k: x.put(i, v, **k), normal(3, 4), WIDE * 2 - 4, normal(4, 3)),
}

MASKS = {
    "all dims": (lambda x, m, v: x.index_put((m,), v), normal(5, 3), normal(5, 3) > 0, normal(1)[0]),
    "rows": (lambda x, m, v: x.index_put((m,), v), normal(5, 3), SOME, normal(3)),
    "rows of one": (lambda x, m, v: x.index_put((m,), v, accumulate=True), normal(5, 3), SOME, normal(1, 3)),
    "as many": (lambda x, m, v: x.index_put((m,), v), normal(5, 3), SOME, normal(3, 3)),
    "columns": (lambda x, m, v: put(x, [None, m], v), normal(3, 5), SOME, normal(3)),
    "scatter": (lambda x, m, v: x.masked_scatter(m, v), normal(5, 3), normal(5, 3) > 0, normal(4, 5)),
    "scatter rows": (lambda x, m, v: x.masked_scatter(m, v), normal(5, 3), SOME[:, None], normal(9)),
    "scatter columns": (lambda x, m, v: x.masked_scatter(m, v), normal(1, 3, 5), SOME, normal(9)),
    "fill": (lambda x, m, v: x.masked_fill(m, v), normal(5, 3), SOME[:, None], normal(1)[0]),
}

PARTS = {
    "select": (lambda x, s: x.select_scatter(s, 0, -2), normal(5, 3), normal(3)),
    "select last": (lambda x, s: x.select_scatter(s, -1, 2), normal(5, 3), normal(5)),
    "slice": (lambda x, s: x.slice_scatter(s, 0, 1, 4), normal(5, 3), normal(3, 3)),
    "slice with steps": (lambda x, s: x.slice_scatter(s, 0, 1, 9, 2), normal(9, 2), normal(4, 2)),
    "slice from the end": (lambda x, s: x.slice_scatter(s, -1, -2), normal(3, 5), normal(3, 2)),
    "slice of all": (lambda x, s: x.slice_scatter(s), normal(5, 3), normal(5, 3) * 2),
    "slice of nothing": (lambda x, s: x.slice_scatter(s, 0, 3, 3), normal(5, 3), normal(0, 3)),
    "diagonal": (lambda x, s: x.diagonal_scatter(s), normal(5, 4), normal(4)),
    "diagonal above": (lambda x, s: x.diagonal_scatter(s, 2), normal(4, 7), normal(4)),
    "diagonal below": (lambda x, s: x.diagonal_scatter(s, -3, 2, 0), normal(5, 2, 6), normal(2, 3)),
}
