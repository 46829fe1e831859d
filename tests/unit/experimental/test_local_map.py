"""`local_map`: functions written for one rank, with torch's arguments, and what they say to mistakes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.tensor.experimental as theirs
from meshes import data
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, experimental
from shardwise.comm import Ranked
from shardwise.errors import PlacementError
from shardwise.experimental import local_map

MESH = sw.simulate((2,), ("tp",))
R, S, P = Replicate(), Shard, Partial()
ROWS, COLUMNS, WHOLE, SUM = [S(0)], [S(1)], [R], [P]


def place(x: Tensor, where: Any) -> DTensor:
    return sw.distribute_tensor(x.detach(), MESH, where).requires_grad_()


@pytest.mark.parametrize("name", ["local_map", "implicit_replication", "register_sharding"])
def test_names_and_arguments_are_torchs(name: str) -> None:
    both = [inspect.signature(getattr(module, name)).parameters.values() for module in (experimental, theirs)]
    ours, expected = ([(p.name, p.kind, p.default) for p in parameters] for parameters in both)
    assert ours[: len(expected)] == expected if name != "register_sharding" else ours[0] == expected[0]


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "rows": ((ROWS, WHOLE), (ROWS, SUM), ROWS),
    "columns": ((WHOLE, COLUMNS), (SUM, COLUMNS), COLUMNS),
    "sums": ((COLUMNS, ROWS), None, SUM),
    "replicated": ((WHOLE, WHOLE), None, WHOLE),
}


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("way", WAYS)
def test_products(way: str, rows: int) -> None:
    wanted, gradients, result = WAYS[way]
    a, b = data(rows, 6).requires_grad_(), data(6, 8).requires_grad_()
    product = local_map(torch.mm, result, wanted, gradients)
    x, y = place(a, wanted[0]), place(b, wanted[1])
    found, expected = product(x, y), a @ b
    assert found.placements == tuple(result)
    torch.testing.assert_close(found.full_tensor(), expected)
    weight = data(*expected.shape)
    (found.full_tensor() * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close((x.grad.full_tensor(), y.grad.full_tensor()), (a.grad, b.grad))


def test_the_function_sees_plain_shards_and_whatever_else_it_is_given() -> None:
    seen: list[Any] = []

    @local_map(out_placements=(ROWS, None, [R]), in_placements=([S(-2)], None, None, None), device_mesh=MESH)
    def function(x: Tensor, pair: Any, number: int, *, flag: bool) -> Any:
        seen.extend([x, pair, number, flag])
        return {"rows": x + pair, "number": number, "sum": torch.zeros(3)}

    x = sw.distribute_tensor(data(4, 6), MESH, ROWS)
    with pytest.raises(PlacementError, match="in_placements has 4 entries for 3 arguments"):
        function(x, 1.0, 2, flag=True)
    function = local_map(function.__wrapped__, (ROWS, None, [R]), ([S(-2)], None, None))
    out = function(x, 1.0, 2, flag=True)
    assert type(seen[0]) is Ranked and seen[0].shape == (2, 6) and seen[1:] == [1.0, 2, True]
    assert out["rows"].placements == (S(0),) and out["number"] == 2 and out["sum"].placements == (R,)
    plain = function(data(4, 6), 1.0, 2, flag=False)
    assert type(plain["rows"]) is Tensor, "without DTensors it is the function itself"
    assert function.__name__ == "function"


def test_arguments_are_moved_only_if_that_is_said() -> None:
    x = sw.distribute_tensor(data(4, 6), MESH, ROWS)
    with pytest.raises(
        PlacementError, match=r"an argument is \[4,6\] S\(0\)@tp, and in_placements asks for \[4,6\] S\(1\)@tp"
    ):
        local_map(torch.tanh, COLUMNS, (COLUMNS,))(x)
    moved = local_map(torch.tanh, COLUMNS, (COLUMNS,), redistribute_inputs=True)(x)
    torch.testing.assert_close(moved.full_tensor(), x.full_tensor().tanh())


def test_one_result_may_have_a_tuple_of_placements() -> None:
    grid = sw.simulate((2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(data(4, 6), grid, [S(0), S(1)])
    found = local_map(torch.tanh, (S(0), S(1)))(x)
    torch.testing.assert_close(found.full_tensor(), x.full_tensor().tanh())


MISTAKES: dict[str, tuple[Any, str]] = {
    "no placements": (
        lambda x: local_map(torch.tanh, ROWS, (None,))(x),
        "argument 0 is a DTensor, and in_placements has None",
    ),
    "no gradients": (
        lambda x: local_map(torch.tanh, ROWS, None, (None,))(x),
        "argument 0 is a DTensor, and in_grad_placements has None for it",
    ),
    "of a number": (
        lambda x: local_map(torch.add, ROWS, (ROWS, ROWS))(x, 1),
        "argument 1 is a int, no tensor: in_placements must have None for it",
    ),
    "results": (lambda x: local_map(torch.aminmax, (ROWS,))(x), "out_placements has 1 entries for 2 results"),
    "a number": (
        lambda x: local_map(lambda x: 3, ROWS)(x),
        "a result is a int, no tensor: out_placements must have None for it",
    ),
    "a DTensor": (lambda x: local_map(lambda _: x, ROWS)(x), "the function returned a DTensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(PlacementError) as error:
        call(sw.distribute_tensor(data(4, 6), MESH, ROWS))
    assert words in str(error.value)


def test_dtensor_is_not_subclassed() -> None:
    with pytest.raises(TypeError, match="DTensor is not to be subclassed"):
        type("Mine", (DTensor,), {})
