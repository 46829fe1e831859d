"""What later passes reach from gradients: ranks that differ in it are told apart, whatever else they differ in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.redistribute.backward import reach
from shardwise.redistribute.backward.double_backward import trail
from shardwise.redistribute.backward.reach import _Reach, below, handed_out, is_ours

R, S = sw.Replicate(), sw.Shard


def gradients(loss: Tensor, *inputs: Tensor) -> list[list[Tensor]]:
    with torch._C.DisableTorchFunctionSubclass():
        return [[grad] for grad in torch.autograd.grad(loss, inputs, create_graph=True)]


def test_all_of_a_graph_is_below_its_root() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    z = y * x + y
    assert [type(node).__name__ for node in below([z.grad_fn])] == [
        *("AddBackward0", "SinBackward0", "AccumulateGrad", "MulBackward0"),
    ]
    assert not below([None])


def test_constants_lead_to_no_leaf() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = (x * y * y).sum() + x.sum()
    found = _Reach(gradients(loss, x, y), [loss], [])
    assert [found.leads_on(at) for at in range(2)] == [True, True]
    loss = (x * 2).sum() + (y * y).sum()
    with torch.enable_grad():
        constant = [[torch.ones(2) * 2]]
    found = _Reach([*constant, *gradients(loss, y)], [loss], [])
    assert [found.leads_on(at) for at in range(2)] == [False, True]


def test_ranks_of_the_simulator_that_lead_elsewhere() -> None:
    """The gradient of rank 1's shard is cut off from the leaf."""
    x = sw.distribute_tensor(torch.ones(4), sw.simulate((2,)), [S(0)]).requires_grad_()
    loss = (x**3).sum()
    with torch._C.DisableTorchFunctionSubclass():
        shards = (x, *x._peers)
        roots = (loss, *loss._peers)
        whole = list(torch.autograd.grad(roots, shards, [torch.ones(()) for _ in roots], create_graph=True))
        assert not _Reach([whole], roots, []).differs
        assert _Reach([[whole[0], whole[1].detach()]], roots, []).differs


@pytest.mark.parametrize("agree", [True, False])
def test_gradients_are_tied_where_ranks_differ(agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a leaf that they do not depend on gets zeros: all ranks go through all of the graph."""
    monkeypatch.setattr(reach, "compared", lambda mesh, number: (not agree, False))
    x, y = (sw.distribute_tensor(torch.ones(4), sw.simulate((2,)), [S(0)]).requires_grad_() for _ in range(2))
    (grad,) = torch.autograd.grad((x * y).sum(), x, create_graph=True)
    grad.sum().backward()
    assert (x.grad is None) is agree
    assert y.grad is not None and y.grad.full_tensor().tolist() == [1] * 4


def test_who_cannot_be_asked_is_not_relied_on() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = (x * 2).sum()
    with trail() as own:
        pass
    ((grad,),) = handed_out([[torch.ones(2) * 2]], [loss], own, [loss], None)
    assert grad.requires_grad


def test_moves_are_ours() -> None:
    x = sw.distribute_tensor(torch.ones(4), sw.simulate((2,)), [S(0)]).requires_grad_()
    with torch._C.DisableTorchFunctionSubclass():
        ours = [is_ours(node) for node in below([x.redistribute(placements=[R]).grad_fn])]
    assert ours.count(True) == 2 and len(ours) > 2  # the move's, and the first rank's own
