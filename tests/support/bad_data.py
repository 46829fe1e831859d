"""Calls that torch refuses because of their data, with the fault in the last part only: of shards, on one rank.

As processes, a rank that raises alone leaves the others waiting for it. So all of them must find the same fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

L = torch.linalg


def _x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size * 31**d for d, size in enumerate(shape)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _last(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[-1] = value
    return x


def _matrices(bad: float) -> Tensor:
    """Three good matrices, and one that is not."""
    x = _x(4, 3, 3)
    x = x @ x.mT + torch.eye(3, dtype=torch.float64)
    x[3] = bad * torch.eye(3, dtype=torch.float64)
    return x


def _at(*places: int) -> Tensor:
    return torch.tensor(places)


SINGULAR, NEGATIVE, NAN = _matrices(0.0), _matrices(-1.0), _matrices(math.nan)
POSITIVE, B = _matrices(1.0), _x(4, 3, 2)
CLASSES = _at(0, 2, 1, 7)
PIVOTS = torch.tensor([[1, 2, 3]] * 3 + [[1, 2, 9]], dtype=torch.int32)
CHANCES = _last(_x(4, 3).abs(), -1.0)
INTEGERS, DIVISORS = torch.arange(12).reshape(4, 3), _last(torch.arange(1, 13).reshape(4, 3), 0)
INDEX = _at(0, 1, 2, 9)
ROWS = INDEX[:, None].expand(4, 3).contiguous()

Bad = tuple[Callable[..., Any], tuple[Tensor, ...]]

BAD_DATA: dict[str, Bad] = {
    # linear algebra: one of a batch
    "cholesky": (torch.cholesky, (NEGATIVE,)),
    "linalg.cholesky": (L.cholesky, (NEGATIVE,)),
    "linalg.cholesky_ex": (partial(L.cholesky_ex, check_errors=True), (NEGATIVE,)),
    "cholesky_inverse": (torch.cholesky_inverse, (SINGULAR,)),
    "linalg.inv": (L.inv, (SINGULAR,)),
    "linalg.inv_ex": (partial(L.inv_ex, check_errors=True), (SINGULAR,)),
    "linalg.solve": (L.solve, (SINGULAR, B)),
    "linalg.solve_ex": (partial(L.solve_ex, check_errors=True), (SINGULAR, B)),
    "linalg.lu_factor": (L.lu_factor, (SINGULAR,)),
    "linalg.lu_solve": (L.lu_solve, (POSITIVE, PIVOTS, B)),
    "lu_unpack": (torch.lu_unpack, (POSITIVE, PIVOTS)),
    "linalg.ldl_factor": (L.ldl_factor, (SINGULAR,)),
    "linalg.ldl_solve": (L.ldl_solve, (POSITIVE, PIVOTS, B)),
    "linalg.eig": (L.eig, (NAN,)),
    "linalg.eigh": (L.eigh, (NAN,)),
    "linalg.eigvalsh": (L.eigvalsh, (NAN,)),
    "linalg.svd": (L.svd, (NAN,)),
    "linalg.svdvals": (L.svdvals, (NAN,)),
    "linalg.pinv": (L.pinv, (NAN,)),
    # classes
    "nll_loss": (F.nll_loss, (_x(4, 3), CLASSES)),
    "nll_loss none": (partial(F.nll_loss, reduction="none"), (_x(4, 3), CLASSES)),
    "nll_loss 2d": (F.nll_loss, (_x(2, 3, 2, 2), CLASSES.view(2, 2, 1).expand(2, 2, 2).contiguous())),
    "cross_entropy": (F.cross_entropy, (_x(4, 3), CLASSES)),
    "cross_entropy smooth": (partial(F.cross_entropy, label_smoothing=0.1, reduction="none"), (_x(4, 3), CLASSES)),
    "multi_margin_loss": (F.multi_margin_loss, (_x(4, 3), CLASSES)),
    "multi_margin_loss none": (partial(F.multi_margin_loss, reduction="none"), (_x(4, 3), CLASSES)),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (_x(4, 3), _last(ROWS % 2, 5))),
    "multilabel_margin_loss sum": (partial(F.multilabel_margin_loss, reduction="sum"), (_x(4, 3), _last(ROWS % 2, 5))),
    "aten.multi_margin_loss": (torch.ops.aten.multi_margin_loss, (_x(4, 3), CLASSES)),
    "aten.multilabel_margin_loss": (torch.ops.aten.multilabel_margin_loss, (_x(4, 3), _last(ROWS % 2, 5))),
    "one_hot": (partial(F.one_hot, num_classes=3), (CLASSES,)),
    "one_hot negative": (F.one_hot, (_at(0, 2, 1, -1),)),
    # indices
    "embedding": (F.embedding, (INDEX, _x(5, 3))),
    "embedding_bag": (F.embedding_bag, (INDEX.view(2, 2), _x(5, 3))),
    "embedding_bag offsets": (F.embedding_bag, (INDEX, _x(5, 3), _at(0, 2))),
    "embedding_bag max": (partial(F.embedding_bag, mode="max"), (INDEX, _x(5, 3), _at(0, 2))),
    "embedding max_norm": (lambda i, w: F.embedding(i, w.clone(), max_norm=0.5), (INDEX, _x(5, 3))),
    "gather": (lambda x, i: x.gather(0, i), (_x(5, 3), ROWS)),
    "take": (torch.take, (_x(5, 3), INDEX * 3)),
    "index_select": (lambda x, i: x.index_select(0, i), (_x(5, 3), INDEX)),
    "index": (lambda x, i: x[i], (_x(5, 3), INDEX)),
    "index of two": (lambda x, i: x[i * 0, i], (_x(5, 3), INDEX)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (_x(5, 3), ROWS)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (_x(5, 3), ROWS, _x(4, 3))),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (_x(5, 3), ROWS, _x(4, 3))),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (_x(5, 3), INDEX, _x(4, 3))),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (_x(5, 3), INDEX, _x(4, 3))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (_x(5, 3), INDEX)),
    "index_reduce": (lambda x, i, s: x.index_reduce(0, i, s, "amax"), (_x(5, 3), INDEX, _x(4, 3))),
    "index_put": (lambda x, i, s: x.index_put((i,), s), (_x(5, 3), INDEX, _x(4, 3))),
    "put": (torch.put, (_x(5, 3), INDEX * 3, _x(4))),
    "bincount": (torch.bincount, (_at(0, 2, 1, -1),)),
    "repeat_interleave": (partial(torch.repeat_interleave, dim=0), (_x(4, 3), _at(0, 2, 1, -1))),
    "searchsorted": (lambda x, v, s: torch.searchsorted(x, v, sorter=s), (_x(4), _x(3), INDEX)),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x, i, [2]),
        (_x(4, 1, 2, 2), _last(torch.arange(4).view(1, 1, 2, 2).expand(4, 1, 2, 2), 99)),
    ),
    "masked_scatter": (torch.masked_scatter, (_x(4, 3), torch.ones(4, 3, dtype=torch.bool), _x(5))),
    # numbers out of range
    "binary_cross_entropy": (F.binary_cross_entropy, (_last(_x(4, 3).sigmoid(), 2.0), _x(4, 3).sigmoid())),
    "binary_cross_entropy none": (
        partial(F.binary_cross_entropy, reduction="none"),
        (_last(_x(4, 3).sigmoid(), 2.0), _x(4, 3).sigmoid()),
    ),
    "gaussian_nll_loss": (F.gaussian_nll_loss, (_x(4, 3), _x(4, 3), CHANCES)),
    "multinomial": (partial(torch.multinomial, num_samples=2), (CHANCES,)),
    "multinomial of nothing": (partial(torch.multinomial, num_samples=2), (torch.cat([_x(3, 3).abs(), _x(1, 3) * 0]),)),
    "multinomial replaced": (partial(torch.multinomial, num_samples=2, replacement=True), (CHANCES,)),
    "bernoulli": (torch.bernoulli, (_last(_x(4, 3).sigmoid(), 2.0),)),
    "poisson": (torch.poisson, (CHANCES,)),
    "normal": (torch.normal, (_x(4, 3), CHANCES)),
    "quantile": (torch.quantile, (_x(4, 3), _last(_x(2).sigmoid(), 2.0))),
    "histc": (partial(torch.histc, bins=4), (_last(_x(4, 3), math.nan),)),
    "cov": (lambda x, w: torch.cov(x, fweights=w), (_x(3, 4), _at(0, 2, 1, -1))),
    "floor_divide": (torch.floor_divide, (INTEGERS, DIVISORS)),
    "remainder": (torch.remainder, (INTEGERS, DIVISORS)),
    "fmod": (torch.fmod, (INTEGERS, DIVISORS)),
    "div floor": (partial(torch.div, rounding_mode="floor"), (INTEGERS, DIVISORS)),
    "div trunc": (partial(torch.div, rounding_mode="trunc"), (INTEGERS, DIVISORS)),
    "floor_divide_": (lambda x, y: x.clone().floor_divide_(y), (INTEGERS, DIVISORS)),
    "fake_quantize": (
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, 0, 255),
        (_x(4, 3).float(), _x(4).abs().float(), torch.tensor([0, 1, 2, 900], dtype=torch.int32)),
    ),
}
"""By name: a function, and tensors that it refuses."""
