"""The simulator's collectives, by examples worked out by hand. Ranks are numbered row-major over the mesh."""

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode

SQUARE = ((2, 2), ("dp", "tp"))  # ranks 0 1 / 2 3
WIDE = ((2, 3), ("dp", "tp"))  # ranks 0 1 2 / 3 4 5


def numbers(values: list[float]) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


def flat(shards: list[Tensor]) -> list[float]:
    return [shard.item() for shard in shards]


@pytest.mark.parametrize(
    ("mesh", "axes", "op", "given", "expected"),
    [
        (SQUARE, (0,), "sum", [1, 2, 4, 8], [5, 10, 5, 10]),
        (SQUARE, (1,), "sum", [1, 2, 4, 8], [3, 3, 12, 12]),
        (SQUARE, (0, 1), "sum", [1, 2, 4, 8], [15] * 4),
        (SQUARE, (1,), "max", [1, -2, -4, -8], [1, 1, -4, -4]),
        (SQUARE, (0,), "min", [1, -2, -4, -8], [-4, -8, -4, -8]),
        (SQUARE, (1, 0), "product", [1, 2, 4, -8], [-64] * 4),
        (WIDE, (0,), "sum", [1, 2, 3, 10, 20, 30], [11, 22, 33, 11, 22, 33]),
        (WIDE, (1,), "product", [1, 2, 3, 4, 5, 6], [6, 6, 6, 120, 120, 120]),
    ],
)
def test_all_reduce(mesh, axes, op, given, expected) -> None:
    mesh = sw.simulate(*mesh)
    given = numbers(given)
    result = mesh.port.all_reduce(given, mesh, axes, op)
    assert flat(result) == expected
    result[0].fill_(99)  # every rank has memory of its own
    assert flat(result[1:]) == expected[1:]
    assert 99 not in flat(given)


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (SQUARE, (0,), [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (SQUARE, (1,), [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (SQUARE, (0, 1), [[0, 1, 2, 3]] * 4),
        (SQUARE, (1, 0), [[0, 2, 1, 3]] * 4),  # the first axis given is the major one
        (WIDE, (1,), [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3),
        (WIDE, (1, 0), [[0, 3, 1, 4, 2, 5]] * 6),
    ],
)
def test_all_gather(mesh, axes, expected) -> None:
    mesh = sw.simulate(*mesh)
    shapes = [[(1,)] * len(row) for row in expected]
    result = mesh.port.all_gather(numbers(list(range(mesh.size()))), mesh, axes, shapes)
    assert [flat(row) for row in result] == expected


def test_all_gather_of_uneven_shards() -> None:
    mesh = sw.simulate((3,), ("tp",))
    shards = [torch.ones(2), torch.ones(0), torch.ones(1)]
    for row in mesh.port.all_gather(shards, mesh, (0,), [[(2,), (0,), (1,)]] * 3):
        assert [len(part) for part in row] == [2, 0, 1]


@pytest.mark.parametrize(
    ("axes", "op", "expected"),
    [
        # rank r brings 10 r + m for member m
        ((0,), "sum", [0 + 20, 10 + 30, 1 + 21, 11 + 31]),
        ((1,), "sum", [0 + 10, 1 + 11, 20 + 30, 21 + 31]),
        ((1,), "max", [10, 11, 30, 31]),
        ((0,), "min", [0, 10, 1, 11]),
    ],
)
def test_reduce_scatter(axes, op, expected) -> None:
    mesh = sw.simulate(*SQUARE)
    chunks = [numbers([10 * rank + member for member in range(2)]) for rank in range(4)]
    assert flat(mesh.port.reduce_scatter(chunks, mesh, axes, op)) == expected


def test_reduce_scatter_over_two_axes_numbers_members_by_the_order_given() -> None:
    mesh = sw.simulate(*WIDE)
    chunks = [numbers([10 * rank + member for member in range(6)]) for rank in range(6)]
    total = sum(10 * rank for rank in range(6))
    assert flat(mesh.port.reduce_scatter(chunks, mesh, (0, 1), "sum")) == [total + 6 * m for m in range(6)]
    # tp major: rank (d, t) is member 2 t + d
    assert flat(mesh.port.reduce_scatter(chunks, mesh, (1, 0), "sum")) == [total + 6 * m for m in (0, 2, 4, 1, 3, 5)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((0,), [[0, 20], [10, 30], [1, 21], [11, 31]]),
        ((1,), [[0, 10], [1, 11], [20, 30], [21, 31]]),
    ],
)
def test_all_to_all(axes, expected) -> None:
    mesh = sw.simulate(*SQUARE)
    chunks = [numbers([10 * rank + member for member in range(2)]) for rank in range(4)]
    result = mesh.port.all_to_all(chunks, mesh, axes, [[(1,)] * 2] * 4)
    assert [flat(row) for row in result] == expected


@pytest.mark.parametrize(
    ("axes", "source", "expected"),
    [
        ((0,), 1, [3, 4, 5, 3, 4, 5]),
        ((1,), 0, [0, 0, 0, 3, 3, 3]),
        ((1,), 2, [2, 2, 2, 5, 5, 5]),
        ((0, 1), 4, [4] * 6),
        ((1, 0), 1, [3] * 6),
    ],
)
def test_broadcast(axes, source, expected) -> None:
    mesh = sw.simulate(*WIDE)
    assert flat(mesh.port.broadcast(numbers(list(range(6))), mesh, axes, source)) == expected


def test_collectives_on_a_submesh_stay_in_its_rows() -> None:
    mesh = sw.simulate((2, 3, 2), ("a", "b", "c"))
    given = numbers(list(range(12)))
    b = mesh["b"]
    assert flat(b.port.all_reduce(given, b, (0,), "sum")) == [
        sum(6 * i + 2 * j + k for j in range(3)) for i in range(2) for _ in range(3) for k in range(2)
    ]
    ac = mesh["a", "c"]
    rows = ac.port.all_gather(given, ac, (1, 0), [[(1,)] * 4] * 12)
    assert flat(rows[0]) == [0, 6, 1, 7]  # c major
    assert flat(rows[5]) == [4, 10, 5, 11]


def test_a_tensor_on_a_submesh_may_differ_between_its_copies() -> None:
    mesh = sw.simulate(*SQUARE)
    shards = sw.comm.ranked([torch.full((2,), float(rank)) for rank in range(4)])
    x = sw.DTensor.from_local(shards, mesh["tp"], [sw.Shard(0)])
    whole = x.redistribute(placements=[sw.Replicate()]).to_local()
    assert whole.tolist().values == ([0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3])


def test_what_is_recorded() -> None:
    mesh = sw.simulate(*WIDE)
    x = torch.ones(4, dtype=torch.float64)
    with CommDebugMode() as comm:
        mesh.port.all_reduce([x] * 6, mesh, (1,), "sum")
        mesh.port.all_gather([x] * 6, mesh, (1, 0), [[(4,)] * 6] * 6)
        mesh["tp"].port.reduce_scatter([[x] * 3] * 6, mesh["tp"], (0,), "sum")
        mesh.port.all_to_all([[x] * 2] * 6, mesh, (0,), [[(4,)] * 2] * 6)
        mesh.port.broadcast([x] * 6, mesh, (0,), 0)
    assert [(c.kind, c.axes, c.ranks, c.bytes, c.backward) for c in comm.comms] == [
        ("all_reduce", ("tp",), 3, 32, False),
        ("all_gather", ("tp", "dp"), 6, 32, False),
        ("reduce_scatter", ("tp",), 3, 96, False),
        ("all_to_all", ("dp",), 2, 64, False),
        ("broadcast", ("dp",), 2, 32, False),
    ]
    mesh.port.all_reduce([x] * 6, mesh, (1,), "sum")
    assert comm.get_total_counts() == 5
