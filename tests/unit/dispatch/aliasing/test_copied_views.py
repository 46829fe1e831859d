"""Views that had to be copies: writes reach their source or are refused, and outdated copies are not used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.dispatch.aliasing import copied_views as copies

MESH = sw.simulate((2,), ("tp",))
S0, S1, R = sw.Shard(0), sw.Shard(1), sw.Replicate()


def whole() -> Tensor:
    return torch.arange(24.0).view(4, 6).clone()


def reshaped(x: Tensor) -> None:
    x.view(24).zero_()


def reshaped_twice(x: Tensor) -> Tensor:
    view = x.view(3, 8)
    view.add_(1)
    view.mul_(2)
    return view * 1


def row(x: Tensor) -> None:
    x[1].copy_(x[0])


def row_in_place(x: Tensor) -> None:
    x[1] *= 2
    x[2] += 2
    x[3] -= x[0]


def column(x: Tensor) -> None:
    third = x[:, 2]
    third.mul_(3)


def selected(x: Tensor) -> None:
    x.select(0, -1).fill_(7)


def part_of_a_reshape(x: Tensor) -> Tensor:
    view = x.view(24)
    view[3:7].zero_()
    return view * 1


def part_alone(x: Tensor) -> None:
    x.view(24)[3:7].zero_()


def detached(x: Tensor) -> None:
    x.view(24).detach().zero_()


def augmented(x: Tensor) -> Tensor:
    view = x.view(3, 8)
    view += 1
    first = view[0]
    first -= 5
    return view * 1


WRITES: list[Callable[[Tensor], Any]] = [reshaped, reshaped_twice, row, row_in_place, column, selected]
WRITES += [part_of_a_reshape, part_alone, detached, augmented]


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_write_to_a_view_reaches_its_source(write: Callable[[Tensor], Any], placement: Any) -> None:
    expected, x = whole(), sw.distribute_tensor(whole(), MESH, [placement])
    wanted, found = write(expected), write(x)
    assert torch.equal(x.full_tensor(), expected)
    if wanted is not None:
        assert torch.equal(found.full_tensor(), wanted)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "unbind": lambda x: x.unbind(0)[1],
    "unbind the other": lambda x: x.unbind(1)[2],
    "chunk": lambda x: x.chunk(2, 1)[-1],
    "split": lambda x: x.split([1, 3])[1],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2)[1],
    "a row of a reshape": lambda x: x.view(3, 8)[1],
    "movedim of a reshape": lambda x: x.view(2, 2, 6).movedim(0, 2)[1],
}
PENDING = [sw.Partial(op) for op in ("sum", "avg", "max", "min")]


@pytest.mark.parametrize("placement", [S0, S1, *PENDING], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_write_to_any_view_reaches_its_source(part: str, placement: sw.Placement) -> None:
    expected, x = whole(), sw.distribute_tensor(whole(), MESH, [placement])
    for t in (expected, x):
        view = PARTS[part](t)
        view.mul_(2)
        view.add_(view)
        t.add_(1)
        view.tanh_()
    assert torch.equal(x.full_tensor(), expected)


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda v: v * 1,
    "reduction": lambda v: v.sum(),
    "view": lambda v: v[0],
    "function": lambda v: torch.cat([v, v]),
    "second": lambda v: torch.ones_like(v) + v,
    "written to": lambda v: v.add_(1),
}
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x.view(24),
    "view of a copy": lambda x: x.view(24)[3:9],
    "row": lambda x: x[1],
    "one of several": lambda x: x.unbind(1)[2],
    "copy of a copy": lambda x: x.view(3, 8)[2],
    "copy of a copy of a copy": lambda x: x.view(3, 8).view(8, 3)[1],
}


@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("take", TAKEN)
def test_a_copy_shows_what_is_written_to_its_source(take: str, use: str, placement: sw.Placement) -> None:
    found = []
    for t in (whole(), sw.distribute_tensor(whole(), MESH, [placement])):
        view = TAKEN[take](t)
        USES[use](view)
        t.add_(1)
        first = USES[use](view) * 1
        t.mul_(3)
        found.append([first, USES[use](view), view, t])
    for expected, mine in zip(*found, strict=True):
        assert isinstance(mine, sw.DTensor)
        assert torch.equal(mine.full_tensor(), expected)


def test_gradients_of_what_is_written_between_uses_of_a_copy() -> None:
    a, d = whole().requires_grad_(), sw.distribute_tensor(whole(), MESH, [S1]).requires_grad_()
    for t in (a, d):
        y = t * 2
        view, other = y.view(24), y[:, 1]
        first = (view * 2).sum() + other.sum()
        y.mul_(t)
        (first + (view * 3).sum() + (other * t[:, 0]).sum()).backward()
    torch.testing.assert_close(d.grad.full_tensor(), a.grad)


def test_what_was_saved_for_a_backward_pass_and_then_written_to_is_missed() -> None:
    for t in (whole().requires_grad_(), sw.distribute_tensor(whole(), MESH, [S1]).requires_grad_()):
        y = t * 2
        view = y.view(24)
        loss = (view * view).sum()
        y.add_(1)
        view.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_copy_taken_under_no_grad_stays_outside_the_graph() -> None:
    x = sw.distribute_tensor(whole(), MESH, [S1]).requires_grad_()
    with torch.no_grad():
        view = (x * 1).view(24)
        source = view._view_of.source
        source.add_(1)
    assert not (view * 1).requires_grad
    assert torch.equal(view.full_tensor(), whole().view(24) + 1)


def test_writing_to_one_copy_is_seen_in_the_others() -> None:
    x = sw.distribute_tensor(whole(), MESH, [S1])
    one, other = x.view(24), x.view(3, 8)
    one.zero_()
    for t in (one, x, other):
        assert not t.full_tensor().any()


def test_an_optimizer_step_is_seen_in_copies_too() -> None:
    x = torch.nn.Parameter(sw.distribute_tensor(whole(), MESH, [S1]))
    optimizer = torch.optim.SGD([x], lr=0.1)
    view = x.detach().view(24)
    (x * x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(view.full_tensor(), whole().view(24) * 0.8)


def test_gradients_of_writes_through_copies() -> None:
    def function(t: Tensor) -> Tensor:
        y = t * 2
        y[1] *= 3
        y.view(24).mul_(t.view(24))
        return (y * y).sum()

    a = whole().requires_grad_()
    d = sw.distribute_tensor(whole(), MESH, [S0]).requires_grad_()
    function(a).backward()
    function(d).backward()
    torch.testing.assert_close(d.grad.full_tensor(), a.grad)


def test_nothing_is_watched_when_no_copies_are_left() -> None:
    before = [set(copies.copies), set(copies._taken)]  # what other tests left in the window of shared moves
    x = sw.distribute_tensor(whole(), MESH, [S1])
    kept = x.view(24)
    assert set(copies.copies) != before[0]
    del kept
    gc.collect()
    assert set(copies.copies) <= before[0] and set(copies._taken) <= before[1]
