"""Sequences of different lengths, packed: for every step in time, the rows of those that have not ended yet.

Rows of one sequence lie apart, so a rank that holds a part of the rows holds no sequence whole, and layers need whole
ones. But all ranks know the lengths, and so which rows are whose. Rows change hands: a rank with a part of the rows
gets those of a part of the batch, runs torch's own function on them, and what becomes of them goes back. That moves one
n-th of what a gather does, and every rank computes its part only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.cause import watchers
from shardwise.comm.ranked import join, per_rank, shards_of
from shardwise.dispatch.fallback import keeps_shards
from shardwise.dispatch.ragged import Axes, axes_of, cut, mesh_of, on_mesh, shards_in, sizes_of
from shardwise.dispatch.watch import unplanned
from shardwise.layout import Layout, Mesh
from shardwise.layout.sizes import offsets
from shardwise.local import spread
from shardwise.redistribute import Group, plan_moves, run_path
from shardwise.redistribute.exchange import Along, Exchange, run_exchange
from shardwise.rules.registry import FUNCTIONS
from shardwise.rules.spatial import connected_zeros
from shardwise.tensor import DTensor, localise, wrap


class _Packing:
    """Rows in the order of time, cut by some axes, and the batch that they are of, cut by the same axes."""

    def __init__(self, mesh: Mesh, axes: Axes, batch_sizes: Tensor, batch: Layout, rows: Layout) -> None:
        self.axes, self.along, self.group = axes, Along(mesh, axes, 0), Group(mesh, axes, [])
        sizes, starts = batch.pieces(0), offsets(batch.pieces(0))
        self.batch_sizes = [(batch_sizes - start).clamp(0, size) for start, size in zip(starts, sizes, strict=True)]
        self.order = [_rows_of(batch_sizes, own, start) for own, start in zip(self.batch_sizes, starts, strict=True)]
        ends = torch.tensor(rows.pieces(0)).cumsum(0)
        until = [torch.searchsorted(ids, ends).tolist() for ids in self.order]
        # how many rows of whose sequences, the first number, are in whose piece, the second
        self.counts = [[stop - start for start, stop in zip([0, *row], row)] for row in until]
        parts = [list(ids.split(row)) for ids, row in zip(self.order, self.counts, strict=True)]
        # the rows of each piece, sender by sender
        self.arrival = [torch.cat(column) for column in zip(*parts, strict=True)]

    def to_sequences(self, local: Tensor) -> Tensor:
        return self._run(self._exchange().reversed(), local)

    def to_rows(self, local: Tensor) -> Tensor:
        return self._run(self._exchange(), local)

    def _run(self, what: Exchange, local: Tensor) -> Tensor:
        if not self.axes:
            return local
        moved = run_exchange(what, shards_of(local))
        return moved[0] if len(moved) == 1 else join(moved)

    def _exchange(self) -> Exchange:
        along, counts = self.along, self.counts
        senders = list(zip(*counts, strict=True))

        def to_rows(shards: Sequence[Tensor]) -> list[Tensor]:
            moved = _all_to_all(along, shards, counts, senders)
            return [x.index_select(0, self.arrival[me].argsort().to(x.device)) for x, me in moved]

        def to_sequences(shards: Sequence[Tensor]) -> list[Tensor]:
            first = offsets([sum(column) for column in senders])
            sorted_by_owner = [
                x.index_select(0, (self.arrival[me] - first[me]).to(x.device))
                for x, me in zip(shards, along.numbers(), strict=True)
            ]
            return [x for x, _ in _all_to_all(along, sorted_by_owner, senders, counts)]

        return Exchange(to_rows, to_sequences)

    def held(self, values: Sequence[Any]) -> Any:
        """Of some numbers for each member, those of the ranks held here."""
        return per_rank([values[number].tolist() for number in self.along.numbers()])


def _all_to_all(
    along: Along, shards: Sequence[Tensor], give: Sequence[Sequence[int]], get: Sequence[Sequence[int]]
) -> list[tuple[Tensor, int]]:
    """Each member's shard cut into parts of the sizes that it gives; what it gets is joined."""
    numbers = along.numbers()
    chunks = [list(x.split(list(give[me]))) for x, me in zip(shards, numbers, strict=True)]
    shapes = [[(size, *x.shape[1:]) for size in get[me]] for x, me in zip(shards, numbers, strict=True)]
    rows = along.mesh.port.all_to_all(chunks, along.mesh, along.axes, shapes)
    return [(torch.cat(row), me) for row, me in zip(rows, numbers, strict=True)]


def _rows_of(batch_sizes: Tensor, own: Tensor, start: int) -> Tensor:
    """The numbers of the rows of a part of the batch, in the order of time."""
    before = batch_sizes.cumsum(0) - batch_sizes
    within = torch.arange(int(own.sum())) - (own.cumsum(0) - own).repeat_interleave(own)
    return before.repeat_interleave(own) + start + within


def _numbers(x: Any) -> Tensor:
    """Lengths, or sizes of batches: all ranks know them."""
    return x.detach().full_tensor() if isinstance(x, DTensor) else x


def _known(x: Tensor, mesh: Mesh) -> DTensor:
    """What all ranks know, on the CPU."""
    return wrap(spread(x, mesh).clone(), Layout(mesh, tuple(x.shape)))


# Between padded and packed


@keeps_shards(torch._pack_padded_sequence)
def _pack(x: Any, lengths: Any, batch_first: bool) -> Any:
    """Each rank packs its part of the batch."""
    mesh, lengths, batch = mesh_of(x, lengths), _numbers(lengths), 0 if batch_first else 1
    if not x.numel() or x.ndim < 2:
        return NotImplemented
    x = on_mesh(x, mesh)
    _, sizes = torch._pack_padded_sequence(torch.zeros(()).expand(*x.shape[:2], 1), lengths, batch_first)  # may refuse
    if len(sizes) > x.shape[1 - batch]:
        return NotImplemented  # longer than there is data: torch packs what there is
    have = x._layout
    axes = axes_of((have.splits[batch], have.splits[1 - batch]))
    layout = cut(have, batch, axes, sizes_of([(have, batch)], axes), range(2), pending=True)
    rest = layout.splits[2:], layout.sizes[2:]
    rows = Layout(mesh, (int(sizes.sum()), *x.shape[2:]), (axes, *rest[0]), layout.pending, (None, *rest[1]))
    of_batch = Layout(mesh, (x.shape[batch],), (axes,), sizes=(layout.sizes[batch],))
    packing = _Packing(mesh, axes, sizes, of_batch, rows)
    parts = packing.held(lengths.split(list(of_batch.pieces(0))))
    local = packing.group.map(_pack_here, shards_in(x, layout), parts, batch_first)
    return wrap(packing.to_rows(local), rows), _known(sizes, mesh)


def _pack_here(x: Tensor, lengths: list[int], batch_first: bool) -> Tensor:
    if x.numel():
        return torch._pack_padded_sequence(x, torch.tensor(lengths), batch_first)[0]
    return connected_zeros(x, (sum(lengths), *x.shape[2:]))


@keeps_shards(torch._pad_packed_sequence)
def _pad(x: Any, batch_sizes: Any, batch_first: bool, padding_value: Any, total_length: int) -> Any:
    """Each rank gets the rows of its part of the batch, and pads them."""
    mesh, sizes = mesh_of(x, batch_sizes), _numbers(batch_sizes)
    x = on_mesh(x, mesh)
    dummy = torch.zeros(()).expand(len(x), 1)
    whole, lengths = torch._pad_packed_sequence(dummy, sizes, batch_first, 0.0, total_length)  # may refuse
    batch, have = 0 if batch_first else 1, x._layout
    layout = have if padding_value == 0 else have.with_(pending=[None] * mesh.ndim)
    axes = layout.splits[0]
    of_batch = Layout(mesh, (int(sizes[0]),), (axes,))
    packing = _Packing(mesh, axes, sizes, of_batch, layout)
    local = packing.to_sequences(shards_in(x, layout))
    steps = whole.shape[1 - batch]
    local = packing.group.map(_pad_here, local, packing.held(packing.batch_sizes), batch_first, padding_value, steps)
    splits: list[Axes] = [(), ()]
    splits[batch] = axes
    padded = (*whole.shape[:2], *x.shape[1:]), (*splits, *layout.splits[1:]), (None, None, *layout.sizes[1:])
    return wrap(local, Layout(mesh, *padded[:2], layout.pending, padded[2])), _known(lengths, mesh)


def _pad_here(x: Tensor, sizes: list[int], batch_first: bool, padding_value: Any, steps: int) -> Tensor:
    if x.numel():
        return torch._pad_packed_sequence(x, _positive(sizes), batch_first, padding_value, steps)[0]
    batch = sizes[0]
    return connected_zeros(x, (*((batch, steps) if batch_first else (steps, batch)), *x.shape[1:]))


def _positive(sizes: list[int]) -> Tensor:
    """The sizes of a part of a batch, as long as some of it has not ended."""
    return torch.tensor([size for size in sizes if size])


# Layers


def _layers(function: Callable) -> Callable[..., Any]:
    def run(
        x: Any,
        batch_sizes: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        if isinstance(batch_sizes, (list, tuple)) or batch_sizes.is_floating_point():
            return NotImplemented  # not packed
        if not _is_cut(x, hx) or len(x) != int(_numbers(batch_sizes).sum()):
            return NotImplemented
        states, settings = hx if isinstance(hx, (list, tuple)) else [hx], (bidirectional,)
        if not (dropout and train and num_layers > 1):
            return _layer(function, x, batch_sizes, states, params, (has_biases, num_layers, 0.0, train, *settings))
        each, found = len(params) // num_layers, []
        split = [state.chunk(num_layers) for state in states]
        for number in range(num_layers):
            own, first = params[number * each : (number + 1) * each], [parts[number] for parts in split]
            x = F.dropout(x, dropout) if number else x
            x, *last = _layer(function, x, batch_sizes, first, own, (has_biases, 1, 0.0, train, *settings))
            found.append(last)
        return x, *(torch.cat(parts) for parts in zip(*found, strict=True))

    return run


def _is_cut(x: Any, hx: Any) -> bool:
    """Whether ranks have different parts of the data."""
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    layouts = [value._layout for value in (x, *states) if isinstance(value, DTensor)]
    return any(any(layout.splits) or layout.has_pending for layout in layouts)


def _layer(
    function: Callable, x: Any, batch_sizes: Any, states: Sequence[Any], params: Sequence[Any], settings: tuple
) -> Any:
    mesh, sizes = mesh_of(x, states, params), _numbers(batch_sizes)
    x, *states = (on_mesh(value, mesh) for value in (x, *states))
    have = x._layout
    waiting = tuple(axis for axis, pending in enumerate(have.pending) if pending is not None)  # to be scattered
    axes = axes_of((*have.splits, waiting, *(state._layout.splits[1] for state in states)))
    rows = cut(have, 0, axes, sizes_of([(have, 0)], axes), range(2))
    of_batch = Layout(mesh, (int(sizes[0]),), (axes,))
    packing = _Packing(mesh, axes, sizes, of_batch, rows)
    local = packing.to_sequences(shards_in(x, rows))
    first = [shards_in(state, Layout(mesh, state.shape, ((), axes, ()))) for state in states]
    weights = [_varying(on_mesh(param, mesh), axes) for param in params]
    width = states[0].shape[2] * (2 if settings[-1] else 1)
    own = packing.held(packing.batch_sizes)
    out, *last = packing.group.map(_layer_here, function, local, own, first, weights, settings, width)
    layout = Layout(mesh, (len(x), width), (axes, ()), sizes=(rows.sizes[0], None))
    where = [Layout(mesh, state.shape, ((), axes, ())) for state in states]
    return wrap(packing.to_rows(out), layout), *(wrap(x, y) for x, y in zip(last, where, strict=True))


def _varying(x: DTensor, axes: Axes) -> Tensor:
    """A whole weight, used by every rank for rows of its own."""
    moves = plan_moves(x._layout, Layout(x._layout.mesh, x._layout.shape), frozenset(axes))
    if watchers:
        unplanned(x, moves)
    return run_path(localise(x), moves)


def _layer_here(
    function: Callable, x: Tensor, sizes: list[int], states: list, params: list, settings: tuple, width: int
) -> tuple[Tensor, ...]:
    if sizes[0]:
        hx = states if len(states) > 1 else states[0]
        return function(x, _positive(sizes), hx, params, *settings)
    shapes = [(0, width), *(tuple(state.shape) for state in states)]
    return tuple(connected_zeros(x, shape, *states, *params) for shape in shapes)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    keeps_shards(FUNCTIONS[_function])(_layers(_function))
