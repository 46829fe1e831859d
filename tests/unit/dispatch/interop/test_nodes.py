"""Nodes of the graph: hooks on them reach every rank's, and walks through the graph find it as torch's own is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saved import fake_mesh
from torch import Tensor, nn
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


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Replicate()], ids=str)
def test_hooks_on_several_tensors(placement: sw.Placement, leaves: bool, mode: Any) -> None:
    """On a rank of a process group a tensor has one node, as on one device."""
    with fake_mesh(3, names=("tp",), rank=1) as mesh:
        a, b, c = (nn.Parameter(sw.distribute_tensor(torch.randn(6), mesh, [placement])) for _ in range(3))
        pair: Any = (a, b, c) if leaves else (a.exp(), b.exp(), c.exp())
        seen: list[Any] = []
        register_multi_grad_hook(pair, seen.append, mode=mode)
        batch = sw.distribute_tensor(torch.ones(6), mesh, [sw.Shard(0)])
        (pair[0] * pair[1] * batch).sum().backward()
    (grads,) = seen
    if mode == "all":
        assert grads[2] is None
        for grad, other in zip(grads[:2], (pair[1], pair[0]), strict=True):
            assert grad._layout.placements == (placement,)
            rows = slice(None) if placement.is_shard() else slice(2, 4)
            torch.testing.assert_close(grad.to_local()[rows], other.detach().to_local()[rows])


def test_hooks_on_several_tensors_of_the_simulator() -> None:
    """There a tensor has a node for each rank, and torch counts nodes."""
    a, b = leaf(torch.randn(5)), leaf(torch.randn(5))
    seen: list[Any] = []
    register_multi_grad_hook((a, b), seen.append, mode="any")
    (a * b).sum().backward()
    torch.testing.assert_close(seen[0].full_tensor(), a.detach().full_tensor())
    register_multi_grad_hook((a, b), seen.append)
    with pytest.raises(RuntimeError, match="expects an grad_fn, but got Nodes"):
        (a * b).sum().backward()


def test_edges_are_refused_in_words() -> None:
    x = leaf(torch.ones(5))
    y = x.exp()
    with pytest.raises(NotImplementedError, match="give backward and grad the DTensor itself, not its edge"):
        torch.autograd.grad(y.sum(), [get_gradient_edge(x)])
