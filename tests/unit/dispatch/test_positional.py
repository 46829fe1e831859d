"""Calls that name all their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import full
from sweep import normal, place
from torch import Tensor

import shardwise as sw
from shardwise.dispatch.positional import by_position

R, S = sw.Replicate(), sw.Shard

ORDERS: dict[str, tuple[Any, dict[str, Any], tuple, dict[str, Any]]] = {
    "all of an op": (torch.select, {"input": 1, "index": 3, "dim": 2}, (1, 2, 3), {}),
    "as far as overloads agree": (torch.sum, {"input": 1, "dim": 2}, (1,), {"dim": 2}),
    "an op that is named": (torch.ops.aten.view, {"self": 1, "size": 2}, (1,), {"size": 2}),
    "an overload": (torch.ops.aten.select.int, {"self": 1, "dim": 2, "index": 3}, (1, 2, 3), {}),
    "a function in Python": (F.linear, {"input": 1, "bias": 3, "weight": 2}, (1, 2, 3), {}),
    "not the first": (torch.where, {"input": 1, "other": 2}, (), {"input": 1, "other": 2}),
    "one that comes later": (torch.polygamma, {"n": 1, "input": 2}, (1, 2), {}),
    "of linear algebra": (torch.linalg.diagonal, {"A": 1, "offset": 2}, (1,), {"offset": 2}),
    "any number of tensors": (torch.einsum, {"equation": 1}, (), {"equation": 1}),
}


@pytest.mark.parametrize(("func", "kwargs", "args", "rest"), ORDERS.values(), ids=ORDERS)
def test_order(func: Any, kwargs: dict[str, Any], args: tuple, rest: dict[str, Any]) -> None:
    assert by_position(func, kwargs) == (args, rest)


def test_a_function_that_takes_names_only_is_given_names() -> None:
    def f(x: Tensor, scale: float) -> Tensor:
        return x * scale

    @functools.wraps(f)
    def wrapped(**named: Any) -> Tensor:
        if torch.overrides.has_torch_function((named["x"],)):
            return torch.overrides.handle_torch_function(wrapped, (named["x"],), **named)
        return f(**named)

    torch.testing.assert_close(full(wrapped(x=place(normal(4, 4), S(0)), scale=2.0)), normal(4, 4) * 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: torch.select(input=x, dim=0, index=2),
    "reshape": lambda x: torch.reshape(input=x, shape=(2, 8)),
    "flatten": lambda x: torch.flatten(input=x),
    "ravel": lambda x: torch.ravel(input=x),
    "unflatten": lambda x: torch.unflatten(input=x, dim=0, sizes=(2, 2)),
    "unbind": lambda x: torch.unbind(input=x)[3],
    "chunk": lambda x: torch.chunk(input=x, chunks=2)[1],
    "squeeze": lambda x: torch.squeeze(input=x),
    "diagonal": lambda x: torch.diagonal(input=x),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(A=x),
    "aten.select": lambda x: torch.ops.aten.select(self=x, dim=0, index=1),
    "aten.view": lambda x: torch.ops.aten.view(self=x, size=[2, 8]),
    "einsum": lambda x: torch.einsum("ii->i", x),
    "einsum of a list": lambda x: torch.einsum("ij->ji", [x]),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_writes_to_views_are_seen_or_refused(name: str, ranks: int) -> None:
    for placement in (R, S(0), S(1)):
        x = normal(4, 4)
        d = place(x, placement, mesh=(ranks,))
        try:
            VIEWS[name](d).zero_()
        except sw.errors.InPlaceError:
            assert placement != R
            torch.testing.assert_close(d.full_tensor(), normal(4, 4))
            continue
        VIEWS[name](x).zero_()
        torch.testing.assert_close(d.full_tensor(), x)


@pytest.mark.parametrize("name", VIEWS)
def test_copies_that_are_outdated_say_so(name: str) -> None:
    for placement in (R, S(0), S(1)):
        x = normal(4, 4)
        d = place(x, placement)
        views = VIEWS[name](x), VIEWS[name](d)
        x.add_(1)
        d.add_(1)
        try:
            found = views[1] * 1
        except sw.errors.InPlaceError:
            continue
        torch.testing.assert_close(full(found), views[0] * 1)


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "equal": lambda x: torch.equal(input=x, other=x * 1),
    "allclose": lambda x: torch.allclose(input=x, other=x * 1),
    "numel": lambda x: torch.numel(input=x),
    "is_nonzero": lambda x: torch.is_nonzero(input=x.sum()),
    "is_same_size": lambda x: torch.is_same_size(input=x, other=x),
    "detach": lambda x: torch.detach(input=x),
    "resolve_conj": lambda x: torch.resolve_conj(input=x),
    "where": lambda x: torch.where(condition=x > 0, input=x, other=-x),
    "searchsorted": lambda x: torch.searchsorted(sorted_sequence=x.sort().values, input=x),
    "foreach": lambda x: torch._foreach_norm(self=[x])[0],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(name: str) -> None:
    for placement in (R, S(0), S(1)):
        expected, found = QUESTIONS[name](normal(4, 4)), QUESTIONS[name](place(normal(4, 4), placement, mesh=(3,)))
        torch.testing.assert_close(full(found), expected)
