"""Autograd: every way into a backward pass, hooks, double backward, checkpoints, modes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check_grad, check_shards
from meshes import data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))
SOME = [(R, R), (S0, R), (S1, S0), (S0, S0), (P, S1)]
over_layouts = pytest.mark.parametrize("placements", SOME, ids=str)


def twins(x: Tensor, placements: tuple) -> tuple[Tensor, DTensor]:
    return x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()


# Ways in


@over_layouts
def test_backward_with_a_gradient(placements: tuple) -> None:
    a, d = twins(data(6, 4), placements)
    g = data(6, 4)
    for gradient_placements in SOME:
        a.grad = d.grad = None
        a.exp().backward(g)
        d.exp().backward(sw.distribute_tensor(g, MESH, gradient_placements))
        check_grad(d, a)


@pytest.mark.parametrize("given", ["as it lies", "elsewhere", "pending"])
def test_backward_of_one_rank_with_a_gradient(given: str) -> None:
    """Where a gradient lies as the tensor does, the pass begins at once; hooks see DTensors all the same."""
    alone = sw.simulate((1,), ("tp",))
    a, g = data(4, 2).requires_grad_(), data(4, 2)
    (a.exp() * 3).backward(g)
    d = sw.distribute_tensor(a.detach(), alone, [Shard(0)]).requires_grad_()
    y = d.exp() * 3
    if given == "pending":
        y = y.redistribute(placements=[Partial()])
    seen: list[Tensor] = []
    d.register_hook(seen.append)
    gradient = sw.distribute_tensor(g, alone, [Replicate() if given == "elsewhere" else Shard(0)])
    y.backward(gradient, retain_graph=True)
    assert isinstance(seen[0], DTensor) and type(gradient) is DTensor
    check_grad(d, a)
    y.backward(gradient)
    torch.testing.assert_close(d.grad.full_tensor(), 2 * a.grad)  # type: ignore[union-attr]


def test_backward_refuses_what_torch_refuses() -> None:
    d = sw.distribute_tensor(data(4, 4), MESH, [S0, R]).requires_grad_()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        d.backward()
    with pytest.raises(RuntimeError, match=r"`inputs` argument to `backward\(\)` cannot be empty."):
        d.sum().backward(inputs=[])
    with pytest.raises(sw.errors.ShardShapeError, match=r"the gradient has shape \[2, 4\], .* \[4, 4\]"):
        (d * 2).backward(sw.zeros(2, 4, device_mesh=MESH, dtype=torch.float64))
    with pytest.raises(sw.errors.MixedTensorError, match="the gradient must be a DTensor like the tensor"):
        (d * 2).backward(data(4, 4))
    with pytest.raises(RuntimeError, match="does not require grad"):
        d.detach().sum().backward()
    assert d.grad is None


@over_layouts
def test_backward_into_some_inputs(placements: tuple) -> None:
    a, d = twins(data(6, 4), placements)
    b, e = twins(data(6, 4), (R, S1))
    (a * b).sum().backward(inputs=[a])
    (d * e).sum().backward(inputs=[d])
    check_grad(d, a)
    assert e.grad is None and all(x.grad is None for x in e._peers)


def test_backward_of_a_plain_loss_into_a_dtensor() -> None:
    d = sw.distribute_tensor(data(4, 4), MESH, [S0, R]).requires_grad_()
    loss = d.full_tensor().sum()
    (g,) = torch.autograd.grad(loss, d, retain_graph=True)
    loss.backward(inputs=[d])
    for found in (g, d.grad):
        assert torch.equal(found.full_tensor(), torch.ones(4, 4, dtype=torch.float64))


def test_a_gradient_that_reached_only_some_ranks_is_noticed() -> None:
    d = sw.distribute_tensor(data(4, 4), MESH, [S0, R]).requires_grad_()
    d.sum().backward()
    d._peers[1].grad = None
    with pytest.raises(RuntimeError, match="only some of the simulated ranks have a gradient"):
        _ = d.grad


@over_layouts
def test_autograd_backward_and_grad_of_several(placements: tuple) -> None:
    x, g = data(6, 4), data(6, 4)
    a, d = twins(x, placements)
    b, e = twins(x, (S0, S1))
    dg = sw.distribute_tensor(g, MESH, [S1, R])
    torch.autograd.backward([(a * b).sum(), a * 3], [None, g])
    torch.autograd.backward([(d * e).sum(), d * 3], [None, dg])
    check_grad(d, a)
    expected = torch.autograd.grad([(a * a).sum(), b.exp()], [a, b], [torch.tensor(2.0, dtype=torch.float64), g])
    scale = torch.tensor(2.0, dtype=torch.float64)
    for found, right in zip(torch.autograd.grad([(d * d).sum(), e.exp()], [d, e], [scale, dg]), expected, strict=True):
        check_shards(found)
        torch.testing.assert_close(found.full_tensor(), right)


def test_unused_inputs() -> None:
    d, e = (sw.distribute_tensor(data(4, 4), MESH, [S0, R]).requires_grad_() for _ in range(2))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(d.sum(), [d, e])
    assert torch.autograd.grad(d.sum(), [d, e], allow_unused=True)[1] is None
    zero = torch.autograd.grad(d.sum(), [d, e], materialize_grads=True)[1]
    assert isinstance(zero, DTensor) and not zero.full_tensor().any()


@over_layouts
def test_gradients_accumulate(placements: tuple) -> None:
    a, d = twins(data(6, 4), placements)
    w = data(4, 5)
    for step in range(3):
        (a @ (w * step)).pow(2).mean().backward()
        (d @ sw.distribute_tensor(w * step, MESH, [R, S1])).pow(2).mean().backward()
        check_grad(d, a)


@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_gradient_penalty(placements: tuple) -> None:
    a, d = twins(data(5, 4), placements)
    b, e = twins(data(4, 3), (R, S1))

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        loss = torch.tanh(x @ w).sum()
        gx, gw = torch.autograd.grad(loss, [x, w], create_graph=True)
        return gx.pow(2).sum() + (gw * gw * gw).sum() + loss

    plain, dist = penalty(a, b), penalty(d, e)
    torch.testing.assert_close(dist.full_tensor(), plain)
    plain.backward()
    dist.backward()
    check_grad(d, a)
    check_grad(e, b)


def test_retained_gradients_of_inner_tensors() -> None:
    a, d = twins(data(6, 4), (S0, R))
    y, z = a * 2, d * 2
    y.retain_grad()
    z.retain_grad()
    (y * y).sum().backward()
    (z * z).sum().backward()
    check_grad(z, y)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, nn.functional.softmin])
def test_who_watches_a_softmax_sees_what_later_passes_bring(function: Callable, held: bool) -> None:
    """Torch writes its gradient in terms of the result, through which passes of any order go."""
    for shape, placements in (((5, 6), (S0, S1)), ((5, 6), (S1, S1)), ((1, 6), (R, S0)), ((6, 3), (S0, P))):
        for dim in (0, 1):
            seen = [_watched(x, lambda x: function(x, dim), held) for x in twins(data(*shape), placements)]  # noqa: B023
            for expected, found in zip(*seen, strict=True):
                torch.testing.assert_close(found.full_tensor(), expected)


def _watched(x: Tensor, function: Callable[[Tensor], Tensor], held: bool) -> list[Tensor]:
    seen: list[Tensor] = []
    y = function(x)
    if held:
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(grad.detach()))
    z = (y * y).sin()
    seen.append(y.detach())
    if not held:
        del y
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.tanh().sum(), x, create_graph=True)
    (second * second).sum().backward()
    assert x.grad is not None
    return [first, second, x.grad, *seen, *([y.grad] if held else [])]


def test_a_softmax_that_was_written_to_is_not_what_its_gradient_is_made_of() -> None:
    for x in twins(data(4, 6), (S0, S1)):
        y = x.softmax(1)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# Hooks


@pytest.mark.parametrize("leaf", [True, False])
@over_layouts
def test_a_hook_sees_the_whole_gradient_once_and_may_replace_it(placements: tuple, leaf: bool) -> None:
    x, w = data(6, 4), data(4, 4)
    a, d = twins(x, placements)
    seen: list[list[Tensor]] = [[], []]

    def run(t: Tensor, v: Tensor, grads: list[Tensor]) -> None:
        y = t if leaf else t * 1.0
        y.register_hook(lambda g: grads.append(g))
        handle = y.register_hook(lambda g: g * 10)
        y.register_hook(lambda g: grads.append(g))
        (torch.tanh(y @ v).sum() + (y @ v.exp()).sum() + (y * y).sum()).backward()
        handle.remove()

    run(a, w, seen[0])
    run(d, sw.distribute_tensor(w, MESH, [R, S1]), seen[1])
    check_grad(d, a)
    assert len(seen[0]) == len(seen[1]) == 2
    for plain, dist in zip(*seen, strict=True):
        assert isinstance(dist, DTensor)
        torch.testing.assert_close(dist.full_tensor(), plain)


def test_hooks_over_steps_and_removal() -> None:
    p = nn.Parameter(sw.distribute_tensor(data(6, 4), MESH, [R, S0]))
    calls: list[int] = []
    handle = p.register_hook(lambda g: calls.append(1))
    optimizer = torch.optim.SGD([p], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (p * p).sum().backward()
        optimizer.step()
    assert len(calls) == 3
    first, second = p.sum(), (p * p).sum()  # two graphs that share the tensor
    first.backward()
    second.backward()
    assert len(calls) == 5
    handle.remove()
    (p * p).sum().backward()
    assert len(calls) == 5


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_can_be_detached_in_place(create_graph: bool) -> None:
    a, d = twins(data(6, 4), (S0, R))
    found = [torch.autograd.grad((t**3).sum(), t, create_graph=create_graph)[0] for t in (a, d)]
    for g in found:
        assert g.requires_grad is create_graph
        assert g.detach_() is g and not g.requires_grad
        g.mul_(2)
    torch.testing.assert_close(found[1].full_tensor(), found[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_pending_leaf_is_used_again_after_a_backward_pass_of_a_plain_tensor(op: str) -> None:
    """What was moved of it belongs to the graph of the first pass, which is gone."""
    mesh = sw.simulate((2,), ("a",))
    local = torch.tensor([0.5, -0.25], dtype=torch.float64)
    leaf = sw.DTensor.from_local(local, mesh, [sw.Partial(op)], run_check=False).detach().requires_grad_()
    grads = []
    for _ in range(2):
        (leaf * leaf).exp().to_local().sum().backward()
        grads.append(leaf.grad.full_tensor())  # type: ignore[union-attr]
        leaf.grad = None
    torch.testing.assert_close(grads[1], grads[0])
    assert grads[0].abs().sum()


def test_a_hook_on_the_root_and_under_autograd_grad() -> None:
    a, d = twins(data(6, 4), (S0, R))
    calls: list[Tensor] = []
    for t in (a, d):
        loss = t.sum()
        loss.register_hook(calls.append)
        loss.backward()
        t.register_hook(lambda g: g * 2)
        (g,) = torch.autograd.grad((t * t).sum(), t, create_graph=True)
        t.grad = None
        (g * g).sum().backward()
    assert [c.item() for c in calls] == [1.0, 1.0]
    check_grad(d, a)


class Total(torch.autograd.Function):
    """A plain result of a DTensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return whole(x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ones_like(x) * float(grad)


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "DTensor": lambda y: y.sum(),
    "whole": lambda y: whole(y).sum(),
    "local": lambda y: y.redistribute(placements=[R, R]).to_local().sum() if isinstance(y, DTensor) else y.sum(),
    "function": Total.apply,
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("leaf", [True, False])
@over_layouts
def test_hooks_may_come_after_uses(placements: tuple, leaf: bool, end: str) -> None:
    """A hook sees all of the gradient, once in each pass, wherever the pass begins."""
    seen: list[list[Tensor]] = [[], []]

    def run(t: Tensor, grads: list[Tensor]) -> Tensor:
        y = t if leaf else t * 3
        early, rows = y * y, y[1:]
        y.register_hook(lambda g: grads.append(whole(g)))
        y.register_hook(lambda g: g.tanh() + 0.5)
        late = y.exp()
        if not leaf:
            y.retain_grad()
        y.register_hook(lambda g: grads.append(whole(g)))
        for _ in range(2):
            (ENDS[end](early) + ENDS[end](rows) + ENDS[end](late)).backward(retain_graph=True)
        return y

    a, d = twins(data(6, 4), placements)
    y, z = run(a, seen[0]), run(d, seen[1])
    check_grad(d, a)
    check_grad(z, y)
    assert len(seen[0]) == len(seen[1]) == 4
    for plain, dist in zip(*seen, strict=True):
        torch.testing.assert_close(dist, plain)


def test_a_hook_on_a_result_that_is_not_used() -> None:
    """Its node runs for the sake of the others: as in torch, there is no gradient to see."""
    seen: list[Tensor | None] = []
    for t in twins(data(6, 4), (S0, R)):
        a, b, _ = (t * 1).split(2)
        b.register_hook(seen.append)
        a.sum().backward()
    assert seen == [None, None]


@pytest.mark.parametrize("retained_first", [False, True])
def test_a_retained_gradient_is_that_behind_the_hooks(retained_first: bool) -> None:
    a, d = twins(data(6, 4), (S0, R))
    inner = []
    for t in (a, d):
        y = t.sin()
        if retained_first:
            y.retain_grad()
        y.register_hook(lambda g: g + 0.5)
        if not retained_first:
            y.retain_grad()
        y[1].mul_(2)
        y.register_hook(lambda g: g * 3)
        (y * y).sum().backward()
        inner.append(y)
    check_grad(inner[1], inner[0])
    check_grad(d, a)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["hook", "retained", "asked for"])
def test_the_gradient_of_what_was_gathered_can_be_seen(how: str, late: bool) -> None:
    """Its use as varying would send the gradient past it, to the shards."""
    w = data(4, 4)

    def run(t: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = t * 1
        y = y.redistribute(placements=[R, R]) if isinstance(y, DTensor) else y
        early = (y @ v).sin().sum() if late else 0
        if how == "hook":
            y.register_hook(lambda g: g.tanh())
        elif how == "retained":
            y.retain_grad()
        loss = early + (y @ v).sin().sum() + (y * y).sum()
        if how == "asked for":
            return torch.autograd.grad(loss, [y, t])
        loss.backward()
        return t.grad, *([y.grad] if how == "retained" else [])  # type: ignore[return-value]

    a, d = twins(data(6, 4), (S0, R))
    for plain, dist in zip(run(a, w), run(d, sw.distribute_tensor(w, MESH, [S1, R])), strict=True):
        torch.testing.assert_close(whole(dist), plain)


def test_a_hook_needs_a_gradient() -> None:
    d = sw.distribute_tensor(data(6, 4), MESH, [S0, R])
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        d.register_hook(print)


@over_layouts
def test_post_accumulate_hooks(placements: tuple) -> None:
    """The optimizer in the backward pass: the hook sees the finished gradient of all ranks."""
    x = data(6, 4)
    p = nn.Parameter(sw.distribute_tensor(x, MESH, placements))
    seen: list[Tensor] = []

    def step(q: DTensor) -> None:
        assert q is p
        seen.append(q.grad.full_tensor())
        q.grad = None

    handle = p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        ((p * 3).sum() + p.sum()).backward()
    handle.remove()
    p.sum().backward()
    assert p.grad is not None and len(seen) == 2
    assert all(torch.equal(g, torch.full_like(x, 4)) for g in seen)


# Checkpoints and modes


@pytest.mark.parametrize("reentrant", [True, False])
@over_layouts
def test_checkpoint(placements: tuple, reentrant: bool) -> None:
    (a, d), (b, e) = twins(data(6, 4), placements), twins(data(4, 4), (R, S1))
    runs: list[int] = []

    def block(x: Tensor, w: Tensor) -> Tensor:
        runs.append(1)
        return torch.softmax(torch.tanh(x @ w) @ w, -1)

    block(a, b).pow(2).sum().backward()
    out = checkpoint(block, d, e, use_reentrant=reentrant)
    assert isinstance(out, DTensor)
    out.pow(2).sum().backward()
    assert len(runs) == 3, "the block runs again in the backward pass"
    check_grad(d, a)
    check_grad(e, b)


@pytest.mark.parametrize("reentrant", [True, False])
@over_layouts
def test_a_dispatch_mode_around_a_step(placements: tuple, reentrant: bool) -> None:
    """It sees what runs on the shards; users' hooks, functions and checkpoints see DTensors."""
    w = data(4, 4)
    seen: list[list[Tensor]] = [[], []]

    def step(t: Tensor, v: Tensor, grads: list[Tensor]) -> None:
        y = t * 1
        y.register_hook(lambda g: g.tanh())
        t.register_post_accumulate_grad_hook(lambda q: grads.append(whole(q.grad * 2)))
        z = checkpoint(lambda a: torch.tanh(a @ v), y, use_reentrant=reentrant)
        (whole(z.sum()) + Total.apply(y)).backward()
        (t @ v).sum().backward()

    a, d = twins(data(6, 4), placements)
    with FlopCounterMode(display=False) as expected:
        step(a, w, seen[0])
    with FlopCounterMode(display=False) as found:
        step(d, sw.distribute_tensor(w, MESH, [R, R]), seen[1])
    check_grad(d, a)
    for plain, dist in zip(*seen, strict=True):
        torch.testing.assert_close(dist, plain)
    assert found.get_total_flops() >= expected.get_total_flops() > 0


@pytest.mark.parametrize("op", ["max", "min", "avg"])
def test_a_checkpoint_of_what_was_reduced_before(op: str) -> None:
    """What the reduction saved outside is saved inside too, where it is recomputed."""
    d = sw.distribute_tensor(data(4), sw.simulate((2,), ("a",)), [R]).requires_grad_()
    y = (d * 1).redistribute(placements=[Partial(op)])
    outside = torch.ones_like(y) * y
    inside = checkpoint(lambda t: torch.hypot(1.25 - t, t), y, use_reentrant=False)
    (outside.sum() + inside.sum()).backward()
    plain = d.detach().full_tensor().requires_grad_()
    (plain.sum() + torch.hypot(1.25 - plain, plain).sum()).backward()
    check_grad(d, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_its_dropout(reentrant: bool) -> None:
    d = sw.ones(16, 16, device_mesh=MESH, placements=[S0, R], requires_grad=True)
    out = checkpoint(lambda x: nn.functional.dropout(x, 0.5) * x, d, use_reentrant=reentrant)
    out.sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), 2 * out.detach().full_tensor())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradients_inside(mode: Callable) -> None:
    x = data(6, 4)
    d = sw.distribute_tensor(x, MESH, [S0, R]).requires_grad_()
    with mode():
        y = torch.relu(d @ d.transpose(0, 1))
        y.add_(1)
        made = sw.distribute_tensor(x, MESH, [R, S1]) * 2
        assert not y.requires_grad and not made.requires_grad
        assert y.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(y.full_tensor(), torch.relu(x @ x.T) + 1)
    assert (d * 2).requires_grad


def test_pending_sums_of_inference_mode() -> None:
    """They are tensors without versions, inside and afterwards."""
    x = data(6, 4)
    with torch.inference_mode():
        product = sw.distribute_tensor(x, MESH, [R, S1]) @ sw.distribute_tensor(x.T, MESH, [R, S0])
        assert product._layout.has_pending
        for _ in range(2):
            torch.testing.assert_close(torch.relu(product).full_tensor(), torch.relu(x @ x.T))
    torch.testing.assert_close(torch.relu(product).full_tensor(), torch.relu(x @ x.T))


@pytest.mark.parametrize("placements", [(S0, R), (S1, R), (R, S1), (S0, S1)], ids=str)
def test_autocast(placements: tuple) -> None:
    """What runs in which precision is torch's to say; plans do not get in its way, in either order."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def program(t: Tensor, v: Tensor) -> Tensor:
        y = nn.functional.layer_norm(t @ v, (8,))
        return nn.functional.log_softmax(nn.functional.linear(y, v), -1)

    for enabled in (False, True, False):
        (a, b), (c, e) = (
            (x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()),
            (w.clone().requires_grad_(), sw.distribute_tensor(w, MESH, [R, S1]).requires_grad_()),
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            plain, dist = program(a, c), program(b, e)
        assert dist.dtype == plain.dtype
        close = {"atol": 0.1, "rtol": 0.1} if enabled else {"atol": 1e-5, "rtol": 1e-4}
        torch.testing.assert_close(dist.full_tensor(), plain, **close)
        plain.pow(2).mean().backward()
        dist.pow(2).mean().backward()
        assert b.grad.dtype == torch.float32
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, **close)


IN_PLACE_ROOT = """
import torch, shardwise as sw
x = sw.distribute_tensor(torch.arange(8.0), sw.simulate((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
y = (x * 2).view(4, 2)
y.transpose(0, 1)[0] = 1.0
y.backward(torch.ones_like(y))
assert x.grad.tolist() == [0.0, 2.0] * 4
"""


def test_a_view_that_was_written_to_is_the_root_of_a_backward_pass() -> None:
    """Autograd asks for its new history with the tensor's lock held: whoever asks again would wait for ever."""
    subprocess.run([sys.executable, "-c", IN_PLACE_ROOT], check=True, timeout=120)


@pytest.mark.parametrize("placements", [(R, R), (S0, R), (S0, S1), (P, R)], ids=str)
@pytest.mark.parametrize("combine", [torch.mul, lambda x, s: torch.addcmul(x, x, s), lambda x, s: (x * s).tanh() + s])
def test_a_plain_number_has_one_gradient(combine: Callable, placements: tuple) -> None:
    """It is every rank's, and the simulator holds all ranks."""
    plain, dist = twins(data(4, 6), placements)
    number, other = (torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    combine(plain, number).sum().backward()
    combine(dist, other).sum().backward()
    torch.testing.assert_close(other.grad, number.grad)
    torch.testing.assert_close(dist.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("extent", [1, 3])
def test_gradients_with_a_history_can_be_written_to(extent: int) -> None:
    """As users do to gradients: clipped, scaled, zeroed, added to."""
    mesh = sw.simulate((extent,), ("tp",))
    whole = torch.randn(4, dtype=torch.float64)

    def run(x: Tensor) -> list[Tensor]:
        with warnings.catch_warnings(action="ignore"):  # about cycles, which are cut below
            (x**3).sum().backward(create_graph=True)
        found = []
        (again,) = torch.autograd.grad(x.grad.square().sum(), x, retain_graph=True)
        torch.nn.utils.clip_grad_norm_([x], 0.5)
        found += [again, x.grad.detach().clone()]
        with torch.no_grad():
            x.grad.mul_(2)
        (x * 2).sum().backward()
        found.append(x.grad.detach().clone())
        torch.optim.SGD([x], 0.1).zero_grad(set_to_none=False)
        found.append(x.grad.detach().clone())
        x.grad = None
        return found

    expected = run(whole.clone().requires_grad_())
    found = run(sw.distribute_tensor(whole, mesh, [sw.Shard(0)]).requires_grad_())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach())


@pytest.mark.parametrize(
    "first", [lambda x: x.relu().sum(), lambda x: nn.utils.get_total_norm([x])], ids=["call", "norm"]
)
@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_what_is_moved_without_a_graph_is_not_shared_with_uses_in_one(placements: tuple, first: Callable) -> None:
    """Of a leaf, and of a result."""
    a, d = twins(data(4, 2), placements)
    for x in (a, d):
        y = x * 2
        with torch.no_grad():
            first(x)
            first(y)
        (x.tanh().sum() + y.relu().sum()).backward()
    check_grad(d, a)


@over_layouts
def test_a_conversion_to_what_it_is_gives_the_tensor_itself(placements: tuple) -> None:
    for x in twins(data(4, 2), placements):
        (x * 2).sum().backward()
        assert x.double() is x and x.to(torch.float64) is x and x.contiguous() is x
