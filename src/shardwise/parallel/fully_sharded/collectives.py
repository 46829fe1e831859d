"""One collective for all parameters of a group: what the ranks send is one flat tensor each.

A rank's part of the flat tensor has its shards one after the other. Where each comes from, and where it goes, is read
off the parameters' own moves; uneven and empty shards are nothing special.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from shardwise.comm import Handle, as_mesh
from shardwise.comm.cause import caused
from shardwise.layout import Mesh
from shardwise.redistribute import Move
from shardwise.redistribute.kernels import received, sent

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
        ranks, members = range(len(self.mesh.held)), range(self.num_members)
        return [[[math.prod(shapes[h][m]) for _, shapes, _ in self._parts] for m in members] for h in ranks]

    @property
    def _now(self) -> Mesh:
        """The mesh, or what stands for it in a program that is captured."""
        return as_mesh(self.mesh)

    @property
    def num_members(self) -> int:
        return self.mesh.shape[self.axis]

    @cached_property
    def _is_even(self) -> bool:
        """Whether members' parts of every parameter are its equal parts, one after the other in memory: then one copy
        does for all of them."""
        equal = all(numels == members[0] for members in self._numels for numels in members)
        return equal and all(joint == 0 for *_, joint in self._parts)

    def start_gather(self, shards: Sequence[Held], dtype: torch.dtype, device: torch.device) -> Handle:
        """Start to gather shards, in a dtype and on a device that need not be theirs."""
        flat = [torch.cat([x.reshape(-1) for x in own]) for own in zip(*shards)]
        flat = [x.to(device, dtype, non_blocking=True) for x in flat]
        shapes = [[(sum(numels),) for numels in members] for members in self._numels]
        start = partial(self._now.port.start_all_gather, flat, self._now, (self.axis,), shapes)
        return caused("fully_shard", "parameters gathered", start)

    def fill(self, rows: Sequence[Held], wholes: Sequence[Held]) -> None:
        """Write what was gathered into tensors of the parameters' own shapes."""
        for h, members in enumerate(rows):
            numels, table = self._numels[h], _as_table(members) if self._is_even else None
            if table is not None:
                landing = [whole[h].view(self.num_members, -1) for whole in wholes]
                torch.split_with_sizes_copy(table, numels[0], 1, out=landing)
                continue
            pieces = [row.split(sizes) for row, sizes in zip(members, numels, strict=True)]
            for i, (places, shapes, _) in enumerate(self._parts):
                for piece, place, shape in zip(pieces, places[h], shapes[h], strict=True):
                    wholes[i][h][place] = piece[i].view(shape)

    def start_reduce(self, grads: Sequence[Held], dtype: torch.dtype, divisor: float) -> Handle:
        """Start to add up gradients of what was gathered, divided by something, and to leave each rank with its part of
        them, flat."""
        chunks = [self._chunks([grad[h] for grad in grads], h, dtype, divisor) for h in range(len(self.mesh.held))]
        start = partial(self._now.port.start_reduce_scatter, chunks, self._now, (self.axis,), "sum")
        return caused("fully_shard", "gradients reduced", start)

    def _chunks(self, grads: Held, h: int, dtype: torch.dtype, divisor: float) -> Sequence[Tensor]:
        """One rank's gradients, by the member that each part is for: rows of one tensor."""
        numels = [sum(sizes) for sizes in self._numels[h]]
        table = grads[0].new_empty((len(numels), max(numels)), dtype=dtype)
        if self._is_even:
            torch.cat([grad.reshape(len(numels), -1) for grad in grads], 1, out=table)
        else:
            cuts = [sent(m.dual.source.layout, m.dual.target.layout, m.axes)[h] for m in self.gathers]
            for m, numel in enumerate(numels):
                parts = [grad[cut[m]].reshape(-1) for grad, cut in zip(grads, cuts, strict=True)]
                torch.cat(parts, out=table[m, :numel])
        if divisor != 1:
            table.div_(divisor)
        if self._is_even:
            return table  # type: ignore[return-value]  # a port takes it for its rows, joined already
        return [row[:numel] for row, numel in zip(table, numels, strict=True)]

    def shards(self, flat: Held) -> list[list[Tensor]]:
        """Each rank's flat part as the shards that it consists of, by parameter."""
        layouts = [move.source.layout for move in self.gathers]
        found = []
        for h, x in enumerate(flat):
            shapes = [layout.held_shapes[h] for layout in layouts]
            found.append([y.view(s) for y, s in zip(x.split([math.prod(s) for s in shapes]), shapes, strict=True)])
        return [list(shards) for shards in zip(*found, strict=True)]


def _as_table(rows: Held) -> Tensor | None:
    """Rows that follow one another in the memory of one tensor, as that tensor."""
    whole, numel = rows[0]._base, rows[0].numel()
    if whole is None or whole.numel() != len(rows) * numel or not whole.is_contiguous():
        return None
    in_order = all(row._base is whole and row.storage_offset() == i * numel for i, row in enumerate(rows))
    return whole.view(len(rows), numel) if in_order else None
