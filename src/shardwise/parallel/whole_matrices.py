"""Muon: each matrix that is split over ranks is orthogonalised by one of them, its owner.

Of Muon's step only the orthogonalisation needs a matrix as a whole; momentum and what is written to the parameter are
element-wise, and run on the shards. So updates travel: all matrices of a mesh to their owners by one all-to-all, and
back by another, in bfloat16, which is all that torch's function looks at. Replicas each send a part and all get the
result. A matrix that no rank lacks a part of is left to torch: every rank computes it, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from inspect import signature
from itertools import chain, product
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim._muon import _adjust_lr, _to_scalar, _zeropower_via_newtonschulz

from shardwise.comm import ranked, shards_of
from shardwise.comm.cause import caused
from shardwise.layout import Box, Layout, chunk_sizes
from shardwise.tensor import DTensor, as_layout, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_box = lru_cache(maxsize=65536)(Layout.box)
_OPTIONS = [*signature(_zeropower_via_newtonschulz).parameters][1:]  # named as in the optimizer's groups

Tensors = list[Tensor]


class _Matrix(NamedTuple):
    """A parameter that is split, and the options of its group."""

    param: DTensor
    grad: DTensor
    momentum: DTensor
    group: dict[str, Any]

    def update(self) -> DTensor:
        momentum = self.group["momentum"]
        self.momentum.lerp_(self.grad, 1 - momentum)
        update = self.grad.lerp(self.momentum, momentum) if self.group["nesterov"] else self.momentum
        return update.bfloat16()  # type: ignore[return-value]

    def orthogonalised(self, update: Tensor) -> Tensor:
        return _zeropower_via_newtonschulz(update, **{name: self.group[name] for name in _OPTIONS})

    def write(self, direction: DTensor) -> None:
        rate = _to_scalar(self.group["lr"])
        self.param.mul_(1 - rate * self.group["weight_decay"])
        self.param.add_(direction, alpha=-_adjust_lr(rate, self.group["adjust_lr_fn"], self.param.shape))


@torch.no_grad()
def step_split_matrices(optimizer: optim.Muon) -> list[list[Tensor]] | None:
    """A step for the matrices that are split; returns the others of each group, or None if all are others."""
    groups = optimizer.param_groups
    matrices = [matrix for group in groups for matrix in _split_matrices(optimizer, group)]
    if not matrices:
        return None
    updates = [matrix.update() for matrix in matrices]
    for mesh in dict.fromkeys(matrix.param._layout.mesh for matrix in matrices):
        _step([pair for pair in zip(matrices, updates, strict=True) if pair[0].param._layout.mesh is mesh])
    return [[param for param in group["params"] if not _is_split(param)] for group in groups]


def _split_matrices(optimizer: optim.Muon, group: dict[str, Any]) -> list[_Matrix]:
    found: tuple[list, list, list] = [], [], []
    optimizer._init_group({"params": [param for param in group["params"] if _is_split(param)]}, *found)
    return [_Matrix(*tensors, group) for tensors in zip(*found, strict=True)]


def _is_split(param: Tensor) -> bool:
    if param.__class__ is not DTensor or param._layout.has_pending:
        return False
    layout = param._layout
    return any(layout.mesh.shape[axis] > 1 for axes in layout.splits for axis in axes)


def _step(matrices: Sequence[tuple[_Matrix, DTensor]]) -> None:
    """A step for matrices of one mesh, given their updates."""
    owners = _Owners(tuple(matrix.param._layout for matrix, _ in matrices))
    parts = [as_layout(update, part, "update") for (_, update), part in zip(matrices, owners.parts, strict=True)]
    held = [shards_of(localise(part)) for part in parts]
    with _disabled():
        wholes = owners.gather(held)
        results = [{i: matrices[i][0].orthogonalised(x) for i, x in mine.items()} for mine in wholes]
        shards = owners.scatter(results, held[0][0])
    for (matrix, _), own in zip(matrices, shards, strict=True):
        matrix.write(wrap(own[0] if len(own) == 1 else ranked(own), matrix.param._layout))


@dataclass(frozen=True)
class _Owners:
    """Who orthogonalises which of the matrices of one mesh: the same on all ranks, each with as much to do."""

    layouts: tuple[Layout, ...]

    @cached_property
    def parts(self) -> list[Layout]:
        """What each rank sends of each matrix."""
        return [*map(_without_replicas, self.layouts)]

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The coordinates of all ranks, as ports number them."""
        return [*product(*map(range, self.layouts[0].mesh.shape))]

    @cached_property
    def owned(self) -> list[list[int]]:
        """Per member, its matrices."""
        work = [prod(layout.shape) * min(layout.shape) for layout in self.layouts]  # multiplications in one product
        ranks = [(0, rank) for rank in range(len(self.members))]
        owned: list[list[int]] = [[] for _ in ranks]
        for i in sorted(range(len(work)), key=lambda i: -work[i]):
            load, rank = heappop(ranks)
            owned[rank].append(i)
            heappush(ranks, (load + work[i], rank))
        return owned

    def gather(self, parts: Sequence[Sequence[Tensor]]) -> list[dict[int, Tensor]]:
        """From the held ranks' parts of each matrix: per held rank, the matrices that it owns."""
        held, like = self.layouts[0].mesh.held, parts[0][0]
        owned = [self.owned[self.members.index(at)] for at in held]
        chunks = [[_flat([parts[i][h] for i in mine], like) for mine in self.owned] for h in range(len(held))]
        boxes = [[_boxes(self.parts, mine, at) for at in self.members] for mine in owned]
        rows = self._exchange("updates to the owners of matrices", chunks, boxes)
        wholes = [{i: like.new_empty(self.layouts[i].shape) for i in mine} for mine in owned]
        for mine, row, their_boxes in zip(wholes, rows, boxes, strict=True):
            for pieces, places in zip(row, their_boxes, strict=True):
                for whole, piece, box in zip(mine.values(), pieces, places, strict=True):
                    whole[_slices(box)] = piece
        return wholes

    def scatter(self, wholes: Sequence[dict[int, Tensor]], like: Tensor) -> list[Tensors]:
        """The way back: per matrix, the held ranks' shards."""
        chunks = [
            [_flat([x[_slices(_box(self.layouts[i], at))] for i, x in mine.items()], like) for at in self.members]
            for mine in wholes
        ]
        boxes = [[_boxes(self.layouts, mine, at) for mine in self.owned] for at in self.layouts[0].mesh.held]
        rows = self._exchange("orthogonalised updates from their owners", chunks, boxes)
        order = chain.from_iterable(self.owned)
        received = zip(*(chain.from_iterable(row) for row in rows), strict=True)  # per matrix, in that order
        return [list(shards) for _, shards in sorted(zip(order, received, strict=True), key=itemgetter(0))]

    def _exchange(self, why: str, chunks: list[Tensors], boxes: list[list[list[Box]]]) -> list[list[list[Tensor]]]:
        """One all-to-all. Per held rank and member: what that member sent, as tensors of the sizes of these boxes."""
        mesh = self.layouts[0].mesh
        shapes = [[(sum(prod(size) for _, size in of_member),) for of_member in row] for row in boxes]
        rows = caused("Muon", why, lambda: mesh.port.all_to_all(chunks, mesh, tuple(range(mesh.ndim)), shapes))
        return [[*map(_unpacked, row, of_rank)] for row, of_rank in zip(rows, boxes, strict=True)]


def _flat(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in pieces]) if pieces else like.new_empty(0)


def _unpacked(flat: Tensor, boxes: list[Box]) -> Tensors:
    sizes = [size for _, size in boxes]
    return [x.view(size) for x, size in zip(flat.split([*map(prod, sizes)]), sizes, strict=True)]


def _boxes(layouts: Sequence[Layout], matrices: list[int], at: tuple[int, ...]) -> list[Box]:
    return [_box(layouts[i], at) for i in matrices]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


@lru_cache(maxsize=4096)
def _without_replicas(layout: Layout) -> Layout:
    """A finer layout in which no rank has what another has: replicas have parts of their rows each."""
    axes = tuple(axis for axis, dim in enumerate(layout.axis_dims) if dim is None)
    counts = tuple(layout.mesh.shape[axis] for axis in axes)
    rows = tuple(part for piece in layout.pieces(0) for part in chunk_sizes(piece, counts))
    return layout.with_(splits=(layout.splits[0] + axes, layout.splits[1]), sizes=(rows, layout.sizes[1]))
