"""What a program means: which writes are seen where, and what gradients come back. Programs that random ones showed to
be wrong, by what was wrong about them. Those that only real ranks show are in tests/multiprocess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import full
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


def same(program: Callable[[Tensor], Any], x: Tensor, *placements: sw.Placement, mesh: tuple[int, ...] = (2,)) -> None:
    """A program of a leaf gives the same on a DTensor: tensors, or None for gradients that there are none of."""
    expected = program(x.clone().requires_grad_(x.is_floating_point()))
    found = program(place(x.clone(), *placements, mesh=mesh).requires_grad_(x.is_floating_point()))
    for e, f in zip(expected, found, strict=True):
        assert (e is None) == (f is None), f"{f} where torch has {e}"
        if e is not None:
            torch.testing.assert_close(full(f.detach()), e.detach())


# Writes to what torch copies, and to what it does not


def written(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        z = view(y)
        z.mul_(3)
        (y * y).sum().backward()
        return y, z, x.grad  # type: ignore[return-value]

    return program


ROWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:, 0].contiguous(),
    lambda x: x[:, :, 1].contiguous(),
    lambda x: x[:, :, :1].squeeze(2).contiguous(),
    lambda x: x[:, 0].reshape(-1),
    lambda x: x[:, 0].flatten(),
    lambda x: x[:, 0].ravel(),
    lambda x: x[:, 0, 1].ravel(),
    lambda x: x[:, 1].t().reshape(-1),
    lambda x: x[:, 0].view(x.shape[0], x.shape[2])[1:].reshape(-1),
    lambda x: x[0, :, 1].reshape(2, 2),
    lambda x: x[:, 0].detach().ravel(),
    lambda x: x.flatten(0, 1)[1:3],
    lambda x: x.flatten(0, 1)[:, :1].flatten(),
]


@pytest.mark.parametrize("view", range(len(ROWS)))
def test_rows_of_a_sharded_dim_are_copied_where_torch_copies(view: int) -> None:
    for mesh in MESHES:
        for placement in (S(0), S(1), S(2), P(), R):
            same(written(ROWS[view]), normal(2, 4, 3), placement, mesh=mesh)


def test_strides_of_a_row_are_those_of_one_device() -> None:
    x = normal(2, 4, 3)
    for dim in range(3):
        d = place(x, S(dim))
        for row, expected in ((d[:, 1], x[:, 1]), (d[:, 1].detach(), x[:, 1]), (d[:, 1].t(), x[:, 1].t())):
            assert row.stride() == expected.stride()
            assert row.is_contiguous() == expected.is_contiguous()


def test_whether_a_reshape_is_a_view_is_not_learnt_from_copies() -> None:
    """The first call is of a copy that torch makes, and nobody else sees; the others lie like it but are views."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x.detach().clone(), x.detach().clone()
        y[:, :, 0].reshape(-1).view(2, 2).flatten().mul_(2)
        y[:, 0].reshape(2, 2, 2).flatten(0, 1).mul_(2)
        z.flatten(0, 1)[0].add_(1)
        return y, z

    for placement in (S(0), S(1), S(2)):
        same(program, normal(2, 2, 4), placement, mesh=(4,))


def test_a_list_may_name_a_row_twice() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x.detach().clone()
        row = y[0]
        torch._foreach_add_([row, row], 3)
        return y, row

    for placement in (S(0), S(1)):
        same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_writes_to_a_detached_row_of_a_leaf(placement: sw.Placement) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        x[0].detach().mul_(2)
        x[:, 1].detach().mul_(3)
        (x * x).sum().backward()
        return x, x.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_writes_to_a_row_of_a_leaf_are_refused_before_anything_is_written(placement: sw.Placement) -> None:
    x = place(normal(4, 4), placement).requires_grad_()
    row, before = x[0], x.detach().clone()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        row.mul_(2)
    assert torch.equal(x, before)
    assert torch.equal(row, before[0])


@pytest.mark.parametrize("change", [Tensor.t_, lambda x: x.unsqueeze_(0), lambda x: x.transpose_(0, 1)])
def test_the_shape_of_a_copied_view_does_not_change_in_place(change: Callable[[Tensor], Any]) -> None:
    x = place(normal(2, 4, 3), S(1))
    with pytest.raises(sw.errors.InPlaceError, match="use .*, which gives another view"):
        change(x[:, 0])


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_views_made_and_written_to_where_nothing_is_recorded(placement: sw.Placement) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            v = x[1:]
            v[0] += 1
            v[:, :2] *= 2
        (x * x).sum().backward()
        return x, v, x.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("view", [lambda x: x[1:3], lambda x: x.view(-1), lambda x: x.t(), lambda x: x[1]])
def test_a_leaf_made_of_shards_is_no_view_of_them(view: Callable[[Tensor], Tensor]) -> None:
    """Autograd looked for the history of views of the leaf in the shards that the user brought."""
    for placement in (S(0), R):
        d = sw.DTensor.from_local(normal(4, 4), mesh_of((2,)), [placement]).requires_grad_()
        x = d.detach().full_tensor().requires_grad_()
        for leaf in (d, x):
            v = view(leaf)
            with torch.no_grad():
                v.mul_(2)
            (v * v).sum().backward()
        assert x.grad is not None and d.grad is not None
        torch.testing.assert_close(d.grad.full_tensor(), x.grad)
