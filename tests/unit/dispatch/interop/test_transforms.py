"""Transforms of functions do not take a shard for the tensor: they are refused, or leave DTensors alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
from sweep import normal, place
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw

R, S = sw.Replicate(), sw.Shard


def total(x: Tensor) -> Tensor:
    return x.tanh().square().sum()


def in_dual_numbers(x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(total(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "grad": torch.func.grad(total),
    "grad_and_value": torch.func.grad_and_value(total),
    "vjp": lambda x: torch.func.vjp(total, x),
    "jvp": lambda x: torch.func.jvp(total, (x,), (torch.ones_like(x),)),
    "jacrev": torch.func.jacrev(total),
    "jacfwd": torch.func.jacfwd(total),
    "hessian": torch.func.hessian(total),
    "vmap": torch.vmap(torch.sin),
    "vmap over another tensor": lambda x: torch.vmap(lambda number: x * number)(torch.arange(3.0)),
    "grad of another tensor": lambda x: torch.func.grad(lambda number: (x * number).sum())(torch.tensor(3.0)),
    "forward_ad": in_dual_numbers,
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, in its forward mode
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_see_a_shard_is_refused(name: str) -> None:
    with pytest.raises(sw.errors.TransformError, match="would see one rank's shard instead of the tensor"):
        REFUSED[name](place(normal(4, 3), S(0)))
    REFUSED[name](normal(4, 3))  # and is torch's own for plain tensors


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "trace",
    [
        lambda x: make_fx(total)(x),
        lambda x: make_fx(total, tracing_mode="fake")(x),
        lambda x: torch.export.export(Total(), (x,)),
    ],
)
def test_traces_do_not_get_at_the_shard(trace: Callable[[Tensor], Any]) -> None:
    """They ask for memory, or mix plain tensors with DTensors, and nothing of ours is needed to refuse them."""
    with pytest.raises(sw.errors.ShardwiseError):
        trace(place(normal(4, 3), S(0)))
    trace(normal(4, 3))


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return total(x)


def test_the_refusal_says_what_to_use_instead() -> None:
    with pytest.raises(sw.errors.TransformError) as error:
        torch.vmap(torch.sin)(place(normal(4, 3), S(0)))
    assert str(error.value) == (
        "torch.vmap cannot look into DTensors: it would see one rank's shard instead of the tensor. "
        "torch.autograd.grad and torch.autograd.functional (jacobian, hessian, jvp, vjp, hvp) differentiate functions "
        "of DTensors, and ops on tensors with a batch dim take the place of vmap"
    )


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_what_is_named_instead_is_right(placement: sw.Placement) -> None:
    for transform in (
        functional.jacobian,
        functional.hessian,
        lambda f, x: functional.jvp(f, x, torch.ones_like(x))[1],
        lambda f, x: functional.vjp(f, x)[1],
        lambda f, x: functional.hvp(f, x, torch.ones_like(x))[1],
    ):
        found = transform(total, place(normal(4, 3), placement))
        torch.testing.assert_close(found.full_tensor(), transform(total, normal(4, 3)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at all it sees
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_compiled_functions_run_as_they_are(placement: sw.Placement) -> None:
    @functools.partial(torch.compile, backend="eager")
    def step(x: Tensor, weight: Tensor) -> Tensor:
        hidden = nn.functional.gelu(x @ weight)
        return hidden.softmax(1).square().mean() if hidden.sum() > 0 else hidden.mean()

    x, weight = normal(4, 3), normal(3, 5)
    for _ in range(2):
        plain, dist = weight.clone().requires_grad_(), place(weight, S(1)).requires_grad_()
        expected, found = step(x, plain), step(place(x, placement), dist)
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        expected.backward()
        found.backward()
        torch.testing.assert_close(dist.grad.full_tensor(), plain.grad)


def test_other_libraries_get_the_whole_tensor() -> None:
    d = place(normal(4, 3), S(0))
    assert numpy.array_equal(numpy.asarray(d), normal(4, 3).numpy())
    assert numpy.array_equal(numpy.from_dlpack(d, copy=True), normal(4, 3).numpy())
    assert torch.equal(torch.from_dlpack(d, copy=True), normal(4, 3))
