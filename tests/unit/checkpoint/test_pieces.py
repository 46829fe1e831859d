"""Boxes of layouts: who writes which, and what fills which."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from layouts import random_layout
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.pieces import (
    SMALLEST_PART,
    Flaw,
    Piece,
    Stored,
    cut,
    fills,
    flaw,
    held_ranks,
    overlap,
    pieces,
    share_out,
    volume,
    within,
)
from shardwise.layout import Box, Layout

GRID = sw.simulate((2, 3), ("dp", "tp"))
CUBE = sw.simulate((2, 2, 2), ("pp", "dp", "tp"))
SHAPES = [(), (0,), (1,), (7,), (4, 6), (5, 0), (3, 1, 4), (2, 3, 2)]


def layouts(seed: int) -> Iterator[Layout]:
    chance = random.Random(seed)
    for mesh, shape in product((GRID, CUBE, sw.simulate((1,)), GRID["tp"]), SHAPES):
        for _ in range(4):
            yield random_layout(chance, mesh, shape, pending=("sum", "max"))


def counted(shape: tuple[int, ...], boxes: list[Box]) -> Tensor:
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[within(box, ((0,) * len(shape), shape))] += 1
    return count


def test_pieces_are_the_whole_and_each_is_held_by_all_who_have_it() -> None:
    for layout in layouts(0):
        found = pieces(layout)
        assert (counted(layout.shape, [piece.box for piece in found]) == 1).all()
        coordinates = list(product(*map(range, layout.mesh.shape)))
        for box, ranks in found:
            if layout.numel:
                assert ranks == tuple(r for r, at in enumerate(coordinates) if layout.box(at) == box)


def test_a_tensor_without_elements_is_one_empty_piece() -> None:
    layout = Layout.of(GRID, (4, 0), [sw.Shard(0), sw.Shard(0)])
    assert pieces(layout) == (Piece(((0, 0), (4, 0)), (0, 1, 2, 3, 4, 5)),)


def test_every_element_is_written_once_by_a_rank_that_holds_it() -> None:
    tensors = {f"{i}": Stored(layout, 4) for i, layout in enumerate(layouts(1))}
    for key, boxes in share_out(tensors).items():
        layout = tensors[key].layout
        assert (counted(layout.shape, [written.box for written in boxes]) == 1).all()
        assert flaw(layout.shape, [written.box for written in boxes]) is None
        assert len(boxes) == 1 or all(volume(written.box) for written in boxes)
        held = pieces(layout)
        for box, rank in boxes:
            assert any(rank in ranks and (box == its or overlap(box, its) == box) for its, ranks in held)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    tensors = {f"{i}": Stored(layout, 2) for i, layout in enumerate(layouts(2))}
    assert share_out(dict(reversed(tensors.items()))) == share_out(tensors)


def block(mesh: sw.Mesh, *, replicated: bool) -> dict[str, Stored]:
    """A transformer's matrices, sharded over tp, or replicated like its norms and its embedding."""
    width = 512
    by_rows = Layout.of(mesh, (4 * width, width), [sw.Replicate()] * (mesh.ndim - 1) + [sw.Shard(0)])
    tensors = {f"{i}.up": Stored(Layout(mesh, by_rows.shape) if replicated else by_rows, 4) for i in range(6)}
    tensors |= {f"{i}.norm": Stored(Layout(mesh, (width,)), 4) for i in range(12)}
    return tensors | {"embedding": Stored(Layout(mesh, (32000, width)), 4)}


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_all_ranks_write_about_as_much(shape: tuple[int, ...], replicated: bool) -> None:
    mesh = sw.simulate(shape)
    tensors = block(mesh, replicated=replicated)
    written = [0] * mesh.size()
    for key, boxes in share_out(tensors).items():
        for box, rank in boxes:
            written[rank] += volume(box) * tensors[key].itemsize
    assert max(written) < 1.1 * sum(written) / len(written)


def test_only_what_is_large_is_cut() -> None:
    shared = share_out(block(sw.simulate((8,)), replicated=True))
    assert {len(shared[f"{i}.norm"]) for i in range(12)} == {1}
    assert len(shared["embedding"]) == 8
    assert min(volume(box) * 4 for box, _ in shared["embedding"]) > SMALLEST_PART


def test_submeshes_are_shared_out_by_themselves() -> None:
    tensors = {"a": Stored(Layout(GRID["tp"], (8,)), 4), "b": Stored(Layout(GRID["dp"], (8,)), 4)}
    assert {key: boxes[0].rank for key, boxes in share_out(tensors).items()} == {"a": 0, "b": 0}


def test_held_ranks_are_numbered_within_the_mesh() -> None:
    assert held_ranks(GRID) == (0, 1, 2, 3, 4, 5)
    assert held_ranks(GRID["tp"]) == (0, 1, 2, 0, 1, 2)
    assert held_ranks(sw.recording((4, 2))) == (0,)


def test_a_box_is_cut_along_its_first_dim_that_is_long_enough() -> None:
    assert cut(((5, 0), (4, 9)), 3) == [((5, 0), (2, 9)), ((7, 0), (2, 9))]  # as torch.chunk cuts
    assert cut(((0, 0), (2, 3)), 8) == [((0, i), (2, 1)) for i in range(3)]
    assert cut(((), ()), 3) == [((), ())]
    assert cut(((0,), (0,)), 3) == [((0,), (0,))]


def test_saved_boxes_fill_wanted_ones() -> None:
    chance = random.Random(3)
    for _ in range(200):
        mesh, shape = chance.choice((GRID, CUBE)), chance.choice(SHAPES)
        saved, wanted = (pieces(random_layout(chance, mesh, shape)) for _ in range(2))
        values = torch.randn(shape)
        parts = [values[within(box, ((0,) * len(shape), shape))] for box, _ in saved]
        for box, _ in wanted:
            target = torch.full(box[1], torch.nan)
            for i, common in fills(box, [piece.box for piece in saved]):
                target[within(common, box)] = parts[i][within(common, saved[i].box)]
            assert torch.equal(target, values[within(box, ((0,) * len(shape), shape))])


@pytest.mark.parametrize(
    ("shape", "boxes", "found"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((4,), [((2,), (2,))], Flaw("missing", ((0,), (2,)))),
        ((4,), [((0,), (3,)), ((2,), (2,))], Flaw("twice", ((2,), (1,)))),
        ((4,), [((0,), (5,))], Flaw("outside", ((0,), (5,)))),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (3, 2))], Flaw("missing", ((3, 2), (1, 2)))),
        ((), [((), ())], None),
        ((), [], Flaw("missing", ((), ()))),
        ((), [((), ()), ((), ())], Flaw("twice", ((), ()))),
        ((0, 3), [], None),
        ((0, 3), [((0, 0), (0, 3))], None),
    ],
)
def test_flaws(shape: tuple[int, ...], boxes: list[Box], found: Flaw | None) -> None:
    assert flaw(shape, boxes) == found


def test_a_flaw_is_found_wherever_a_box_is_lost_or_repeated() -> None:
    chance = random.Random(4)
    for _ in range(200):
        layout = random_layout(chance, CUBE, chance.choice([(7,), (4, 6), (2, 3, 2)]))
        boxes = [piece.box for piece in pieces(layout)]
        chance.shuffle(boxes)
        assert flaw(layout.shape, boxes) is None
        assert flaw(layout.shape, boxes[1:]) == Flaw("missing", boxes[0])
        assert flaw(layout.shape, [*boxes, boxes[0]]) == Flaw("twice", boxes[0])
