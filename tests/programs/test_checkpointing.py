"""Programs that recompute: the same results and gradients as on one device, reentrant or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, full
from meshes import PAIR
from sweep import mesh_of, normal, place, same
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.global_strides import global_strides, shows
from shardwise.experimental import implicit_replication
from shardwise.proof.fuzz.leaves import Device

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


UNUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.flatten(0, 1),
    "a row": lambda x: x[1],
    "a product": lambda x: x @ x,
    "sorted": lambda x: x.sort(0).values,
    "scanned": lambda x: x.cumsum(0),
    "a norm": lambda x: F.layer_norm(x, (4, 4)),
    "an extremum": lambda x: x.amax(0),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_a_checkpoint_does_not_use_has_no_gradient(name: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        other = (x.detach() + 1).requires_grad_()
        y = checkpoint(lambda a, b: a.sin(), x * 1, UNUSED[name](other), use_reentrant=True)
        y.sum().backward()
        return y, x.grad, other.grad

    for mesh in MESHES:
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_norms_and_products_in_reentrant_checkpoints() -> None:
    for function in (lambda t: t.exp().norm(), lambda t: t.exp().prod()):

        def program(x: Tensor, function: Any = function) -> Tensor:
            out = checkpoint(function, x, use_reentrant=True)
            (out * out).backward()
            return out.detach()

        for placement in (S(0), S(1)):
            same(program, normal(3, 2), placement)


def test_an_average_in_a_reentrant_checkpoint() -> None:
    def program(x: Tensor) -> Tensor:
        out = checkpoint(lambda t: t * 2, x, use_reentrant=True)
        out.sum().backward()
        return out.detach()

    same(program, normal(3, 2), P("avg"))


def test_an_assignment_is_the_last_thing_in_a_checkpoint() -> None:
    mask = torch.tensor([True, False, True, False])

    def by_list(x: Tensor) -> Tensor:
        y = x * 1
        y[[0, 2]] = 0.0
        return y

    def by_mask(x: Tensor) -> Tensor:
        y = x * 1
        y[beside(x, mask)] = 0.0
        return y

    for inside in (by_list, by_mask):

        def program(x: Tensor, inside: Any = inside) -> Tensor:
            checkpoint(inside, x, use_reentrant=False).square().sum().backward()
            return x.detach()

        for placement in (R, S(0), S(1)):
            same(program, normal(4, 4), placement)


def test_a_checkpoint_takes_writes_to_new_tensors() -> None:
    """A router's scores: only the chosen ones are kept."""

    def route(h: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w)
        top, chosen = logits.topk(1, dim=1)
        return torch.full_like(logits, -1.0).scatter_(1, chosen, top).sigmoid()

    def run(placement: sw.Placement | None) -> list[Tensor]:
        tensors = [normal(6, 4), normal(3, 4)]
        if placement is not None:
            tensors = [sw.distribute_tensor(t, PAIR, [placement]) for t in tensors]
        h, w = (t.requires_grad_() for t in tensors)
        out = checkpoint(route, h, w, use_reentrant=False)
        out.square().sum().backward()
        return [full(t) for t in (out, h.grad, w.grad)]

    for placement in (R, S(0), S(1)):
        torch.testing.assert_close(run(placement), run(None))


def test_what_a_checkpoint_returns_is_written_to_and_retains_its_gradient() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = checkpoint(lambda a: a.sin(), x, use_reentrant=True)
        y.retain_grad()
        y[:4] = y
        z = y.flatten()
        z.sum().backward(retain_graph=True)
        z.sin().sum().backward()
        return y.grad, x.grad

    same(program, normal(4, 4), S(0))


def test_what_a_checkpoint_returns_lies_as_it_does_on_one_device() -> None:
    for size in (2, 3):
        y = place(normal(3, 2, 1), S(0), mesh=(size,)).requires_grad_().unbind(1)[0]
        z = checkpoint(lambda a: a.detach(), y, use_reentrant=True)
        assert global_strides(z) == (2, 1) and all(shows(x, (3, 1), (2, 1)) for x in shards_of(z))


@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_tensors_are_taken_in_the_backward_pass_as_they_were_in_the_forward_pass(reentrant: bool) -> None:
    mask = torch.tensor([1.0, 0.0, 2.0, 1.0])
    x = sw.distribute_tensor(torch.arange(4.0), PAIR, [S(0)]).requires_grad_()
    with implicit_replication():
        y = checkpoint(lambda x: (x * mask).square() * mask, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(4.0) * mask**3)
    with pytest.raises(sw.errors.MixedTensorError):
        x * mask


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_sum_that_is_reduced_inside_and_used_again(use_reentrant: bool) -> None:
    """Where it is recomputed nobody has reduced it yet, as when it was computed first."""

    def inner(a: Tensor) -> Tensor:
        return torch.mv(F.gelu(a), F.gelu(a)[0])

    found = []
    for on in (Device(None), Device(mesh_of((2, 2)))):
        x = on.leaf((1, 1), torch.float64, [S(0), R], seed=1)
        w = on.leaf((1, 1), torch.float64, [R, P()], seed=2).requires_grad_()
        out = checkpoint(inner, F.linear(x, w).mT, use_reentrant=use_reentrant)
        (out * out).sum().backward()
        found.append((full(out.detach()), full(w.grad)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "function", [F.softmin, F.softmax, F.log_softmax, torch.logcumsumexp], ids=lambda f: f.__name__
)
def test_shards_of_several_sizes_are_saved_and_found_again(function: Callable) -> None:
    """Also those that a distributed program saves, in which the simulator's ranks are one."""
    whole = torch.randn(2, 3, dtype=torch.float64)
    found = []
    for on in (whole, sw.distribute_tensor(whole, mesh_of((4,)), [S(1)])):
        x = on.clone().detach().requires_grad_()
        y = checkpoint(lambda x: function(x, 1), x, use_reentrant=False)
        (y * y).sum().backward()
        found.append(full(x.grad))
    torch.testing.assert_close(*found)
