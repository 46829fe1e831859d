"""Calls on lists of tensors (`_foreach_*`): each element is by itself, in the values, the writes and the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import PAIR
from sweep import normal, place, same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import ranked

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def test_a_list_may_name_a_row_twice() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x.detach().clone()
        row = y[0]
        torch._foreach_add_([row, row], 3)
        return y, row

    for placement in (S(0), S(1)):
        same(program, normal(4, 4), placement)


LISTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "mul by lists": lambda a, b: torch._foreach_mul([a, b], [b, a.detach()]),
    "addcmul": lambda a, b: torch._foreach_addcmul([a, b], [a, b], [a, b], [2.0, 3.0]),
    "exp": lambda a, b: torch._foreach_exp([a, b]),
    "norm": lambda a, b: torch._foreach_norm([a, b]),
    "maximum": lambda a, b: torch._foreach_maximum([a, b], 0.5),
    "in place": lambda a, b: (torch._foreach_mul_([a, b], 3.0), [a, b])[1],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_call_does_not_join_its_tensors(name: str) -> None:
    """A tensor that the loss does not depend on has no gradient, not one of zeros: optimizers would decay it."""

    def program(x: Tensor) -> tuple[Any, ...]:
        other = (x.detach() + 1).requires_grad_()
        first, _ = LISTS[name](x * 1, other * 1)
        first.sum().backward()
        return first, x.grad, other.grad

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


def test_a_list_call_after_a_collective_does_not_join_its_tensors() -> None:
    x, y = (place(normal(4, 4), S(0)).requires_grad_() for _ in range(2))
    first, _ = torch._foreach_mul([x.redistribute(placements=[R]), y.redistribute(placements=[R])], 2.0)
    first.sum().backward()
    assert x.grad is not None and y.grad is None


@pytest.mark.parametrize("name", [name for name in LISTS if name != "in place"])
def test_a_list_call_is_one_node(name: str) -> None:
    """It runs for all its tensors: what a function in Python computed one of them from gets zeros, and all results are
    part of the graph."""

    def program(x: Tensor) -> tuple[Any, ...]:
        plain = x.detach() + 1
        inner = checkpoint(lambda a: a.exp(), x * 1, use_reentrant=True)
        first, second = LISTS[name](plain, inner)
        second.retain_grad()
        first.sum().backward()
        return first, x.grad, second.grad

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


TWICE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda v, x: torch._foreach_mul_([v, v], 3.0),
    "other numbers": lambda v, x: torch._foreach_mul_([v, v], [3.0, 2.0]),
    "itself": lambda v, x: torch._foreach_mul_([v, v], [v, x]),
    "addcmul": lambda v, x: torch._foreach_addcmul_([v, v], [x, x], [x, x], 3.0),
    "views": lambda v, x: torch._foreach_mul_([v.view(-1), v.t()], 3.0),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_list_may_name_a_tensor_twice(name: str) -> None:
    """What torch makes of it, whose graph of such a write has it only once."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = x * 1
        TWICE[name](v, x)
        (v * v).sum().backward()
        return v, x.grad

    for placement in (S(0), R) if name == "views" else (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


OVERLAPPING: list[Callable[[Tensor], list[Tensor]]] = [
    lambda v: [v.view(-1), v.t()],
    lambda v: [v[:, 0], v[:, 0]],
    lambda v: [v[:, 0], v[:, 1], v.view(-1), v[:, 0]],
    lambda v: [v[:1], v.view(2, 8), v[:, 1:3]],
]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("placement", [S(0), S(1), P(), P("avg"), P("max"), R], ids=str)
def test_views_in_a_list_that_do_not_show_each_others_writes(placement: sw.Placement, recorded: bool) -> None:
    """Here some are copies, and sums are written to by way of what they come to: they are written to in turn."""
    for views in OVERLAPPING:

        def program(x: Tensor) -> tuple[Any, ...]:
            v = x * 1 if recorded else x.detach() * 1
            found = views(v)  # noqa: B023
            torch._foreach_add_(found, 0.5)
            torch._foreach_mul_(found, [x.detach() * 1 for x in found])
            if recorded:
                (v * v).sum().backward()
            return v, x.grad

        same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), P(), R], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_tensor_and_its_views_in_a_list(placement: sw.Placement, first: bool) -> None:
    """In torch's graph a write to the tensor takes the place of those to its views before it."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = x * 1
        torch._foreach_mul_([v, v.view(-1)] if first else [v.view(-1), v, v], 3.0)
        torch._foreach_add_([v, v.view(-1)] if first else [v.view(-1), v], 3.0)
        (v * v).sum().backward()
        return v, x.grad

    same(program, normal(4, 4), placement)


def test_what_a_list_call_wrote_is_seen_by_its_later_elements() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        v, w = x.detach() * 1, x.detach() * 2
        torch._foreach_add_([v, w], [w, v])
        return v, w

    for placement in (S(0), P(), R):
        same(program, normal(4, 4), placement)


def test_a_leaf_in_a_list_is_refused_before_anything_is_written() -> None:
    leaf = place(normal(4, 4), S(0)).requires_grad_()
    v = leaf * 1
    before = v.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch._foreach_mul_([v, leaf], 3.0)
    assert torch.equal(v, before)


REFUSED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a view of a leaf": lambda x: (x * 1, x[0]),
    "a column of a leaf": lambda x: (x * 1, x.view(-1)),
    "one of several views": lambda x: (x * 1, (x * 2).chunk(2)[0]),
}


@pytest.mark.parametrize("placement", [S(0), S(1), P(), R], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_in_a_list_is_refused_before_anything_is_written(name: str, placement: sw.Placement) -> None:
    first, refused = REFUSED[name](place(normal(4, 4), placement).requires_grad_())
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match=r"in-place operation|modified inplace"):
        torch._foreach_tanh_([first, refused])
    assert torch.equal(first, before)


@pytest.mark.parametrize("placement", [S(0), S(1), P(), R], ids=str)
def test_a_list_with_a_view_of_what_has_a_history_since(placement: sw.Placement) -> None:
    """Torch itself takes the view for a leaf, unless somebody asks for its history in between."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x.detach() * 1
        view = y[..., None]
        view[..., 0].copy_(x)
        assert view.grad_fn is not None or isinstance(x, sw.DTensor)
        torch._foreach_mul_([y, view], 3.0)
        y.sum().backward()
        return y, view

    same(program, normal(4, 4).diagonal().clone(), placement if placement != S(1) else S(0))


def test_a_list_with_what_retains_its_gradient() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = x.redistribute(placements=[R]) if isinstance(x, sw.DTensor) else x * 1
        y.retain_grad()
        torch._foreach_neg_([y])
        (y * y).sum().backward()
        return y, y.grad

    same(program, normal(4, 3), S(0), mesh=(3,))


@pytest.mark.parametrize("mesh", [(2,), (4,), (5,)])
def test_lists_on_shards_of_one_row_or_none(mesh: tuple[int, ...]) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y, z = torch._foreach_mul([x, x.t()], 2.0)
        y.t().reshape(-1).detach().add_(1)  # a copy, on all ranks
        z.t().reshape(-1).detach().add_(1)
        (y.square().sum() + z.sin().sum()).backward()
        return y, z

    same(program, normal(4, 3), S(0), mesh=mesh)


@pytest.mark.parametrize("kind", ["sum", "max", "avg"])
def test_lists_with_pending_elements_of_other_shapes(kind: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y, z = x.detach() * 1, x.detach()[:1] * 2
        torch._foreach_maximum_([y, z], [x.detach()[0], z * 0.5])
        torch._foreach_add_([z, y, z], 0.5)
        return y, z

    same(program, normal(4, 4).abs(), P(kind))


def test_results_of_lists_on_shards_that_do_not_show_how_the_whole_lies() -> None:
    """The first rank holds nothing: its strides say nothing, and the whole's decide what is a view."""

    def program(x: Tensor) -> Tensor:
        (y,) = torch._foreach_mul([x.permute(1, 0, 2)], 2.0)
        y.permute(2, 1, 0).contiguous().add_(1)  # contiguous as it is: a write to y
        return y

    whole = normal(4, 4, 1)
    dist = sw.DTensor.from_local(ranked([whole[:0].clone(), whole.clone()]), PAIR, [S(0)])
    torch.testing.assert_close(program(dist).full_tensor(), program(whole))
