"""Bodies about computing: the op families, values and gradients, on one axis and on two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from compare import compare
from torch import Tensor

import shardwise as sw
from bodies import P, R, S, assert_close, body, doubles, leaf
from shardwise.parallel import linear_cross_entropy

Case = tuple[Callable[..., Any], list[Tensor]]


def run_cases(mesh: Any, cases: list[Case], options: list[list[Any]]) -> None:
    """Each function on its inputs, the first in each placement and the others in the following ones."""
    for function, inputs in cases:
        for turn in range(len(options)):
            turned = options[turn:] + options[:turn]
            placements = [next(p for p in turned[i:] + turned[:i] if _fits(p, x)) for i, x in enumerate(inputs)]
            compare(function, inputs, mesh, placements)


def _fits(placements: list[Any], x: Tensor) -> bool:
    if any(isinstance(p, sw.Partial) for p in placements) and not x.is_floating_point():
        return False
    return all(not isinstance(p, sw.Shard) or -x.ndim <= p.dim < x.ndim for p in placements)


ONE_AXIS = [[R], [S(0)], [S(1)], [P]]
TWO_AXES = [[S(0), S(1)], [S(0), S(0)], [R, S(0)], [P, S(1)]]


def elementwise() -> list[Case]:
    a, b = doubles(5, 3), doubles(5, 3)
    return [
        (lambda x, y: x * y + x, [a, b]),
        (lambda x, y: torch.where(x > y, x, -y), [a, b]),
        (lambda x: F.gelu(x) + 2, [a]),
        (lambda x: (x.abs() + 1).sqrt().clamp(max=1.5), [a]),
        (lambda x, y: x + y, [a, doubles(3)]),
        (lambda x, y: x / (y * y + 1), [a, doubles(5, 1)]),
    ]


def products() -> list[Case]:
    return [
        (lambda x, y: x @ y, [doubles(5, 3), doubles(3, 4)]),
        (lambda x, w, b: F.linear(x, w, b), [doubles(5, 3), doubles(4, 3), doubles(4)]),
        (lambda x, y: torch.einsum("ij,kj->ik", x, y), [doubles(5, 3), doubles(2, 3)]),
        (lambda x, y: x @ y, [doubles(2, 3, 5), doubles(2, 5, 3)]),
    ]


def reductions() -> list[Case]:
    a = doubles(5, 3)
    return [
        (lambda x: x.sum(), [a]),
        (lambda x: x.mean(), [a]),
        (lambda x: x.mean(0), [a]),
        (lambda x: x.var(0), [a]),
        (lambda x: x.std(), [a]),
        (lambda x: x.norm(), [a]),
        (lambda x: x.argmax(), [a]),
        (lambda x: x.argmin(1), [a]),
        (lambda x: x.max(0), [a]),
        (lambda x: x.min(dim=1, keepdim=True), [a]),
        (lambda x: x.amax(), [a]),
        (lambda x: x.logsumexp(1), [a]),
        (lambda x: (x > 0).any(0), [a]),
    ]


def normalisations() -> list[Case]:
    a = doubles(5, 3)
    return [
        (lambda x: x.softmax(0), [a]),
        (lambda x: x.softmax(-1), [a]),
        (lambda x: F.log_softmax(x, 1), [a]),
        (lambda x, w, b: F.layer_norm(x, (3,), w, b), [a, doubles(3), doubles(3)]),
        (lambda x: F.rms_norm(x, (3,)), [a]),
    ]


def views() -> list[Case]:
    a = doubles(6, 4)
    return [
        (lambda x: x.t(), [a]),
        (lambda x: x.view(2, 3, 4), [a]),
        (lambda x: x.reshape(24), [a]),
        (lambda x: x[1:5], [a]),
        (lambda x: x[:, 2], [a]),
        (lambda x: x[-1], [a]),
        (lambda x: x.split(2, 0), [a]),
        (lambda x: x.chunk(3, 1), [a]),
        (lambda x: x.unbind(0), [a]),
        (lambda x: x.unsqueeze(1).expand(6, 2, 4), [a]),
        (lambda x, y: torch.cat([x, y], 0), [a, doubles(3, 4)]),
        (lambda x, y: torch.stack([x, y], 1), [a, doubles(6, 4)]),
        (lambda x: x.flatten().unflatten(0, (3, 8)), [a]),
    ]


FAMILIES = (elementwise, products, reductions, normalisations, views)


def _make(family: Callable[[], list[Case]]) -> None:
    def on_one_axis(mesh: Any) -> None:
        run_cases(mesh, family(), ONE_AXIS)

    def on_two_axes(mesh: Any) -> None:
        run_cases(mesh, family(), TWO_AXES)

    on_one_axis.__name__, on_two_axes.__name__ = f"{family.__name__}_on_one_axis", f"{family.__name__}_on_two_axes"
    body(2)(on_one_axis)
    body(2, 2)(on_two_axes)


for _family in FAMILIES:
    _make(_family)


@body(2, 2)
def empty_shards_do_not_raise_alone(mesh: Any) -> None:
    """Three of four ranks hold nothing."""
    one = doubles(1, 3)
    for placements in ([S(0), S(0)], [R, S(0)], [S(0), S(1)]):
        functions: list[Callable[..., Any]] = [
            lambda x: x.mean(),
            lambda x: x.sum(0),
            lambda x: x.max(0),
            lambda x: x.amax(),
            lambda x: x.argmax(),
            lambda x: x.argmax(0),
            lambda x: x.softmax(0),
            lambda x: x.softmax(1),
            lambda x: x.logsumexp(0),
            lambda x: x.var(1),
            lambda x: x.norm(),
            lambda x: x[0],
            lambda x: x[:, 1:],
            lambda x: torch.cat([x, x]),
            lambda x: F.layer_norm(x, (3,)),
            lambda x: x.t() @ x,
            lambda x: x.view(3),
        ]
        for function in functions:
            compare(function, [one], mesh, [placements])


@body(2, 2)
def numbers_that_leave_for_python(mesh: Any) -> None:
    x = sw.distribute_tensor(torch.tensor([10.0, 5.0, 3.0, 8.0, 7.0], dtype=torch.float64), mesh, [S(0), S(0)])
    assert x.argmax().item() == 0
    assert x.max().item() == 10.0
    assert x.mean().item() == 33.0 / 5
    assert x.tolist() == [10.0, 5.0, 3.0, 8.0, 7.0]
    assert bool((x > 2).all())
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x + 1e-12)
    assert (x.sum() + 10).item() == 43.0


@body(2, 2)
def cross_entropy(mesh: Any) -> None:
    logits, target = doubles(5, 7), torch.tensor([0, 6, 3, -100, 4])
    weight = doubles(7).abs()
    for placements in ([S(0), S(1)], [S(1), S(0)], [S(0), S(0)], [S(1), S(1)], [R, S(1)], [S(0), R]):
        for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"weight": weight}):
            plain = logits.clone().requires_grad_()
            expected = F.cross_entropy(plain, target, **options)
            expected.backward()
            x = leaf(logits, mesh, placements)
            dist_options = {
                k: sw.distribute_tensor(v, mesh) if isinstance(v, Tensor) else v for k, v in options.items()
            }
            batch = [p if p == S(0) else R for p in placements]
            loss = F.cross_entropy(x, sw.distribute_tensor(target, mesh, batch), **dist_options)
            assert_close(loss, expected, f"{placements} {list(options)}")
            loss.backward()
            assert_close(x.grad, plain.grad, f"gradient {placements} {list(options)}")


@body(2, 2)
def heads_and_their_losses(mesh: Any) -> None:
    """Rows on an axis of their own, on that of the classes, or on both."""
    hidden, layer, target = doubles(2, 7, 3), doubles(5, 3), torch.arange(14).view(2, 7) % 5

    def loss(x: Tensor, layer: Tensor, target: Tensor, reduction: str) -> Tensor:
        if isinstance(x, sw.DTensor):
            return linear_cross_entropy(x, layer, target, reduction=reduction, ignore_index=1, chunk_size=3)
        return F.cross_entropy(F.linear(x, layer).movedim(-1, 1), target, reduction=reduction, ignore_index=1)

    for rows, classes in (([S(0), R], [R, S(0)]), ([S(0), S(1)], [R, S(0)]), ([S(1), S(1)], [S(0), S(0)])):
        for reduction in ("mean", "none"):
            compare(partial(loss, reduction=reduction), [hidden, layer, target], mesh, [rows, classes, rows])


@body(2, 2)
def attention(mesh: Any) -> None:
    q, k, v = (doubles(3, 4, 5, 2) for _ in range(3))  # batch, heads, tokens, width
    for placements in ([S(0), S(1)], [S(1), S(1)], [R, S(1)], [S(0), S(0)]):
        compare(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), [q, k, v], mesh, [placements] * 3)


@body(2, 2)
def packed_attention(mesh: Any) -> None:
    """A packed projection, by rows: queries, keys and values are exchanged for heads of each, all at once."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in F.linear(x, weight).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)

    for placements in ([[R, R], [R, S(0)]], [[R, R], [S(0), S(0)]], [[S(0), R], [R, S(0)]]):
        compare(run, [doubles(3, 5, 8), doubles(24, 8)], mesh, placements)


@body(2)
def column_then_row_parallel(mesh: Any) -> None:
    """Megatron's pair: no communication between the two, one all-reduce after them, one in the backward pass."""
    x, w1, b1, w2, b2 = doubles(3, 4), doubles(8, 4), doubles(8), doubles(4, 8), doubles(4)
    placements = [[R], [S(0)], [S(0)], [S(1)], [R]]
    compare(
        lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2), [x, w1, b1, w2, b2], mesh, placements
    )


@body(2)
def in_place_writes(mesh: Any) -> None:
    for placement in (R, S(0), S(1)):
        plain = torch.arange(15.0).view(5, 3)
        x = sw.distribute_tensor(plain, mesh, [placement])
        for tensor in (plain, x):
            tensor.add_(1).mul_(2)
            tensor[1:4] = 7.0
            tensor[0].zero_()
            tensor[:, 1] = -1.0
        assert_close(x, plain, placement)


@body(2, 2)
def second_derivatives_of_a_plain_loss(mesh: Any) -> None:
    """The backward pass begins with plain tensors and enters the graph of DTensors where they left it."""
    whole, weight = doubles(4, 3), doubles(3, 3)

    def penalise(x: Tensor, w: Tensor) -> None:
        out = ((x @ w).tanh() @ w).tanh()
        loss = ((out.full_tensor() if isinstance(out, sw.DTensor) else out) ** 2).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle that is broken two lines below
            loss.backward(create_graph=True)
        first, x.grad, w.grad = x.grad, None, None
        (first**2).sum().backward()

    plain = [whole.clone().requires_grad_(), weight.clone().requires_grad_()]
    penalise(*plain)
    for placements in ([[S(0), R], [R, S(1)]], [[S(0), S(1)], [R, S(0)]], [[S(1), S(1)], [S(0), S(0)]]):
        dist = [leaf(whole, mesh, placements[0]), leaf(weight, mesh, placements[1])]
        penalise(*dist)
        for d, p in zip(dist, plain, strict=True):
            assert_close(d.grad, p.grad, placements)


@body(2, 2)
def second_derivatives(mesh: Any) -> None:
    whole, weight = doubles(4, 3), doubles(3, 3)

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(((x @ w).tanh() ** 2).sum(), x, create_graph=True)
        return (g**2).sum()

    plain = [whole.clone().requires_grad_(), weight.clone().requires_grad_()]
    penalty(*plain).backward()
    for placements in ([[S(0), R], [R, S(1)]], [[S(0), S(1)], [R, S(0)]], [[S(0), S(0)], [R, R]]):
        dist = [leaf(whole, mesh, placements[0]), leaf(weight, mesh, placements[1])]
        penalty(*dist).backward()
        for d, p in zip(dist, plain, strict=True):
            assert_close(d.grad, p.grad, placements)


@body(2, 2)
def reshapes_copy_where_one_device_does(mesh: Any) -> None:
    whole = doubles(2, 3, 4)
    for placements in ([S(0), R], [S(0), S(2)], [R, S(0)]):
        plain, x = whole.clone().requires_grad_(), leaf(whole, mesh, placements)
        results = []
        for given in (plain, x):
            source = given * 1
            merged = source.transpose(0, 1).reshape(3, 8)  # a copy, though each rank's part lies in one piece
            merged.add_(1)
            view = source.reshape(6, 4)  # a view
            view.mul_(2)
            (source.sin() * merged.cos().reshape(2, 3, 4)).sum().backward()
            results.append((source, merged))
        for mine, theirs in zip(results[1], results[0], strict=True):
            assert_close(mine, theirs, placements)
        assert_close(x.grad, plain.grad, placements)
