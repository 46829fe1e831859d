"""Gradients of intermediate results, of gradients, and through round trips are those of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, compare, full
from features import differentiates
from meshes import LINE, PAIR, data, pending
from sweep import normal, place, same
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


NORMS: dict[str, Callable[..., Tensor]] = {
    "group norm": lambda x, scale, shift: F.group_norm(x, 2, scale, shift),
    "batch norm": lambda x, scale, shift: F.batch_norm(x, None, None, scale, shift, training=True),
    "evaluated": lambda x, scale, shift: F.batch_norm(x, scale.detach(), scale.detach().abs(), scale, shift),
    "instance norm": lambda x, scale, shift: F.instance_norm(x, None, None, scale, shift),
    "layer norm": lambda x, scale, shift: F.layer_norm(x, (4,), scale, shift),
    "rms norm": lambda x, scale, shift: F.rms_norm(x, (4,), scale) + shift,
    "convolution": lambda x, scale, shift: F.conv1d(x, scale.view(1, 4, 1).expand(4, 4, 1), shift),
    "linear": lambda x, scale, shift: F.linear(x, scale.expand(4, 4), shift),
}


@pytest.mark.parametrize("name", NORMS)
def test_parameters_with_gaps_between_their_numbers(name: str) -> None:
    """What a network predicts of scale and shift, `film.unbind(1)`, has the other between its numbers."""

    def program(x: Tensor) -> tuple[Any, ...]:
        film = beside(x, normal(4, 2)).requires_grad_()
        y = NORMS[name](x, *film.unbind(1))
        (y * y.cos()).sum().backward()
        return y, x.grad, film.grad

    for placement in (R, S(0), S(1), S(2), P()):
        same(program, normal(4, 4, 4), placement)


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda y: torch.cdist(y, y.detach() + 1),
    "cdist of order 3": lambda y: torch.cdist(y, y.detach() + 1, p=3),
    "pdist": F.pdist,
    "dist": lambda y: torch.dist(y, y.detach() + 1),
    "norm": torch.norm,
    "norms": lambda y: torch.stack(torch._foreach_norm([y, 3 * y])),
    "norms of order 3": lambda y: torch._foreach_norm([y, 3 * y], 3)[1],
    "largest": lambda y: torch._foreach_norm([y, 3 * y], float("inf"))[1],
    "product": torch.prod,
    "maximum": torch.amax,
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_of_intermediate_results(name: str) -> None:
    """What is pending on a result must be such that its gradient has a layout."""

    def program(x: Tensor) -> tuple[Any, ...]:
        n = NUMBERS[name](x * 2)
        n.retain_grad()
        (found,) = torch.autograd.grad((n**3).sum(), n, retain_graph=True)
        (n**3).sum().backward()
        return n, found, n.grad, x.grad

    for mesh in ((2,), (3,)):
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


def second(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((first**3).sum(), x)
    return found


def with_zeros() -> Tensor:
    x = torch.randn(4, 3, dtype=torch.float64)
    x[:2] = 0
    return x


SECOND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor], int]] = {
    "halves swapped": (lambda t: torch.cat([t[3:], t[:3]]), lambda: torch.randn(6).double(), 2),
    "sums of a part": (lambda t: t[3:].cumsum(0), lambda: torch.randn(6).double(), 2),
    "norm of zeros": (lambda t: t.norm(), with_zeros, 2),
    "norm of nothing": (lambda t: t.norm(3), lambda: torch.randn(2, 3).double(), 4),
}


@pytest.mark.parametrize(
    "name",
    [
        *("halves swapped", "sums of a part"),
        "norm of zeros",
        "norm of nothing",
    ],
)
def test_second_derivatives(name: str) -> None:
    function, make, ranks = SECOND[name]
    x = make()
    found = second(function, place(x, S(0), mesh=(ranks,)).requires_grad_())
    torch.testing.assert_close(found.full_tensor(), second(function, x.clone().requires_grad_()))


def of_what_is_not_reached(x: Tensor) -> tuple[Any, ...]:
    y = beside(x, normal(4, 4)).requires_grad_()
    (grad,) = torch.autograd.grad((x * y).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return grad, x.grad, y.grad


def of_constants(x: Tensor) -> tuple[Any, ...]:
    (linear,) = torch.autograd.grad((x @ beside(x, normal(4, 4))).sum(), x, create_graph=True)
    (square,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    assert (linear.requires_grad, square.requires_grad) == (False, True)
    return linear, square


def of_what_has_no_second_derivative(x: Tensor) -> tuple[Any, ...]:
    y = beside(x, normal(2, 1, 3, 4)).requires_grad_()
    loss = F.scaled_dot_product_attention(y, y, y).sum() + (x**3).sum()
    grad, other = torch.autograd.grad(loss, [x, y], create_graph=True)
    grad.square().sum().backward()
    return grad, other, x.grad, y.grad


def of_a_gradient_itself(x: Tensor) -> tuple[Any, ...]:
    """Nothing below it is needed: attention has no second derivative."""
    y = beside(x, normal(2, 1, 3, 4)).requires_grad_()
    loss = F.scaled_dot_product_attention(y, y, y).sum() * x.sum()
    (grad,) = torch.autograd.grad(loss, y, create_graph=True)
    return torch.autograd.grad(grad.sin().sum(), [grad, beside(x, normal(2)).requires_grad_()], allow_unused=True)


def of_what_lies_between(x: Tensor) -> tuple[Any, ...]:
    y = x.exp()
    (grad,) = torch.autograd.grad((y.cumsum(0) ** 3).sum() + (y[len(y) // 2 :] ** 2).sum(), x, create_graph=True)
    return torch.autograd.grad((grad**2).sum(), [y, x], retain_graph=True)


def of_what_was_written_to(x: Tensor) -> tuple[Any, ...]:
    y = (x * 2).flatten()
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with torch.no_grad():
        y.zero_()
    grad.sum().backward()
    return y, grad, x.grad


def of_hooked(x: Tensor) -> tuple[Any, ...]:
    y, z = x.sin(), x * 1
    z.register_hook(lambda grad: grad + 0.5)
    grad, _ = torch.autograd.grad((y * y).sum() + z.sum(), [x, z], create_graph=True)
    grad.sum().backward()
    return grad, x.grad


def of_watched(x: Tensor) -> tuple[Any, ...]:
    y = x.exp()
    first, second = torch.autograd.grad((y**3).sum(), [x, y], create_graph=True)
    second.retain_grad()
    first.sum().backward()
    return first, second, second.grad, x.grad


def of_what_is_passed_twice(x: Tensor) -> tuple[Any, ...]:
    y = x.sin()
    (grad,) = torch.autograd.grad((y * x).sum(), y, create_graph=True)
    grad.sum().backward()
    (y * 2).sum().backward()
    return grad, x.grad


def of_accumulated(x: Tensor) -> tuple[Any, ...]:
    y = beside(x, normal(4, 4)).requires_grad_()
    with warnings.catch_warnings(action="ignore"):  # the cycle is cut below
        (x * x * y.detach() + y).sum().backward(create_graph=True)
    once, x.grad, constant = x.grad, None, y.grad
    assert isinstance(once, Tensor) and isinstance(constant, Tensor) and not constant.requires_grad
    once.sum().backward()
    return once, constant, x.grad


SECOND_PASSES = (
    *(of_what_is_not_reached, of_constants, of_what_has_no_second_derivative, of_what_was_written_to),
    *(of_a_gradient_itself, of_what_lies_between),
    *(of_hooked, of_watched, of_what_is_passed_twice, of_accumulated),
)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("mesh", [(2,), (4,)])
@pytest.mark.parametrize("program", SECOND_PASSES)
def test_a_second_pass_goes_where_it_goes_on_one_device(program: Any, mesh: tuple[int, ...]) -> None:
    """Through no more of the graph than it needs, and from the gradients themselves."""
    for placement in (S(0), S(1), P(), R):
        for rows in (4, 1):
            same(program, normal(rows, 4), placement, mesh=mesh)


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


def test_amax_of_ties_has_a_gradient() -> None:
    for values in ([0.0, 0, 0, 5], [5.0, 0, 0, 5], [0.0, 0, 0, 0]):
        x = torch.tensor(values, dtype=torch.float64)
        for function in (torch.amax, torch.amin, torch.max, torch.min):
            compare(lambda t, f=function: f(t), [x], LINE, [[S(0)]])
            compare(lambda t, f=function: f(torch.stack([t, -t], 1), 0), [x], LINE, [[S(0)]])
        compare(lambda t: (t.maximum(t.flip(0)), t.clamp(max=0), t.cummax(0)), [x], LINE, [[S(0)]])
        compare(torch.aminmax, [x], LINE, [[S(0)]], backward=differentiates(torch.aminmax, x))


def test_out_to_local_and_back_is_gradient_neutral() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0]).requires_grad_()
    back = DTensor.from_local(d.to_local(), PAIR, [P()])
    (back * torch.tensor(3.0, dtype=torch.float64)).sum().backward()
    assert d.grad.tolist() == [3.0, 3.0]
    for placement in (P(), R, S(0), P("avg")):
        round_trip = lambda t, p=placement: DTensor.from_local(t.to_local(), PAIR, [p])  # noqa: E731
        compare(lambda t, f=round_trip: f(t) if isinstance(t, DTensor) else t, [data(4)], PAIR, [[placement]])
