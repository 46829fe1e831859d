"""What is pending is one value: sums, averages, extrema, products and norms are used, written to and differentiated as
what they come to, whatever their terms are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, compare, full
from meshes import LINE, PAIR, data, numbers, pending
from sweep import mesh_of, normal, place, same, sweep
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.proof.fuzz.leaves import Device
from shardwise.proof.kit.compare import check_shards

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


def terms(x: Tensor, kind: str) -> Tensor:
    if kind == "product":
        return x.prod(0)
    if not isinstance(x, sw.DTensor):
        return x.norm(dim=0)
    return sw.DTensor.from_local(x.to_local().norm(dim=0), x.device_mesh, [P("norm", 2.0)])


TERMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda y, w: y.mul_(-2),
    "fill": lambda y, w: y.fill_(-1.5),
    "another": lambda y, w: y.copy_(w),
    "a part": lambda y, w: y[1:].neg_(),
    "assigned": lambda y, w: y.__setitem__(0, -0.5),
    "by a mask": lambda y, w: y.__setitem__(w > 0, -0.5),
    "through a view": lambda y, w: y.view(3, 1).squeeze().sub_(9),
    "through data": lambda y, w: y.data.sub_(9),
    "after a view": lambda y, w: (y.view(-1), y.sub_(9))[0].mul_(w),
    "list": lambda y, w: torch._foreach_sub_([y, w], 9),
    "list of views": lambda y, w: torch._foreach_sub_([y[:2], y], 9),
    "out": lambda y, w: torch.neg(w, out=y),
    "after a use": lambda y, w: (y + w, y.sub_(9)),
}


@pytest.mark.parametrize("kind", ["product", "norm"])
@pytest.mark.parametrize("name", TERMS)
def test_writes_to_terms_of_products_and_norms(name: str, kind: str) -> None:
    """A norm is not taken apart into terms: it is reduced as soon as it is written to, or seen through a view."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        w = beside(x, torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64))
        y = terms(x.detach(), kind)
        before, view = y.clone(), y.detach()
        TERMS[name](y, w)
        return before, y, view, w

    for mesh in MESHES:
        same(program, normal(4, 3), S(0), mesh=mesh)
    y: Any = terms(place(normal(4, 3), S(0)), kind)
    assert isinstance(y.placements[0], P), "the premise of this test"


@pytest.mark.parametrize("kind", ["product", "norm"])
def test_gradients_through_writes_to_terms(kind: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = terms(x.detach(), kind)
        view = y.unsqueeze(0)
        y.mul_(x[0])
        view[:, 1:].add_(x[1, 1:])
        (view * view).sum().backward()
        return y, x.grad

    same(program, normal(4, 3), S(0))


@pytest.mark.parametrize("kind", ["avg", "max", "min", "sum"])
def test_two_losses_of_a_result_on_which_something_is_pending(kind: str) -> None:
    """The reduction of what is pending is shared by both, but the first pass frees what it saved."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x + 0
        if isinstance(y, sw.DTensor):
            y = y.redistribute(placements=[P(kind)])
        y.cos().sum().backward()
        y.exp().sum().backward()
        return y, x.grad

    for placement in (S(0), P(), R):
        same(program, normal(4, 4), placement)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 1e300,
        lambda x: x / 1e-50,
        lambda x: torch.sub(x, 1, alpha=float("inf")),
    ],
    ids=["overflow", "underflow", "alpha"],
)
def test_infinite_numbers_meet_the_sum_and_not_its_terms(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, -1.0])
    assert torch.equal(function(place(x, P())).full_tensor(), function(x))


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


def summed_then_doubled(x: Tensor) -> Tensor:
    """What the sums were taken of is written to before their gradient comes."""
    y = x * 1
    z = y.cumsum(0)
    y.mul_(2)
    return z * y


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_an_extremum_was_taken_of_may_be_written_to(op: str) -> None:
    def program(x: Tensor) -> Tensor:
        out = summed_then_doubled(x)
        out.sum().backward()
        return out.detach()

    same(program, normal(4, 3), P(op))


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extremum_in_a_checkpoint(op: str) -> None:
    def program(x: Tensor) -> Tensor:
        out = checkpoint(summed_then_doubled, x, use_reentrant=False)
        out.square().sum().backward()
        return out.detach()

    same(program, normal(4, 3), P(op))


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_checkpoint_that_saves_nothing_recomputes_nothing(op: str) -> None:
    def program(x: Tensor) -> Tensor:
        out = checkpoint(lambda a: torch.lerp(a, a, -0.5), x, use_reentrant=False)
        with torch.no_grad():
            x.mul_(2)
        out.sum().backward()
        return out.detach()

    same(program, normal(4, 3), P(op))


def test_gradients_of_products() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.prod(0)
        seen = []
        y.register_hook(lambda g: seen.append(full(g)) or g * g + 1)
        (y**2).sum().backward()
        return seen[0]

    for placement in (S(0), S(1), R):
        same(program, normal(5, 3), placement)


def test_products_of_any_order() -> None:
    zeros = normal(5, 3).index_fill(1, torch.tensor([1]), 0)
    for x in (normal(5, 3), zeros, zeros.index_fill(0, torch.tensor([2]), 0)):
        sweep(lambda x: x.prod(0), x)
        sweep(lambda x: x.prod(1, keepdim=True), x)
        sweep(lambda x: x.prod(), x)

    def second(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.prod(0).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    same(second, normal(5, 3), S(0))


@pytest.mark.parametrize("placement", [P("product"), P("norm", 2.0)], ids=str)
def test_terms_of_products_and_norms_are_reduced_when_they_require_gradients(placement: sw.Placement) -> None:
    """Their gradients would be no gradient of the whole."""
    for ask in (lambda d: d.requires_grad_(), lambda d: setattr(d, "requires_grad", True), nn.Parameter):
        d = sw.DTensor.from_local(torch.tensor([2.0, 3.0]), mesh_of((2,)), [placement])
        view, value = d[:1], d.full_tensor()
        made = ask(d)
        leaf = made if isinstance(made, nn.Parameter) else d
        assert leaf.requires_grad and leaf.placements == (R,)
        leaf.square().sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * value)
        torch.testing.assert_close(view.full_tensor(), value[:1])
    kept = sw.DTensor.from_local(torch.ones(3), mesh_of((2,)), [placement]).requires_grad_(False)
    assert kept.placements == (placement,)


@pytest.mark.parametrize("taken", [lambda x: x[:, 1], lambda x: x[1, 1::2], lambda x: x.unbind(1)[2]])
@pytest.mark.parametrize("kind", ["min", "max", "avg", "product"])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_gradients_of_rows_of_terms(is_leaf: bool, kind: str, taken: Callable[[Tensor], Tensor]) -> None:
    """A row of a sharded dim is a sum of what one rank has and zeros. Beside that no extremum is pending in a graph."""
    found = []
    for on in (Device(None), Device(mesh_of((2, 2)))):
        x = on.leaf((4, 3), torch.float64, [P(kind), S(1)], seed=5)
        row = taken(x).detach().requires_grad_() if is_leaf else taken(x.requires_grad_() * 1)
        row.retain_grad()
        row.sin().sum().backward()
        if isinstance(row.grad, sw.DTensor):
            check_shards("gradient", row.grad)
        found.append([full(grad) for grad in (row.grad, x.grad) if grad is not None])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["min", "max", "avg", "sum"])
@pytest.mark.parametrize("view", [lambda v: v.flatten(), lambda v: v.view(-1), lambda v: v.contiguous(), lambda v: v])
def test_writes_through_a_view_that_is_the_tensor_itself(view: Callable[[Tensor], Tensor], kind: str) -> None:
    """An extremum that is pending beside a sum is not reduced by what returns its argument: that is the tensor."""
    found = []
    for on in (Device(None), Device(mesh_of((2, 2)))):
        x = on.leaf((4, 1), torch.float64, [P(kind), S(0)], seed=313).requires_grad_()
        row = x[3]
        with torch.no_grad():
            view(row).fill_(-0.5)
        found.append(full(x.detach()))
    torch.testing.assert_close(*found)


def test_a_scalar_added_to_a_pending_sum_counts_once() -> None:
    d = sw.distribute_tensor(numbers(10, 1), PAIR, [S(0)])
    assert (d.sum() + 10).item() == 55
    assert (10 + d.sum()).item() == 55 and (d.sum() - 5).item() == 40 and (100 - d.sum()).item() == 55
    for add in (
        lambda t: t + torch.tensor(10.0, dtype=torch.float64),
        lambda t: torch.add(t, 10, alpha=3),
        lambda t: torch.rsub(t, 10),
        lambda t: torch.add(t, t, alpha=2) + 1,
        lambda t: t.lerp(t + 10, 0.25),
        lambda t: (2 * t + 1) / 2 - 3,
    ):
        for reduction in (P(), P("avg"), P("max")):
            compare(add, [data(3)], PAIR, [[reduction]])


def test_norm_of_a_pending_sum() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0]).requires_grad_()
    norm = d.norm()
    assert norm.item() == 5.0
    norm.backward()
    torch.testing.assert_close(d.grad.full_tensor(), torch.tensor([0.6, 0.8], dtype=torch.float64))
    for p in (0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf")):
        compare(lambda t, p=p: torch.linalg.vector_norm(t, p), [data(4)], PAIR, [[P()]])
        compare(lambda t, u, p=p: torch.dist(t, u, p), [data(4), data(4)], PAIR, [[P()], [S(0)]], backward=p != 0)


def test_nonlinear_functions_of_a_pending_sum_reduce_first() -> None:
    x = sw.distribute_tensor(data(4, 4), PAIR, [S(0)])
    assert x.max().item() == x.full_tensor().max().item()
    d = pending([-4.0, 3.0], [2.0, 1.0])
    assert d.abs().tolist() == [2.0, 4.0] and d.clamp(min=0.0).tolist() == [0.0, 4.0]
    assert d.abs().sqrt().tolist() == pytest.approx([2**0.5, 2.0])
    edges = sw.distribute_tensor(torch.tensor([-3.0, 0.0, 3.5], dtype=torch.float64), PAIR)
    assert torch.bucketize(d, edges).tolist() == [1, 3]
    for function in (torch.abs, torch.square, torch.exp, torch.max, torch.sort, torch.sign, torch.prod, F.relu):
        compare(function, [data(4)], LINE, [[P()]])


@pytest.mark.parametrize("bias", [R, S(0)])
def test_a_bias_on_a_pending_sum_counts_once(bias: sw.Placement) -> None:
    inputs = [data(3, 8), data(5, 8), data(5)]
    compare(F.linear, inputs, LINE, [[S(1)], [S(1)], [bias]])
    compare(lambda t, b: t + b, [data(3, 5), data(5)], LINE, [[P()], [bias]])
    compare(lambda t, w, b: torch.addmm(b, t, w.t(), beta=0.5), inputs, LINE, [[S(1)], [S(1)], [bias]])
    compare(lambda t, w, b: torch.baddbmm(b, t[None], w.t()[None]), inputs, LINE, [[S(1)], [S(1)], [bias]])
    compare(F.conv1d, [data(2, 8, 5), data(5, 8, 3), data(5)], LINE, [[S(1)], [S(1)], [bias]])
    compare(F.bilinear, [data(3, 8), data(3, 2), data(5, 8, 2), data(5)], LINE, [[S(1)], [R], [S(1)], [bias]])


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("recorded", [True, False])
def test_what_was_reduced_before_a_gradient_was_needed(op: str, recorded: bool) -> None:
    x = sw.DTensor.from_local(torch.arange(4.0) + 1, LINE, [P(op)])
    with torch.set_grad_enabled(recorded):
        x.relu()
    x.requires_grad_()
    x.relu().sum().backward()
    torch.testing.assert_close(full(x.grad), torch.ones(4))


def test_what_was_reduced_before_a_tensor_was_detached() -> None:
    x = sw.DTensor.from_local(torch.arange(4.0) + 1, LINE, [P()]).requires_grad_()
    y, w = x * 2, sw.ones(4, device_mesh=LINE).requires_grad_()
    y.relu()
    y.detach_()
    (y.relu() * w).sum().backward()
    assert x.grad is None and w.grad is not None
