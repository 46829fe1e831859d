"""Bodies about gradients of gradients, as in gradient penalties: every rank records the same collectives.

A rank that holds nothing, or whose gradient is a constant, must take part in the second pass all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from compare import beside
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from bodies import R, S, assert_close, body, doubles, leaf
from shardwise.parallel import cross_entropy, linear_cross_entropy

Function = Callable[[Tensor], Tensor]

LINES: dict[str, Function] = {
    "cat": lambda x: torch.cat([x, x.exp()]).sin(),
    "rotate_half": lambda x: torch.cat([x[len(x) // 2 :], x[: len(x) // 2]]).sin(),
    "roll": lambda x: x.roll(1) * x,
    "part": lambda x: x[len(x) // 2 :].cumsum(0) ** 3,
    "logcumsumexp": lambda x: x.logcumsumexp(0) ** 2,
    "sort": lambda x: x.sort().values ** 3,
    "logsumexp": lambda x: x.logsumexp(0),
    "amax": lambda x: (x.amax(0, keepdim=True) - x) ** 2,
    "constant": lambda x: F.softplus(torch.cat([x, x / 2])).mean() + torch.cat([x, x / 2]),
    "linear": lambda x: x - x.mean() + x[0] ** 2,
    "norm": lambda x: x.norm() + x.norm(3),
}

TABLES: dict[str, Function] = {
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "product": lambda x: (x @ x.t()).sin(),
    "conv": lambda x: F.conv1d(x[:, None], x[:2, None, :2]),
    "norms": lambda x: x.norm(dim=0) + x.norm(dim=1).sum(),
    "softmax": lambda x: x.softmax(0) + x.log_softmax(0),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
    "cumsum": lambda x: x.cumsum(1) ** 2,
}


def check_twice(function: Function, whole: Tensor, mesh: Any, placements: Any, what: str) -> None:
    """The gradient of a weighted sum, and the gradients of weighted sums of that, by both ways of asking."""
    weight = [torch.randn(shape, dtype=torch.float64) for shape in (function(whole).shape, whole.shape)]
    found = []
    for x in (whole.clone().requires_grad_(), leaf(whole, mesh, placements)):
        spread = isinstance(x, sw.DTensor)
        first, second = (sw.distribute_tensor(w, mesh) for w in weight) if spread else weight
        (grad,) = torch.autograd.grad((function(x) * first).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((grad * second).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad((again * second * x).sum(), x, retain_graph=True)
        ((grad * second).sum() + (function(x) * first).sum()).backward()
        together, x.grad = x.grad, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph=True")  # the cycle is cut below
            (function(x) * first).sum().backward(create_graph=True)
        once, x.grad = x.grad, None
        (once * second).sum().backward()
        found.append((grad, again, third, together, once, x.grad))
        x.grad = None
    for order, (expected, actual) in zip(ORDERS, zip(*found, strict=True), strict=True):
        if order == "third" and what in ("logcumsumexp", "batch_norm"):  # torch has none of one, and a wrong one
            continue
        assert_close(actual, expected, f"{what}, {order}")


ORDERS = ("first", "second", "third", "first and second together", "first, accumulated", "second, accumulated")


def _make(name: str, function: Function, whole: Callable[[], Tensor]) -> None:
    def twice(mesh: Any) -> None:
        check_twice(function, whole(), mesh, [S(0)], name)

    twice.__name__ = f"second_order_{name}"
    body(2)(twice)


for _name, _function in LINES.items():
    _make(_name, _function, lambda: doubles(3))
for _name, _function in TABLES.items():
    _make(_name, _function, lambda: doubles(3, 3))


@body(2)
def second_order_of_norms_where_a_shard_is_zero(mesh: Any) -> None:
    whole = torch.cat([torch.zeros(2, 3, dtype=torch.float64), doubles(2, 3)])
    for function in (lambda x: x.norm(), lambda x: x.norm(3), lambda x: x.norm(dim=0)):
        check_twice(function, whole, mesh, [S(0)], "zeros")


@body(2)
def second_order_of_losses_over_sharded_classes(mesh: Any) -> None:
    """Also where a rank has no classes; and of a head whose rows are sharded along the same axis."""
    options = {"label_smoothing": 0.1, "z_loss": 0.2, "ignore_index": 2}
    layer = doubles(5, 3)

    def of_logits(x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % x.shape[1]
        return cross_entropy(x, beside(x, target), **options)

    def of_head(x: Tensor) -> Tensor:
        target, reduction = torch.arange(len(x)) % 5, "none" if len(x) > 3 else "mean"
        given = beside(x, layer, S(0)), beside(x, target)
        return linear_cross_entropy(x, *given, chunk_size=2, reduction=reduction, **options)

    for whole in (doubles(3, 5), doubles(3, 1)):
        check_twice(of_logits, whole, mesh, [S(1)], "cross_entropy")
    for whole in (doubles(3, 3), doubles(5, 3)):
        for placement in (S(0), R):
            check_twice(of_head, whole, mesh, [placement], "linear_cross_entropy")


@body(2)
def second_order_of_empty_shards(mesh: Any) -> None:
    for name in ("layer_norm", "group_norm", "cumsum", "product", "softmax"):
        check_twice(TABLES[name], doubles(1, 3), mesh, [S(0)], name)
    for name in ("logcumsumexp", "cat", "constant"):
        check_twice(LINES[name], doubles(1), mesh, [S(0)], name)


@body(2)
def a_penalty_on_the_gradient_of_a_replicated_weight(mesh: Any) -> None:
    """Its gradient is a constant before it is reduced."""
    inputs, weight = doubles(4, 3), doubles(2, 3)
    batch = sw.distribute_tensor(inputs, mesh, [S(0)])
    check_twice(
        lambda w: F.linear(batch if isinstance(w, sw.DTensor) else inputs, w).sum() + w.exp().sum(),
        weight,
        mesh,
        [R],
        "linear",
    )


@body(2)
def second_order_of_what_lies_between(mesh: Any) -> None:
    """A pass that is asked for intermediate results meets where all of its ranks come to."""
    for function in LINES.values():
        whole, found = doubles(3), []
        for x in (whole.clone().requires_grad_(), leaf(whole, mesh, [S(0)])):
            y = x.exp()
            (grad,) = torch.autograd.grad(function(y).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.sum(), [y, x], allow_unused=True))
        for expected, actual in zip(*found, strict=True):
            assert_close(actual, expected)


@body(2)
def what_a_second_pass_does_not_reach(mesh: Any) -> None:
    """It has no gradient, as on one device, though all ranks go the same way."""
    whole = doubles(4, 3), doubles(4, 3)
    x, y = leaf(whole[0], mesh, [S(0)]), leaf(whole[1], mesh, [R])
    grad, constant = torch.autograd.grad(
        (x * y).sum() + x.sum(), [x, y.sum() * x], create_graph=True, allow_unused=True
    )
    assert constant is None and grad.requires_grad
    grad.square().sum().backward()
    assert x.grad is None
    assert_close(y.grad, 2 * (whole[1] + 1))
    assert not torch.autograd.grad((x * 2).sum(), x, create_graph=True)[0].requires_grad


@body(2)
def gradients_of_what_is_not_used_where_a_shard_is_empty(mesh: Any) -> None:
    """All ranks say so, or none: whoever holds nothing of it cannot tell by itself."""
    x, y = leaf(doubles(1), mesh, [S(0)]), leaf(doubles(1), mesh, [S(0)])
    try:
        torch.autograd.grad(x.sum(), [x, y])
    except RuntimeError as error:
        assert "not have been used" in str(error)
    else:
        raise AssertionError("what is not used has no gradient")
    assert torch.autograd.grad(x.sum(), [x, y], allow_unused=True)[1] is None
    used = torch.autograd.grad((x * y).sum(), [x, y], allow_unused=True)
    for grad, other in zip(used, (y, x), strict=True):
        assert_close(grad, other.detach().full_tensor())
    zeros = torch.autograd.grad(x.sum(), [x, y], materialize_grads=True)[1]
    assert_close(zeros, torch.zeros(1, dtype=torch.float64))


@body(2)
def who_watches_a_softmax_in_a_second_pass(mesh: Any) -> None:
    """Also where a rank holds nothing of it."""
    for function in (F.softmax, F.log_softmax):
        for shape in ((3, 2), (1, 2)):
            whole, found = doubles(*shape), []
            for x in (whole.clone().requires_grad_(), leaf(whole, mesh, [S(0)])):
                y = function(x, 0)
                y.retain_grad()
                (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
                (grad * grad).sum().backward()
                found.append((y.grad, x.grad))
            for expected, actual in zip(*found, strict=True):
                assert_close(actual, expected)


@body(2)
def second_order_from_plain_tensors(mesh: Any) -> None:
    """A pass that begins at what left by `to_local` begins without us: where it enters our graph, a reduction that
    passed gradients on has to be told."""
    table, matrix = doubles(4, 6), doubles(6, 5)
    found = []
    for x, w in (
        (table.clone().requires_grad_(), matrix.clone().requires_grad_()),
        (leaf(table, mesh, [S(1)]), leaf(matrix, mesh, [S(0)])),
    ):
        out = (x @ w).tanh()
        plain = out.to_local() if isinstance(out, sw.DTensor) else out
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph=True")  # the cycle is cut below
            plain.square().sum().backward(create_graph=True)
        (once, other), x.grad, w.grad = (x.grad, w.grad), None, None
        (once.square().sum() + other.square().sum()).backward()
        found.append((once, other, x.grad, w.grad))
        x.grad = w.grad = None
    for expected, actual in zip(*found, strict=True):
        assert_close(actual, expected, "from plain tensors")


@body(2)
def experts_by_layout(mesh: Any) -> None:
    """Terms that share no rows: gradients, those that are kept, and gradients of gradients."""
    tokens, rows, ends = doubles(5, 8).float(), torch.tensor([4, 0, 3, 1, 1, 2, 3, 0]), torch.tensor([1, 6, 8]).int()
    up, down = doubles(3, 8, 16).float() / 4, doubles(3, 8, 8).float() / 4

    def program(x: Tensor, up: Tensor, down: Tensor, rows: Tensor, ends: Tensor) -> list[Tensor]:
        gate, value = F.grouped_mm((x * 1)[rows], up, offs=ends).chunk(2, -1)
        hidden = F.silu(gate)
        out = F.grouped_mm(hidden * value, down, offs=ends)
        hidden.retain_grad()
        (first,) = torch.autograd.grad(out.sin().sum(), [x], create_graph=True)
        (first.square().sum() + out.cos().sum()).backward()
        return [out, first, x.grad, up.grad, down.grad, hidden.grad]

    leaves = [x.clone().requires_grad_() for x in (tokens, up, down)]
    expected = program(*leaves, rows, ends)
    laid = [leaf(x, mesh, [where]) for x, where in ((tokens, R), (up, S(0)), (down, S(0)))]
    got = program(*laid, *(sw.distribute_tensor(x, mesh, [R]) for x in (rows, ends)))
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), plain.detach(), atol=1e-4, rtol=1e-4)
