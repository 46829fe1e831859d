"""Programs that went wrong on real ranks only: each is run on plain tensors and on DTensors, and must give the same.

Most of them show ranks that do not do the same: one holds nothing, or its gradient is a constant there, or its shard
does not show how the whole lies. Ranks that communicate differently hang, or break the group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from bodies import R, S, assert_close, doubles

Program = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Found:
    """A program, the mesh it went wrong on, and its arguments with their placements there."""

    function: Program
    shape: tuple[int, ...]
    arguments: tuple[tuple[Tensor, Sequence[sw.Placement]], ...]

    def __call__(self, mesh: Any) -> None:
        expected = self.function(*(x.clone().requires_grad_(x.is_floating_point()) for x, _ in self.arguments))
        laid = [sw.distribute_tensor(x, mesh, where) for x, where in self.arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.errors.FallbackWarning)
            found = self.function(*(x.requires_grad_(x.is_floating_point()) for x in laid))
        for number, (e, f) in enumerate(zip(expected, found, strict=True)):
            assert_close(f, e, f"result {number}")


PROGRAMS: dict[str, Found] = {}


def program(*shape: int, **arguments: tuple[Tensor, Sequence[sw.Placement]]) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = Found(function, shape, tuple(arguments.values()))
        return function

    return add


torch.manual_seed(0)
MAX = sw.Partial("max")


# First derivatives and none


@program(2, x=(torch.ones(3), [R]), y=(torch.ones(3), [S(0)]))
def numbers_before_operators(*tensors: Tensor) -> list[Tensor]:
    """Of functions in Python, what a trace has read is not part of the plan."""
    found = []
    for x in tensors:
        for number in (2.0, 0.25, 3.0):
            found += [number - x, x**number, number**x, x // number, number // x, number % x]
        found += [2.0 - x.half(), 2.0 - x.double(), x.double() ** 0.5]
    return [x.detach() for x in found]


@program(2, 2, x=(doubles(4, 1, 5, 6), [S(1), S(3)]))
def moves_shared_where_some_shards_hide_their_strides(x: Tensor) -> list[Tensor]:
    """On one rank only the product is a part that remembers its strides; there too, both uses of it share a move."""
    y = (x.diagonal(0, 0, -1).unsqueeze(0) * 2).sin()
    y = y * y
    return [y.gather(1, y.argsort(1))]


@program(2, 2, x=(doubles(4, 6), [S(1), S(1)]))
def a_reshape_of_pieces_that_do_not_line_up(x: Tensor) -> list[Tensor]:
    return [x.t().reshape(3, 8)]


@program(2, 2, x=(doubles(3, 1), [R, S(1)]))
def a_write_to_a_view_of_nothing(x: Tensor) -> list[Tensor]:
    """Nothing has strides without a meaning, and so has a view of it; it is not expanded."""
    y = x[..., None] + 0
    y[0] = y[0].clone()
    return [y]


@program(2, x=(doubles(4), [S(0)]))
def a_write_to_windows_of_nothing(x: Tensor) -> list[Tensor]:
    """One rank has all of the slice; the other's windows of nothing lie as the first one's do: not expanded."""
    y = x.detach().clone()
    y[:2].unfold(0, 2, 1).tanh_()
    return [y]


# Derivatives of derivatives


@program(2, 2, x=(doubles(3, 3), [MAX, MAX]), w=(doubles(3), [R, S(0)]))
def second_order_of_pending_extrema(x: Tensor, w: Tensor) -> list[Tensor]:
    y = x.select(0, -1)
    (grad,) = torch.autograd.grad((y * y.sum() * w).sum() + y[0], x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    return [grad, again]


@program(2, x=(doubles(3), [S(0)]))
def second_order_where_the_first_rank_needs_no_totals(x: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad((x * 0.2 + 1).cumprod(0).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    return [grad, again]


@program(4, x=(doubles(2, 4, 2), [S(0)]))
def backward_passes_after_one_another_on_nothing(x: Tensor) -> list[Tensor]:
    """Every rank has gradients, those that hold nothing too."""
    y = F.scaled_dot_product_attention(x, x, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True", UserWarning)
        y.square().sum().backward(create_graph=True)
    first, x.grad = x.grad, None
    first.square().sum().backward()
    second, x.grad = x.grad, None
    (third,) = torch.autograd.grad(x.softmax(1).square().sum(), x, create_graph=True)
    third.square().sum().backward()
    return [first, second, third, x.grad]


@program(2, 2, x=(doubles(3), [S(0), S(0)]))
def derivatives_of_every_element(x: Tensor) -> list[Tensor]:
    """Passes that begin at tensors of which each rank has another part."""
    grad_of = torch.autograd.functional
    x = x.detach()
    return [
        grad_of.jacobian(lambda x: x.softmax(0).cumsum(0), x),
        grad_of.hessian(lambda x: (x.softmax(0) * x.cumsum(0)).sum(), x),
    ]


class Constant(torch.autograd.Function):
    """A function that has no gradient to give for one of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


@program(2, x=(doubles(3), [R]), w=(doubles(5), [S(0)]))
def second_order_through_a_function_without_a_gradient(x: Tensor, w: Tensor) -> list[Tensor]:
    y = Constant.apply(x, w.exp().sum() * 2)
    grads = torch.autograd.grad(y.square().sum() + w.square().sum(), [x, w], create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    return [*grads, x.grad, w.grad]


@program(3, table=(doubles(7, 3), [R]), index=(torch.tensor([4, 0, 4, 6]), [S(0)]))
def second_order_of_looking_nothing_up(table: Tensor, index: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(F.embedding(index, table).exp().sum(), table, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), table)
    return [grad, again]


# What is made of these


@program(2, 2, x=(doubles(3, 2), [S(0), S(1)]), b=(doubles(1), [S(0), S(0)]))
def a_line_search(x: Tensor, b: Tensor) -> list[Tensor]:
    optimizer = torch.optim.LBFGS([x, b], lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = ((x**2).sum() - b.sum()) ** 2 + x.exp().sum() + b.square().sum()
        value.backward()
        return value

    losses = [optimizer.step(loss) for _ in range(2)]
    return [*(value.detach() for value in losses), x, b]
