"""`_foreach_*`: one call for many tensors, each with a layout of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from compare import check_shards
from torch import Tensor

import shardwise as sw
from shardwise import Partial, Replicate, Shard

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))

SHAPES = ((3, 4), (5, 2), (1, 2))  # the last has empty shards


def lists() -> tuple[list[Tensor], list[Tensor]]:
    make = [[torch.randn(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2)]
    return make[0], make[1]


CALLS: dict[str, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=2),
    "add number": lambda a, b: torch._foreach_add(a, 1.5),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul numbers": lambda a, b: torch._foreach_mul(a, [2.0, 3.0, 4.0]),
    "mul scalar": lambda a, b: torch._foreach_mul(a, b[0].sum()),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, value=0.5),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.3),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_mul(a, a)),
    "max": lambda a, b: torch._foreach_max(a),
    **{f"norm {p:g}": lambda a, b, p=p: torch._foreach_norm(a, p) for p in (2.0, 1.0, 3.0, 0.0)},
    **{f"norm {p:g}": lambda a, b, p=p: torch._foreach_norm(a, p) for p in (float("inf"), float("-inf"))},
}


@pytest.mark.parametrize("name", CALLS)
def test_each_element_is_as_on_one_device(name: str) -> None:
    a, b = lists()
    expected = CALLS[name](a, b)
    for p, q in itertools.product(PAIRS, [(R, R), (S0, S1), (P, S0)]):
        found = CALLS[name](
            [sw.distribute_tensor(x, MESH, where) for x, where in zip(a, (p, q, p), strict=True)],
            [sw.distribute_tensor(x, MESH, where) for x, where in zip(b, (q, p, q), strict=True)],
        )
        for x, y in zip(expected, found, strict=True):
            check_shards(y)
            torch.testing.assert_close(y.full_tensor(), x)


@pytest.mark.parametrize("where", list(itertools.product([R, S0, S1], repeat=2)), ids=str)
def test_writing_in_place_keeps_the_layout(where: tuple) -> None:
    a, b = lists()
    d = [sw.distribute_tensor(x, MESH, where) for x in a]
    e = [sw.distribute_tensor(x, MESH, [S1, P]) for x in b]
    for x, y in ((a, b), (d, e)):
        torch._foreach_mul_(x, 0.5)
        torch._foreach_add_(x, y)
        torch._foreach_addcdiv_(x, y, torch._foreach_add(torch._foreach_abs(y), 1.0), value=-0.1)
    for x, y in zip(a, d, strict=True):
        check_shards(y)
        assert y.placements == where
        torch.testing.assert_close(y.full_tensor(), x)


def test_a_plain_tensor_in_a_list_is_refused() -> None:
    d = sw.ones(4, device_mesh=MESH, placements=[S0, R])
    with pytest.raises(sw.errors.MixedTensorError):
        torch._foreach_add([d, torch.ones(4)], 1.0)
    assert torch.equal(d.full_tensor(), torch.ones(4))
