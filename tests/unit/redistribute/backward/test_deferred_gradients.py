"""Gradients kept inside `no_sync`: added up as on one device, reduced once."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.errors import UnreducedGradientError
from shardwise.parallel import no_sync
from shardwise.redistribute import masks, unreduced
from shardwise.redistribute.backward import deferred_gradients

R, S = sw.Replicate(), sw.Shard
PASSES = 3


def batches(count: int = PASSES) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 6, dtype=torch.float64) for _ in range(count)]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def laid_out(module: nn.Module, mesh: Any, placements: Any) -> nn.Module:
    return sw.distribute_module(
        module, mesh, lambda _, part, mesh: [_replace(part, name, mesh, placements) for name in list(part._parameters)]
    )


def _replace(part: nn.Module, name: str, mesh: Any, placements: Any) -> None:
    whole = part._parameters[name]
    assert whole is not None
    part.register_parameter(name, nn.Parameter(sw.distribute_tensor(whole.data, mesh, placements)))


def gradients(module: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in module.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad.full_tensor() if isinstance(grad, sw.DTensor) else grad for grad in grads]  # type: ignore[misc]


def expected() -> list[Tensor]:
    plain = model()
    for batch in batches():
        plain(batch).square().sum().backward()
    return gradients(plain)


LAYOUTS = {
    "replicated": ((2,), [R], [S(0)]),
    "replicated on two axes": ((2, 2), [R, R], [S(0), S(0)]),
    "sharded": ((2,), [S(0)], [S(0)]),
    "replicated and sharded": ((2, 2), [R, S(0)], [S(0), R]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sum_of_all_passes(name: str) -> None:
    shape, weights, data = LAYOUTS[name]
    mesh = sw.simulate(shape)
    ours = laid_out(model(), mesh, weights)
    for i, batch in enumerate(batches()):
        with no_sync(enabled=i < PASSES - 1):
            ours(sw.distribute_tensor(batch, mesh, data)).square().sum().backward()
    assert not unreduced
    for mine, theirs in zip(gradients(ours), expected(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_nothing_is_reduced_inside_and_each_gradient_once_outside() -> None:
    mesh = sw.simulate((2,))
    ours = laid_out(model(), mesh, [R])
    counts = []
    for i, batch in enumerate(batches()):
        loss = ours(sw.distribute_tensor(batch, mesh, [S(0)])).square().sum()
        with CommDebugMode() as comms, no_sync(enabled=i < PASSES - 1):
            loss.backward()
        counts.append(sum(comm.bytes for comm in comms.comms))
    assert counts == [0, 0, sum(p.nbytes for p in model().parameters())]


def test_the_forward_pass_may_lie_outside() -> None:
    mesh = sw.simulate((2,))
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R]))
    loss = (sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)]) * weight).sum()
    with no_sync():
        loss.backward(retain_graph=True)
    assert weight.grad is not None and weight.grad.full_tensor().tolist() == [0.0] * 3
    loss.backward()
    assert weight.grad is not None and weight.grad.full_tensor().tolist() == [8.0] * 3


def test_a_parameter_that_the_last_pass_does_not_reach() -> None:
    mesh = sw.simulate((2,))
    used, unused = (nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R])) for _ in range(2))
    batch = sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)])
    (batch * unused).sum().backward()
    with no_sync():
        (batch * used * unused).sum().backward()
    (batch * used).sum().backward()
    assert not unreduced and used.grad is not None and unused.grad is not None
    assert used.grad.full_tensor().tolist() == unused.grad.full_tensor().tolist() == [8.0] * 3


def test_gradients_asked_for_by_name_are_of_their_own_pass_and_whole() -> None:
    mesh = sw.simulate((2,))
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R]))
    batch = sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)])
    with no_sync():
        (batch * weight).sum().backward()
        (grad,) = torch.autograd.grad((batch * weight).sum(), weight)
        assert grad.full_tensor().tolist() == [4.0] * 3
    (grad,) = torch.autograd.grad((batch * weight).sum(), weight)
    assert grad.full_tensor().tolist() == [4.0] * 3 and unreduced
    (batch * weight).sum().backward()
    assert weight.grad is not None and weight.grad.full_tensor().tolist() == [8.0] * 3


def test_only_parameters_wait() -> None:
    mesh = sw.simulate((2,))
    point = sw.distribute_tensor(torch.ones(3), mesh, [R]).requires_grad_()
    with no_sync():
        (sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)]) * point).sum().backward()
    assert point.grad is not None and point.grad.full_tensor().tolist() == [4.0] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_parts(reentrant: bool) -> None:
    mesh = sw.simulate((2,))
    ours = laid_out(model(), mesh, [R])
    for i, batch in enumerate(batches()):
        x = sw.distribute_tensor(batch, mesh, [S(0)]).requires_grad_()
        with no_sync(enabled=i < PASSES - 1):
            checkpoint(ours, x, use_reentrant=reentrant).square().sum().backward()
    for mine, theirs in zip(gradients(ours), expected(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_hooks_of_a_parameter_see_the_sum_once() -> None:
    mesh = sw.simulate((2,))
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R]))
    batch = sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)])
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append(grad.full_tensor().tolist()))
    with no_sync():
        (batch * weight).sum().backward()
    (batch * weight).sum().backward()
    assert weight.grad is not None and weight.grad.full_tensor().tolist() == [8.0] * 3
    assert torch.tensor(seen).sum(0).tolist() == [8.0] * 3


def test_a_step_on_gradients_that_wait_is_refused() -> None:
    mesh = sw.simulate((2,))
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with no_sync():
        (sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)]) * weight).sum().backward()
    said = (
        "gradients of 1 parameter were kept by no_sync() and never reduced: run the last backward pass before an "
        "optimizer's step outside of it"
    )
    other = nn.Parameter(torch.ones(2))
    other.sum().backward()
    torch.optim.SGD([other], lr=1.0).step()  # that of another model has nothing to do with it
    assert other.tolist() == [0.0] * 2
    with pytest.raises(UnreducedGradientError, match=f"^{re.escape(said)}$"):
        optimizer.step()
    assert weight.full_tensor().tolist() == [1.0] * 3
    optimizer.zero_grad()
    optimizer.step()
    assert not unreduced and weight.full_tensor().tolist() == [1.0] * 3


def test_blocks_nest_and_end_with_an_error() -> None:
    mesh = sw.simulate((2,))
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [R]))
    loss = (sw.distribute_tensor(torch.ones(4, 3), mesh, [S(0)]) * weight).sum()
    with pytest.raises(KeyError), no_sync(), no_sync(enabled=False):
        loss.backward(retain_graph=True)
        assert weight.grad is not None and weight.grad.full_tensor().tolist() == [0.0] * 3
        raise KeyError
    loss.backward()
    assert weight.grad is not None and weight.grad.full_tensor().tolist() == [8.0] * 3


def test_what_waits_is_freed_with_its_parameter() -> None:
    mesh = sw.simulate((2,))
    ours = laid_out(model(), mesh, [R])
    with no_sync():
        ours(sw.distribute_tensor(batches()[0], mesh, [S(0)])).square().sum().backward()
    alive = [weakref.ref(parameter) for parameter in ours.parameters()]
    assert len(unreduced) == len(alive)
    del ours
    gc.collect()
    assert not unreduced and not any(found() is not None for found in alive)


def test_every_rank_keeps_the_same_gradients() -> None:
    """A rank that does without a mask before an exchange finds the same parameter as those that do not."""
    records = []
    for make in (sw.simulate, sw.recording):
        mesh = make((2, 2), ("a", "b"))
        torch.manual_seed(0)
        p = nn.Parameter(sw.distribute_tensor(torch.randn(4, 6), mesh, [S(0), R]))
        with CommDebugMode() as comm, sw.parallel.no_sync():
            p.redistribute(placements=[S(1), sw.Partial("sum")]).sum().backward()
        records.append([(c.kind, c.axes, c.backward) for c in comm.comms])
        assert len(p.__dict__["_kept"]) == 1
    assert records[0] == records[1] and not any(backward for *_, backward in records[0])


@pytest.mark.parametrize("shape", [(7,), (300, 300)])
@pytest.mark.parametrize("mask", [masks._kept, masks._silenced])
def test_a_parameter_is_found_behind_a_mask_on_ranks_that_count_it_and_on_others(mask: Any, shape: tuple) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    node = mask(parameter).grad_fn
    node.metadata[deferred_gradients.SECOND_ORDER] = None
    assert deferred_gradients.leaf_of(node) is parameter
