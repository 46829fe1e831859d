"""Nodes of the graph: hooks on them reach every rank's, and walks through the graph find it as torch's own is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

import shardwise as sw

LINE = sw.simulate((3,), ("tp",))


def leaf(whole: Tensor) -> Tensor:
    return sw.distribute_tensor(whole, LINE, [sw.Shard(0)]).requires_grad_()


def doubled(*grads: Any) -> tuple:
    return tuple(2 * grad for grad in grads[0])


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_on_nodes_reach_all_ranks(register: str) -> None:
    whole = torch.randn(5)
    x = leaf(whole)
    y = x.exp()
    handle = getattr(y.grad_fn, register)(doubled)
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole.exp())  # type: ignore[union-attr]
    handle.remove()
    x.grad = None
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.exp())  # type: ignore[union-attr]


def test_hooks_where_gradients_are_accumulated() -> None:
    x = leaf(torch.ones(5))
    node = x.view_as(x).grad_fn
    while node.next_functions:  # type: ignore[union-attr]
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    with node.register_prehook(doubled):  # type: ignore[union-attr]
        x.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((5,), 2.0))  # type: ignore[union-attr]


def names(node: Node | None, depth: int) -> list[Any]:
    if node is None or not depth:
        return []
    return [node.name(), [names(following, depth - 1) for following, _ in node.next_functions]]


def test_a_walk_through_the_graph() -> None:
    whole = torch.randn(5)
    graphs = [(x.exp() * x).sin().grad_fn for x in (whole.requires_grad_(), leaf(whole.detach()))]
    assert names(graphs[0], 3) == names(graphs[1], 3)
    assert all(isinstance(node, Node) for node in graphs)
    y = leaf(whole.detach()).exp()
    assert y.grad_fn == y.grad_fn and hash(y.grad_fn) == hash(y.grad_fn) and repr(y.grad_fn).startswith("<ExpBackward0")
    assert y.detach().grad_fn is None and leaf(whole.detach()).grad_fn is None


@pytest.mark.parametrize("leaves", [True, False])
def test_hooks_on_several_tensors(leaves: bool) -> None:
    a, b = leaf(torch.randn(5)), leaf(torch.randn(5))
    pair = (a, b) if leaves else (a.exp(), b.exp())
    seen: list[Any] = []
    register_multi_grad_hook(pair, seen.append)
    (pair[0] * pair[1]).sum().backward()
    (grads,) = seen
    for grad, other in zip(grads, reversed(pair), strict=True):
        torch.testing.assert_close(grad.full_tensor(), other.detach().full_tensor())  # type: ignore[attr-defined]


def test_edges_are_refused_in_words() -> None:
    x = leaf(torch.ones(5))
    y = x.exp()
    with pytest.raises(NotImplementedError, match="give backward and grad the DTensor itself, not its edge"):
        torch.autograd.grad(y.sum(), [get_gradient_edge(x)])
