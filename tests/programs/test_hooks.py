"""Hooks see the gradients that they see on one device, also where what they are on is written to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import full
from sweep import mesh_of, normal, place, same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.proof.fuzz.leaves import Device
from shardwise.proof.kit.compare import check_shards

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


def watched(change: Callable[[Tensor], Any], use_before: bool = False) -> Callable[[Tensor], tuple[Any, ...]]:
    def program(x: Tensor) -> tuple[Any, ...]:
        y, seen = x * 1, []
        y.register_hook(lambda grad: seen.append(grad.clone()))
        y.register_hook(lambda grad: 2 * grad)
        before = (y * 5).sum() if use_before else 0
        change(y)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        ((y * y).sum() + before).backward()
        assert len(seen) == 2
        return y, x.grad, *seen

    return program


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda y: y.mul_(3),
    "a row": lambda y: y[0].mul_(3),
    "a column": lambda y: y[:, 1].mul_(3),
    "through a view": lambda y: y.view(-1).mul_(3),
    "assigned": lambda y: y.__setitem__((slice(None), 1), 0.5),
    "in a list": lambda y: torch._foreach_mul_([y], 3.0),
}


@pytest.mark.parametrize("use_before", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_on_what_is_then_written_to(name: str, use_before: bool) -> None:
    """Hooks see the gradient of what was there when they came; those that come after a write, of what was written."""
    for placement in (S(0), S(1), P(), R):
        same(watched(CHANGES[name], use_before), normal(4, 4), placement)


def test_a_gradient_that_a_hook_gave_is_its_own_when_it_is_written_to() -> None:
    """It retains the gradient of what was computed from it before, as it does on one device."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * x
        y.register_hook(lambda grad: grad * 2)
        (grad,) = torch.autograd.grad((y * y).sum(), [y], create_graph=True)
        grad.retain_grad()
        used = (grad * 3).sum()
        with torch.no_grad():
            grad[-1, 1:] = 1.25
        (used + grad.mean()).backward()
        return grad, grad.grad, x.grad

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


def test_a_hook_on_a_gradient_that_all_ranks_have_and_that_was_written_to() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y, mask = x.flatten(0, 1), torch.arange(16).reshape(8, 2) % 3 == 0
        if isinstance(x, sw.DTensor):
            mask = sw.distribute_tensor(mask, x.device_mesh)
        (grad,) = torch.autograd.grad((y[mask].sum() ** 2), [y], create_graph=True)
        with torch.no_grad():
            grad.select(0, 3).contiguous().div_(2)
        grad.register_hook(lambda g: g * 2)
        grad.sum().backward()
        return grad, x.grad

    for placement in (R, S(0)):
        same(program, normal(4, 2, 2), placement)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_hook_keeps_nothing_alive(passes: int) -> None:
    class Hook:
        def __call__(self, grad: Tensor) -> None:
            pass

    y, hook = place(normal(4, 4), S(0)).requires_grad_() * 1, Hook()
    y.register_hook(hook)
    for _ in range(passes):
        y.sum().backward()
    kept = weakref.ref(hook)
    del y, hook
    gc.collect()
    assert kept() is None


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda y: y[1],
    "a column": lambda y: y[:, 1],
    "rows": lambda y: y[1:],
    "flat": lambda y: y.view(-1),
    "of flat": lambda y: y.flatten()[3:7],
    "a view of a view": lambda y: y.view(2, 8)[0].view(2, 4),
}


DIRECT = [name for name in PARTS if name != "a view of a view"]


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {"a result": lambda x: x * 1, "a view": lambda x: (x * 1)[:]}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("observer", ["source kept", "view kept", "hook on source", "hook on view", "asked for"])
@pytest.mark.parametrize(
    ("source", "name"), [*(("a result", name) for name in PARTS), *(("a view", name) for name in DIRECT)]
)
def test_gradients_seen_around_a_write_through_a_view(source: str, name: str, observer: str, used: bool) -> None:
    """A view that is written to is what its base becomes: uses of it send their gradient there, and what was hooked to
    it before is left out, also where it had to be a copy."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = SOURCES[source](x)
        part = PARTS[name](y)
        before = (part * 3).sum()
        observed = y if "source" in observer else part
        if "kept" in observer:
            observed.retain_grad()
        elif "hook" in observer:
            observed.register_hook(lambda grad: grad.tanh())
        part.sigmoid_()
        loss = before + (y * y).sum() + ((part * part).sum() if used else 0)
        if observer == "asked for":
            return part, *torch.autograd.grad(loss, [x, y, part], allow_unused=True)
        loss.backward()
        return y, x.grad, observed.grad if "kept" in observer else None

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


@pytest.mark.parametrize("mesh", [(1,), (2,)])
def test_a_hook_on_a_view_whose_source_was_written_to_since(mesh: tuple[int, ...]) -> None:
    """Plain torch dies of it, unless somebody has asked for the view's history in between."""
    x = place(normal(3, 2), S(1), mesh=mesh).requires_grad_()
    y = x * 2
    view = y.t()
    with torch.no_grad():
        y.mul_(3)
    view.register_hook(lambda grad: grad * 2)
    view.sum().backward()
    torch.testing.assert_close(full(x.grad), torch.full_like(normal(3, 2), 4))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("hook", [lambda g: g * 2, lambda g: g.tanh(), lambda g: g + 0.5])
def test_a_hook_on_an_average_of_terms_that_differ(hook: Any, mesh: tuple[int, ...]) -> None:
    """Each rank multiplies its gradient by its own term: shares that merely add up to the hook's result are no good."""
    grads = []
    for on in (Device(None), Device(mesh_of(mesh))):
        x = on.leaf((3, 2), torch.float64, [P("avg")], seed=688).requires_grad_()
        y = torch.mv(x, x[0])
        y.register_hook(hook)
        y.square().sum().backward()
        grads.append(full(x.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("asked", [(0,), (0, 1), (0, 2), (1,), (1, 2)])
@pytest.mark.parametrize("placements", [(S(0), R), (R, S(0)), (P(), R), (P(), S(1)), (S(0), S(1))], ids=str)
def test_gradients_asked_for_of_moved_tensors_with_hooks(placements: Any, asked: tuple[int, ...]) -> None:
    """Torch hands out what the hooks of a tensor were given if it goes on to what the tensor was computed from, else
    what they returned: on all ranks alike."""
    source, target = placements

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * 2
        y.register_hook(lambda grad: grad.tanh())
        z = Device().redistribute(y, [target])
        z.register_hook(lambda grad: grad.sin())
        tensors = (z, y, x)
        found = torch.autograd.grad((z * z).sum(), [tensors[i] for i in asked])
        for grad in found:
            if isinstance(grad, sw.DTensor):
                check_shards("gradient", grad)
        return found

    same(program, normal(4, 4), source, mesh=(3,))


@pytest.mark.parametrize("op", ["max", "min", "avg", "sum"])
@pytest.mark.parametrize("goal", [R, S(0)], ids=str)
def test_a_reduced_tensor_retains_its_gradient_through_writes(op: str, goal: sw.Placement) -> None:
    found = []
    for on in (Device(None), Device(mesh_of((2,)))):
        x = on.leaf((4, 2), torch.float64, [P(op)], seed=3).requires_grad_()
        y = on.redistribute(x, [goal])
        y.retain_grad()
        y[1:] += 2
        y[:2] *= 3
        y.sin().sum().backward()
        found.append([full(each.detach()) for each in (y, y.grad, x.grad)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (0, 2)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_asked_for_of_what_a_checkpoint_returns(reentrant: bool, asked: tuple[int, ...]) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * 2
        z = checkpoint(lambda a: a.sin(), y, use_reentrant=reentrant)
        assert reentrant is (z.grad_fn.name() == "CheckpointFunctionBackward")
        z.register_hook(lambda grad: grad + 0.5)
        if reentrant:  # which no gradients can be asked for through
            y = z * 1
        tensors = (z, y, (z * z).sum())
        found = torch.autograd.grad(tensors[2] + y.sum(), [tensors[i] for i in asked])
        for grad in found:
            if isinstance(grad, sw.DTensor):
                check_shards("gradient", grad)
        return found

    for placement in (R, S(0)):
        same(program, normal(4, 4), placement, mesh=(3,))


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cummax": lambda x: x.cummax(1).values,
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "roll": lambda x: x.roll(1, 1),
}


@pytest.mark.parametrize("mesh", [(1,), (2,)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_on_results_of_programs_last_though_these_are_written_to(name: str, mesh: tuple[int, ...]) -> None:
    """They are no views, though they may be parts of what a rank computed."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = PROGRAMS[name](x)
        y.register_hook(lambda grad: grad + 0.5)
        with torch.no_grad():
            y.view_as(y).sigmoid_()
        y.sin().sum().backward()
        return y, x.grad

    if name == "softmax":  # which needs its result for the gradient
        with pytest.raises(RuntimeError, match="inplace operation"):
            program(place(normal(3, 3), S(1), mesh=mesh).requires_grad_())
    else:
        same(program, normal(3, 3), S(1), mesh=mesh)
