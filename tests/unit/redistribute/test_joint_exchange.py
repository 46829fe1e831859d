"""Values that one collective moves: the same as if each were moved by itself, gradients of any order included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from torch import Tensor

import shardwise as sw
from shardwise import Layout, Shard
from shardwise.comm.ranked import ranked, shards_of
from shardwise.debug import CommDebugMode
from shardwise.redistribute import Move, can_join, plan_moves, run_together
from shardwise.redistribute.kernels import run_move

MESHES = [(2,), (3,), (2, 2)]


def cut(mesh: sw.Mesh, shape: tuple[int, int], sizes: list[int] | None = None) -> Layout:
    axes = tuple(range(mesh.ndim))
    return Layout(mesh, shape, (axes, ()), sizes=(tuple(sizes) if sizes else None, None))


def paths(mesh: sw.Mesh) -> list[tuple[Move, ...]]:
    """From pieces that all lie on the first rank, and on the last, to even ones; and from rows to columns."""
    ranks = mesh.size()
    first, last, columns = (7, 2), (5, 3), (4, 6)
    axes = tuple(range(mesh.ndim))
    return [
        plan_moves(cut(mesh, first, [7, *[0] * (ranks - 1)]), cut(mesh, first)),
        plan_moves(cut(mesh, last, [*[0] * (ranks - 1), 5]), cut(mesh, last)),
        plan_moves(cut(mesh, columns), Layout(mesh, columns, ((), axes))),
    ]


def values(moves: list[tuple[Move, ...]]) -> list[list[Tensor]]:
    layouts = [path[0].source.layout for path in moves]
    return [
        [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in layout.held_shapes]
        for layout in layouts
    ]


def by_themselves(moves: list[tuple[Move, ...]], shards: list[list[Tensor]]) -> list[list[Tensor]]:
    return [run_move(path[0], [x.detach() for x in held]) for path, held in zip(moves, shards, strict=True)]


def plain(x: Tensor) -> list[Tensor]:
    return [shard.as_subclass(Tensor) for shard in shards_of(x)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_each_value_arrives_as_if_alone_and_so_do_gradients_of_any_order(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    moves = paths(sw.simulate(shape))
    assert can_join(moves)
    held = values(moves)
    with CommDebugMode() as comm:
        moved = [plain(x) for x in run_together([ranked([x.clone() for x in one]) for one in held], moves)]
        for got, expected in zip(moved, by_themselves(moves, held), strict=True):
            torch.testing.assert_close(got, expected)
        weights = [[torch.randn_like(x, requires_grad=True) for x in one] for one in moved]
        loss = sum((x * w).sum() for a, b in zip(moved, weights, strict=True) for x, w in zip(a, b, strict=True))
        flat = [x for one in held for x in one]
        grads = torch.autograd.grad(loss, flat, create_graph=True)
        back = by_themselves([(path[0].dual,) for path in moves], weights)
        torch.testing.assert_close(list(grads), [x for one in back for x in one])
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), [w for one in weights for w in one])
        torch.testing.assert_close(list(second), [2 * w for one in weights for w in one])
    inside = [c for c in comm.comms if c.function == "run_together" or c.backward]
    assert [c.kind for c in inside] == ["all_to_all"] * 3


def test_only_exchanges_over_the_same_axes_are_joined() -> None:
    mesh = sw.simulate((2, 2))
    whole = Layout(mesh, (4, 4))
    rows, columns = whole.with_(splits=((0,), ())), whole.with_(splits=((), (0,)))
    others = whole.with_(splits=((1,), ())), whole.with_(splits=((), (1,)))
    exchange, other, gather = plan_moves(rows, columns), plan_moves(*others), plan_moves(rows, whole)
    assert can_join([exchange, exchange])
    assert not can_join([exchange])
    assert not can_join([exchange, other])
    assert not can_join([exchange, gather])
    assert not can_join([gather, gather])


@pytest.mark.parametrize("different", [{"dtype": torch.float32}, {"dtype": torch.float64, "requires_grad": False}])
def test_values_that_differ_in_dtype_or_in_needing_gradients_go_by_themselves(different: dict) -> None:
    mesh = sw.simulate((2,))
    moves = paths(mesh)[:2]
    (a, b), (c, d) = values(moves)
    other = [x.detach().to(different["dtype"]).requires_grad_(different.get("requires_grad", True)) for x in (c, d)]
    first, second = run_together([ranked([a.clone(), b.clone()]), ranked([x.clone() for x in other])], moves)
    assert second.dtype == different["dtype"]
    assert (first.requires_grad, second.requires_grad) == (True, other[0].requires_grad)
    for got, expected in zip((first, second), by_themselves(moves, [[a, b], other]), strict=True):
        torch.testing.assert_close(plain(got), expected)


# Packed projections, as models write them


BATCH, SEQ, HEADS, HEAD_DIM = 2, 3, 8, 2
WIDTH = HEADS * HEAD_DIM


def attention(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    parts = F.linear(x, weight).chunk(3, -1)
    q, k, v = (part.view(BATCH, SEQ, HEADS, HEAD_DIM).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(x.shape), out)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_packed_projection_is_exchanged_for_heads_once_each_way(ranks: int) -> None:
    torch.manual_seed(0)
    shapes = (BATCH, SEQ, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, WIDTH)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with CommDebugMode() as comm:
        compare(attention, inputs, sw.simulate((ranks,)), [[sw.Replicate()], [Shard(0)], [Shard(1)]])
    exchanges = [c.backward for c in comm.comms if c.kind == "all_to_all"]
    assert exchanges == [False, True]
    assert sum(c.backward and c.kind == "all_reduce" for c in comm.comms) == 1


def test_what_was_exchanged_is_shared_by_later_calls() -> None:
    mesh = sw.simulate((4,))
    x = sw.distribute_tensor(torch.randn(24, requires_grad=True), mesh, [Shard(0)])
    a, b, c = (2 * x).chunk(3)
    with CommDebugMode() as comm:
        first = torch.addcmul(a, b, c)
        second = torch.addcmul(c, a, b)
    assert [c.kind for c in comm.comms] == ["all_to_all"]
    assert first.placements == second.placements == (Shard(0),)
