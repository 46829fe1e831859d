"""Views that had to be copies: writes reach their source or are refused, and outdated copies are not used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.dispatch import copies

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


def test_a_write_without_a_way_back_is_refused_before_it_happens() -> None:
    x = sw.distribute_tensor(whole(), MESH, [S0])
    second = x.unbind(0)[1]
    with pytest.raises(sw.errors.InPlaceError) as error:
        second.zero_()
    assert str(error.value) == (
        "zero_ would write to a view of a DTensor that had to be a copy, because its data came from other ranks, and "
        "the write would be lost. Nothing was changed; write to the tensor itself, or redistribute it first so that "
        "the view needs no data of other ranks"
    )
    assert torch.equal(x.full_tensor(), whole())
    assert torch.equal(second.full_tensor(), whole()[1])


@pytest.mark.parametrize(
    "use",
    [lambda v: v * 1, lambda v: v.sum(), lambda v: v[0], lambda v: v.full_tensor(), lambda v: torch.cat([v, v])],
    ids=["method", "reduction", "view", "full_tensor", "function"],
)
@pytest.mark.parametrize("take", [lambda x: x.view(24), lambda x: x.view(24)[3:9]], ids=["copy", "view of a copy"])
def test_a_copy_is_stale_once_its_source_is_written_to(take: Callable, use: Callable) -> None:
    x = sw.distribute_tensor(whole(), MESH, [S1])
    view = take(x)
    use(view)
    x.add_(1)
    with pytest.raises(sw.errors.InPlaceError) as error:
        use(view)
    assert str(error.value) == (
        "this view of a DTensor had to be a copy, because its data came from other ranks, and the tensor it was taken "
        "from has been written to since, which a view would show; take the view again"
    )
    assert torch.equal(take(x).full_tensor(), take(whole() + 1))


def test_writing_to_one_copy_outdates_the_others_but_not_itself() -> None:
    x = sw.distribute_tensor(whole(), MESH, [S1])
    one, other = x.view(24), x.view(3, 8)
    one.zero_()
    assert not one.full_tensor().any()
    assert not x.full_tensor().any()
    with pytest.raises(sw.errors.InPlaceError, match="take the view again"):
        other.full_tensor()


def test_an_optimizer_step_outdates_copies_too() -> None:
    x = torch.nn.Parameter(sw.distribute_tensor(whole(), MESH, [S1]))
    optimizer = torch.optim.SGD([x], lr=0.1)
    view = x.detach().view(24)
    (x * x).sum().backward()
    optimizer.step()
    with pytest.raises(sw.errors.InPlaceError, match="take the view again"):
        view.sum()


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
    x = sw.distribute_tensor(whole(), MESH, [S1])
    kept = x.view(24)
    assert copies.copies
    del kept
    gc.collect()
    assert not copies.copies
    assert not copies._taken
