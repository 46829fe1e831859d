"""Programs of backward passes that once went wrong, by what was wrong about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import full
from sweep import normal, place
from torch import Tensor

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.global_strides import inferred_strides

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def compare(program: Callable[..., Any], *leaves: tuple[Tensor, sw.Placement], ranks: int = 2) -> None:
    """A program gives the same on DTensors: what it returns, and the gradients of its leaves."""
    plain = [x.clone().requires_grad_() for x, _ in leaves]
    placed = [place(x.clone(), where, mesh=(ranks,)).requires_grad_() for x, where in leaves]
    expected, found = program(*plain), program(*placed)
    torch.testing.assert_close([full(x) for x in found], list(expected))
    for leaf, mine in zip(plain, placed, strict=True):
        assert (leaf.grad is None) == (mine.grad is None)
        if leaf.grad is not None:
            torch.testing.assert_close(full(mine.grad), leaf.grad)


# Retained gradients


@pytest.mark.parametrize("to", [R, S(1), P("avg")], ids=repr)
def test_a_moved_tensor_retains_its_gradient_when_a_view_of_it_is_written_to(to: sw.Placement) -> None:
    def program(x: Tensor) -> list[Tensor]:
        y = x.redistribute(placements=[to]) if isinstance(x, sw.DTensor) else x.clone()
        row = y.select(0, 1)
        y.retain_grad()
        row[0:2].mul_(3)
        y[0] += 1
        (y * y).sum().backward()
        return [y.detach(), y.grad]

    compare(program, (normal(4, 4), S(0)))


def test_norms_in_one_node_have_gradients_whatever_they_were_computed_from() -> None:
    def program(x: Tensor) -> list[Tensor]:
        first, second = torch._foreach_norm([x, x.detach()], 1)
        second.retain_grad()
        (second * second).sum().backward()
        return [first.detach(), second.detach(), second.grad]

    compare(program, (normal(4, 4), S(0)))


def test_the_gradient_of_an_extremum_beside_a_sum_is_the_same_on_all_replicas() -> None:
    mesh = sw.simulate((2, 2))
    terms = sw.comm.ranked([normal(1, 2) + at % 2 for at in range(4)])
    x = sw.DTensor.from_local(terms, mesh, [S(1), P("max")]).requires_grad_()
    row, columns = (sw.distribute_tensor(torch.tensor(at), mesh) for at in (0, [3, 0]))
    found = x[row, columns]
    (gradient,) = torch.autograd.grad(found[:1].sum(), [found])
    with torch._C.DisableTorchFunctionSubclass():
        shards = shards_of(gradient)
        assert shards[0].equal(shards[2]) and shards[1].equal(shards[3])
    assert full(gradient).tolist() == [1, 0]


# What is not saved for the backward pass may be written to, also on ranks that hold nothing


def attention(x: Tensor, mask: Tensor) -> Tensor:
    x = x.view(1, 2, 4, 3)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


CALLS = {
    "attention": attention,
    "conv1d": lambda x, bias: F.conv1d(x.view(1, 6, 4), bias.detach().clone().view(4, 1, 1).expand(4, 6, 1), bias),
    "batch_norm": lambda x, bias: F.batch_norm(x.view(1, 4, 6), bias.detach() * 0, bias.detach() ** 2, None, bias),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operand_that_is_only_added_may_be_written_to(name: str) -> None:
    def program(x: Tensor, added: Tensor) -> list[Tensor]:
        y = CALLS[name](x, added)
        with torch.no_grad():
            added.mul_(2)
        (y * y).sum().backward()
        return [y.detach()]

    compare(program, (normal(1, 24), S(0)), (normal(4), R))


def test_a_strided_weight_of_group_norm_may_be_written_to() -> None:
    def program(x: Tensor, film: Tensor) -> list[Tensor]:
        y = F.group_norm(x, 1, film.unbind(1)[0], film.unbind(1)[1])
        with torch.no_grad():
            film.mul_(2)
        y.sin().sum().backward()
        return [y.detach()]

    compare(program, (normal(2, 4, 3), R), (normal(4, 2), S(0)))


# Ranks decide alike what is a view: by the strides of their shards


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin])
def test_all_ranks_have_contiguous_parts_of_a_scan(scan: Callable[..., Any]) -> None:
    found = scan(place(normal(4, 6), S(1), mesh=(3,)), 1)
    for x in found if isinstance(found, tuple) else (found,):
        with torch._C.DisableTorchFunctionSubclass():
            assert all(shard.is_contiguous() for shard in shards_of(x))


def test_gradients_of_thin_shards_have_the_strides_of_their_shards() -> None:
    x = place(normal(3, 1), S(0)).requires_grad_()
    torch.cat([x.detach(), x], -1).sin().sum().backward()
    gradient = x.grad
    with torch._C.DisableTorchFunctionSubclass():
        assert [shard.stride() for shard in shards_of(gradient)] == [(1, 1), (1, 1)]


def test_a_view_of_thin_transposed_shards_has_the_strides_of_the_whole() -> None:
    x = normal(2, 5)
    thin = place(x, S(1), mesh=(3,)).T.expand(5, 2).unflatten(0, (1, -1))
    assert thin.stride() == x.T.unflatten(0, (1, -1)).stride()
    with torch._C.DisableTorchFunctionSubclass():
        held = [shard for shard in shards_of(thin) if shard.numel()]
        shown = {inferred_strides((1, 5, 2), shard.shape, shard.stride())[1:] for shard in held}
    assert "_strides" in thin.__dict__ or len(shown) == 1


def test_a_write_through_a_row_of_a_pending_extremum_reaches_it() -> None:
    terms = [normal(1, 3) + at % 2 for at in range(4)]
    x = sw.DTensor.from_local(sw.comm.ranked(terms), sw.simulate((2, 2)), [S(0), P("min")])
    expected = full(x).clone()
    x.flatten(0, 1)[4].square_()
    expected.flatten(0, 1)[4].square_()
    torch.testing.assert_close(full(x), expected)
