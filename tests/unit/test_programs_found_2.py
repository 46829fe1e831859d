"""More programs that once went wrong, as far as one process shows them; the others are in tests/multiprocess."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import full
from sweep import place
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


# Numbers in plans


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sub": operator.sub,
    "pow": operator.pow,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
}


@pytest.mark.parametrize("ranks", [1, 2])  # on one rank plans are those of real ranks
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_on_either_side_of_an_operator_are_read_anew(name: str, ranks: int) -> None:
    function, x = OPERATORS[name], torch.tensor([1.5, 2.5, 3.5])
    for placement in (R, S(0)):
        d = place(x, placement, mesh=(ranks,))
        for number in (2.0, 0.25, 3.0, 2):
            torch.testing.assert_close(full(function(number, d)), function(number, x))
            torch.testing.assert_close(full(function(d, number)), function(x, number))
        for dtype in (torch.float64, torch.float32, torch.int64):
            found, expected = function(2, d.to(dtype)), function(2, x.to(dtype))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(full(found), expected)


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub])
def test_what_is_multiplied_by_infinity_is_not_averaged_after_it(function: Callable[..., Tensor]) -> None:
    """The terms of an average may have either sign, or be zero."""
    x = torch.tensor([1.0, 2.0])
    mesh = sw.simulate((2,), ("tp",))
    terms = sw.distribute_tensor(torch.tensor([[0.0, 5.0], [2.0, -1.0]]), mesh, [S(0)])
    d, whole = sw.DTensor.from_local(terms.to_local().squeeze(0), mesh, [P("avg")]), sw.distribute_tensor(x, mesh)
    torch.testing.assert_close(full(d), x)
    found = function(d, whole, alpha=float("inf"))
    torch.testing.assert_close(full(found), function(x, x, alpha=float("inf")))
    found = function(whole, d, alpha=float("inf"))
    torch.testing.assert_close(full(found), function(x, x, alpha=float("inf")))


# Shards that hold nothing


def test_windows_of_nothing_are_not_expanded() -> None:
    """Torch refuses to write to expanded tensors, and would do so on the ranks that hold nothing alone."""
    x = torch.arange(4.0)
    d = place(x, S(0), mesh=(2,))
    windows = d[:2].unfold(0, 2, 1)
    with torch._C.DisableTorchFunctionSubclass():
        shards = [windows, *windows._peers]
        assert [tuple(torch._C.TensorBase.size(shard)) for shard in shards] == [(1, 2), (0, 2)]
        assert [shard.stride() for shard in shards] == [(1, 1), (1, 1)]


def test_the_second_derivative_of_looking_nothing_up() -> None:
    table, index = torch.randn(5, 3, dtype=torch.float64), torch.tensor([4, 0, 4])
    found = []
    for weight, rows in (
        (table.clone().requires_grad_(), index),
        (place(table, R, mesh=(4,)).requires_grad_(), place(index, S(0), mesh=(4,))),
    ):
        (grad,) = torch.autograd.grad(F.embedding(rows, weight).exp().sum(), weight, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), weight)
        found.append((grad, again))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(full(actual.detach()), expected.detach())


# Parts that remember their strides


def test_uses_of_a_part_share_a_move() -> None:
    x = place(torch.randn(4, 1, 5, 6), S(1), S(3), mesh=(2, 2)).requires_grad_()
    y = (x.diagonal(0, 0, -1).unsqueeze(0) * 2).sin()
    y = y * y
    assert type(y).__name__ == "Part", "it shows its strides: this test shows nothing any more"
    counts = []
    for _ in range(2):
        with sw.debug.CommDebugMode() as comm:
            y.mode(1)
        counts.append(comm.get_comm_counts())
    assert counts == [{"all_gather": 1}, {}]
    assert type(y).__name__ == "Part"
    with pytest.raises(RuntimeError, match="size of tensor"):
        y + torch.ones_like(x)
    assert type(y).__name__ == "Part"


# Functions of floats, given integers


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "function", [torch.var, torch.std, torch.var_mean, torch.softmax, torch.log_softmax, torch.logcumsumexp]
)
def test_integers_are_refused_as_torch_does(function: Callable, dim: int) -> None:
    """Also over a sharded dim, where no kernel of torch's looks at the dtype; before anything moves."""
    whole = torch.arange(12).reshape(4, 3)
    dist = place(whole, S(dim), mesh=(2,))
    with pytest.raises((RuntimeError, NotImplementedError)) as torchs:
        function(whole, dim)
    with sw.debug.CommDebugMode() as comm, pytest.raises(torchs.type, match=r"only support|not implemented for 'Long'"):
        function(dist, dim)
    assert not comm.get_total_counts()
