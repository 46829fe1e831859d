"""One collective for all parameters of a group: what the ranks send is one flat tensor each.

A rank's part of the flat tensor has its shards one after the other. Where each comes from, and where it goes, is read
off the parameters' own moves; uneven and empty shards are nothing special.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.comm.cause import called, listeners
from shardwise.layout import Mesh
from shardwise.redistribute import Move
from shardwise.redistribute.kernels import received, sent

_T = TypeVar("_T")

Held = Sequence[Tensor]
"""One tensor for each rank held in this process."""


@dataclass(frozen=True)
class Joint:
    """Parameters that are gathered, and whose gradients are reduced, as one. `gathers` are their moves, along `axis` of
    `mesh`."""

    mesh: Mesh
    axis: int
    gathers: tuple[Move, ...]

    @cached_property
    def _parts(self) -> list[tuple[list, list, int | None]]:
        """Per parameter, what each held rank gets: where each member's part goes, its shape, and the dim that the parts
        follow one another on."""
        return [received(move.source.layout, move.target.layout, move.axes) for move in self.gathers]

    @cached_property
    def _numels(self) -> list[list[list[int]]]:
        """Per held rank and member: the sizes of its shards."""
        ranks = range(len(self.mesh.held))
        members = range(self.mesh.shape[self.axis])
        return [[[math.prod(shapes[h][m]) for _, shapes, _ in self._parts] for m in members] for h in ranks]

    def start_gather(self, shards: Sequence[Held], dtype: torch.dtype, device: torch.device) -> Handle:
        """Start to gather shards, in a dtype and on a device that need not be theirs."""
        flat = [torch.cat([x.reshape(-1) for x in own]) for own in zip(*shards)]
        flat = [x.to(device, dtype, non_blocking=True) for x in flat]
        shapes = [[(sum(numels),) for numels in members] for members in self._numels]
        start = partial(self.mesh.port.start_all_gather, flat, self.mesh, (self.axis,), shapes)
        return caused("parameters gathered", start)

    def fill(self, rows: Sequence[Held], wholes: Sequence[Held]) -> None:
        """Write what was gathered into tensors of the parameters' own shapes."""
        for h, (members, numels) in enumerate(zip(rows, self._numels, strict=True)):
            pieces = [row.split(sizes) for row, sizes in zip(members, numels, strict=True)]
            for i, (places, shapes, joint) in enumerate(self._parts):
                parts = [piece[i].view(shape) for piece, shape in zip(pieces, shapes[h], strict=True)]
                if joint is not None:
                    torch.cat(parts, joint, out=wholes[i][h])
                else:
                    for part, place in zip(parts, places[h], strict=True):
                        wholes[i][h][place] = part

    def start_reduce(self, grads: Sequence[Held], dtype: torch.dtype, divisor: float) -> Handle:
        """Start to add up gradients of what was gathered, divided by something, and to leave each rank with its part of
        them, flat."""
        ranks, members = range(len(self.mesh.held)), range(self.mesh.shape[self.axis])
        cuts = [sent(m.dual.source.layout, m.dual.target.layout, m.axes) for m in self.gathers]
        chunks = []
        for h in ranks:
            parts = [[grad[h][cut[h][m]].reshape(-1) for grad, cut in zip(grads, cuts, strict=True)] for m in members]
            chunks.append(_joined(parts, dtype, divisor))
        start = partial(self.mesh.port.start_reduce_scatter, chunks, self.mesh, (self.axis,), "sum")
        return caused("gradients reduced", start)

    def shards(self, flat: Held) -> list[list[Tensor]]:
        """Each rank's flat part as the shards that it consists of, by parameter."""
        layouts = [move.source.layout for move in self.gathers]
        found = []
        for h, x in enumerate(flat):
            shapes = [layout.held_shapes[h] for layout in layouts]
            found.append([y.view(s) for y, s in zip(x.split([math.prod(s) for s in shapes]), shapes, strict=True)])
        return [list(shards) for shards in zip(*found, strict=True)]


@dataclass(frozen=True)
class _Call:
    """What those are told who ask what is communicated."""

    why: str
    function: str = "fully_shard"

    def explain(self, path: Any, x: Tensor | None) -> tuple[str, str]:
        return "", self.why


def caused(why: str, start: Callable[[], _T]) -> _T:
    return called(_Call(why), (), start) if listeners else start()


def _joined(parts: Sequence[Sequence[Tensor]], dtype: torch.dtype, divisor: float) -> list[Tensor]:
    """Each member's chunk. All are rows of one tensor, so that the port need not join them again."""
    numels = [sum(x.numel() for x in row) for row in parts]
    wire = parts[0][0].new_empty((len(parts), max(numels)), dtype=dtype)
    rows = [row[:numel] for row, numel in zip(wire, numels, strict=True)]
    for row, own in zip(rows, parts, strict=True):
        torch.cat(own, out=row)
    if divisor != 1:
        wire.div_(divisor)
    return rows
