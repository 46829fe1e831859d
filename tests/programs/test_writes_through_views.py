"""Views and copies are what they are on one device: a write reaches what it reaches there, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import PAIR
from sweep import mesh_of, normal, place, same
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.dispatch.aliasing.copied_views import CopiedView
from shardwise.errors import InPlaceError

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


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


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_writes_to_a_detached_row_of_a_leaf(placement: sw.Placement) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        x[0].detach().mul_(2)
        x[:, 1].detach().mul_(3)
        (x * x).sum().backward()
        return x, x.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
@pytest.mark.parametrize("view", [lambda x: x[0], lambda x: x[:, 1], lambda x: x.view(-1), lambda x: x.view(-1)[:5]])
def test_writes_to_a_detached_row_that_give_it_a_history(
    view: Callable[[Tensor], Tensor], placement: sw.Placement
) -> None:
    """It has one from then on, but what it was detached from has not."""

    def program(x: Tensor) -> tuple[Any, ...]:
        w = (x.detach()[0, 0] * 2).requires_grad_()
        row = view(x).detach()
        row[1:].mul_(w)
        (x * x).sum().backward()
        row.sum().backward()
        return x, x.grad, row, w.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("view", [lambda v: v[1:], lambda v: v[:, :1], lambda v: v.select(1, 0), lambda v: v[1, ::2]])
def test_views_of_a_sum_that_was_reduced_before(view: Callable[[Tensor], Tensor]) -> None:
    """They are views of what it came to, and a write to one of them is not."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = x @ x.t()
        positive = v > 0
        view(v).mul_(2)
        view(v).add_(1)
        v[0, :2] = 0.5
        v[positive] += 1
        (v * v).sum().backward()
        return v, x.grad

    for mesh in MESHES:
        same(program, normal(3, 4), S(1), mesh=mesh)


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
    with pytest.raises(sw.errors.InPlaceError, match=r"use .*, which gives another view"):
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


@pytest.mark.parametrize("mesh", [(1,), (2,)])
@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_what_a_function_returns_may_be_written_to_though_its_shards_are_views(
    mesh: tuple[int, ...], placement: sw.Placement
) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        out: Any = checkpoint(lambda x: (x * -1.5).max(0).values, x, use_reentrant=True)
        out[0].mul_(2)
        out.sum().backward()
        return out, x.grad

    for shape in ((1, 1), (3, 2)):
        same(program, normal(*shape), placement, mesh=mesh)


@pytest.mark.parametrize("view", [lambda v: v.view_as(v), lambda v: v.view(2, -1), lambda v: v.reshape(2, 3)])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_write_to_a_view_of_the_same_shape_of_what_it_reads(view: Any, mesh: tuple[int, ...]) -> None:
    """Torch takes views for the same if their strides are equal: also those of shards of a single row."""

    def program(x: Tensor) -> tuple[Any, ...]:
        rows = (x * 1)[::2]
        with torch.no_grad():
            view(rows).mul_(rows)
        return (rows,)

    same(program, normal(4, 3), S(0), mesh=mesh)


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_a_write_to_the_data_of_a_view_of_what_was_reduced(kind: str) -> None:
    """Autograd does not hear of such a write, and neither does who keeps what was reduced."""

    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            y = x * 1
            before = y.norm()
            y.flatten().data.div_(2)
            return before, y.square()

    same(program, normal(3, 2), P(kind))


def test_the_result_of_a_layer_norm_is_contiguous() -> None:
    """So what is flattened of it is a view, and a write to that is seen."""

    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            y = F.layer_norm(x.mT, (x.shape[0],))
            y[1].ravel().tanh_()
        return (y,)

    for placement in (S(0), S(1), R):
        same(program, normal(5, 6), placement)


@pytest.mark.parametrize("part", [slice(1, None), slice(0, 1)], ids=str)
def test_a_view_of_what_a_sum_was_reduced_to_is_written_to(part: slice) -> None:
    """After the write its source is pending again, and the view still lies as it did."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x.mean(1, keepdim=True) * 2
        y.tanh().sum().backward(retain_graph=True)
        y[part, -1] *= -1.5
        y.sin().sum().backward()
        return y, x.grad

    for rows in (1, 3):
        same(program, normal(rows, 3), S(1))


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.t().sin()
    z = y.reshape(-1)  # a copy: the whole does not lie in one piece, whatever a thin shard looks like
    y.mul_(2)
    return y, z


def transposed_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.t().reshape(-1)
    z.add_(1)
    return x, z


def with_channels_last(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.to(memory_format=torch.channels_last).relu()
    z = y.flatten(1)
    y.mul_(2)
    return y, z


@pytest.mark.parametrize(
    ("program", "shape", "mesh", "placements"),
    [
        pytest.param(transposed, (2, 3), (4,), [S(0)], id="sin-2x3"),
        pytest.param(transposed, (4, 2), (2,), [S(1)], id="sin-4x2"),
        pytest.param(transposed_in_place, (2, 3), (3, 2), [S(1), S(0)], id="t-2x3"),
        pytest.param(with_channels_last, (3, 2, 4, 4), (3,), [S(1)], id="channels_last"),
    ],
)
def test_a_reshape_is_a_view_where_it_is_one_on_one_device(
    program: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any
) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    for expected, found in zip(program(x.clone()), program(place(x, *placements, mesh=mesh)), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)


def strided(x: sw.DTensor) -> sw.DTensor:
    with warnings.catch_warnings(action="ignore", category=sw.errors.FallbackWarning):
        return x.as_strided((2, 3), (1, 2))  # type: ignore[return-value]


def test_a_refused_write_has_written_nothing() -> None:
    view = strided(place(torch.randn(5, 3), S(1), mesh=(3,)))
    before = view.full_tensor().clone()
    with pytest.raises(InPlaceError):
        view.add_(1)
    assert torch.equal(view.full_tensor(), before)


REPEATS: list[Callable[[Tensor], Tensor]] = [
    *(lambda e: e[1:], lambda e: e[1, 1], lambda e: e[1].diagonal(), lambda e: e[:1, 1]),
    *(lambda e: e[:, 1][1:], lambda e: e.select(1, 1)[:1], lambda e: e.flatten(1)[1:]),
]


@pytest.mark.parametrize("placement", [S(0), S(1), P("max"), R], ids=str)
@pytest.mark.parametrize("view", range(len(REPEATS)))
def test_a_write_to_one_of_the_repeats_of_an_expanded_tensor_reaches_all(view: int, placement: sw.Placement) -> None:
    """Or is refused: a copy need not repeat itself in memory."""
    take, expected = REPEATS[view], normal(4, 3)
    d = place(expected.clone(), placement)
    expanded = d.expand(2, 4, 3)
    part = take(expanded)
    if isinstance(part, CopiedView) and view > 3:
        with pytest.raises(InPlaceError):
            part.mul_(3)
    else:
        part.mul_(3)
        take(expected.expand(2, 4, 3)).mul_(3)
    assert torch.equal(d.full_tensor(), expected)
    assert torch.equal(expanded.full_tensor(), expected.expand(2, 4, 3))
    assert torch.equal(part.full_tensor(), take(expected.expand(2, 4, 3)))
    assert not isinstance(part, CopiedView) or placement in (S(0), S(1))


def test_views_are_still_watched_after_a_refused_write() -> None:
    x = place(torch.randn(5, 3), S(1), mesh=(3,))
    first, second = strided(x), x.reshape(3, 5)
    with pytest.raises(InPlaceError):
        first.add_(1)
    x.zero_()
    assert not second.full_tensor().any()


def second(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((first**3).sum(), x)
    return found


def test_uses_of_a_part_share_a_move() -> None:
    x = place(torch.randn(4, 1, 5, 6), S(1), S(3), mesh=(2, 2)).requires_grad_()
    y = (x.diagonal(0, 0, -1).unsqueeze(0) * 2).sin()
    y = y * y
    assert type(y).__name__ == "KeepsStrides", "it shows its strides: this test shows nothing any more"
    counts = []
    for _ in range(2):
        with sw.debug.CommDebugMode() as comm:
            y.mode(1)
        counts.append(comm.get_comm_counts())
    assert counts == [{"all_gather": 1}, {}]
    assert type(y).__name__ == "KeepsStrides"
    with pytest.raises(RuntimeError, match="size of tensor"):
        y + torch.ones_like(x)
    assert type(y).__name__ == "KeepsStrides"


def test_what_torch_copies_is_not_what_was_moved() -> None:
    def program(x: Tensor) -> Tensor:
        q = x.t().sin()
        h = q.reshape(16)
        h.mul_(3)
        return q.reshape(2, 8).detach() + h.reshape(2, 8).detach()

    same(program, normal(4, 4), S(0))


@pytest.mark.parametrize("change", [lambda p: p.t_(), lambda p: p.unsqueeze_(0), lambda p: p.transpose_(0, 1)])
def test_parts_that_change_their_shape_in_place(change: Callable[[Tensor], Any]) -> None:
    def program(x: Tensor) -> Tensor:
        y = x.detach().clone()
        p = y[:, 1:]
        change(p)
        h = p.reshape(-1)
        h.mul_(2)
        return torch.cat([y.reshape(-1), h])

    for placement in (S(0), S(1)):
        same(program, normal(4, 4), placement)


def test_outdated_copies_are_taken_again_before_functions_return_them() -> None:
    def program(x: Tensor) -> Tensor:
        a = x * 1
        c = a[:, 1]
        a.mul_(2)
        return c

    a, d = normal(4, 4).requires_grad_(), place(normal(4, 4), S(1)).requires_grad_()
    for x in (a, d):
        checkpoint(program, x, use_reentrant=True).square().sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), a.grad)


@pytest.mark.parametrize(
    "write", [lambda x, v: x[0].zero_(), lambda x, v: v.select(0, 0).zero_()], ids=["base", "view"]
)
@pytest.mark.parametrize("looks", [True, False])
def test_a_view_has_a_new_history_once_it_is_looked_at_after_a_write(
    write: Callable[[Tensor, Tensor], Any], looks: bool
) -> None:
    """What was computed from it before is then not computed from it."""
    for x in (normal(3, 2).requires_grad_(), place(normal(3, 2), S(0)).requires_grad_()):
        v = x[2]
        v.retain_grad()
        y = (v + 1).sin().sum()
        with torch.no_grad():
            write(x, v)
        if looks:
            v.grad_fn  # noqa: B018
        y.backward()
        assert (v.grad is None) == looks
        assert x.grad is not None


VIEWS: list[Callable[[Tensor], Tensor]] = [lambda y: y[0], lambda y: y[:, 1], lambda y: y.flatten(), lambda y: y[1:]]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("watch", ["kept", "hooked"])
@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_a_view_of_a_watched_view_is_no_part_of_it_once_written_to(view: int, watch: str, recorded: bool) -> None:
    """Torch takes both for views of the base: the gradient of what was written to goes there straight."""

    def program(x: Tensor) -> tuple[Any, ...]:
        first = VIEWS[view](x * 2)
        if watch == "kept":
            first.retain_grad()
        else:
            first.register_hook(lambda grad: grad.tanh())
        second = first[::2]
        with torch.set_grad_enabled(recorded):
            second.mul_(3)
        (first.sum() + second.sin().sum()).backward()
        return first, second, first.grad if watch == "kept" else None

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_steps_along_dims_of_one_index_do_not_matter() -> None:
    x = normal(2, 6)
    d = place(x, S(1)).narrow(0, 1, 1).clone(memory_format=torch.preserve_format)
    torch.testing.assert_close(d.as_strided((3,), (2,)).full_tensor(), x[1:].clone().as_strided((3,), (2,)))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_chunks_that_overlap() -> None:
    """Of a sequence, as some attentions make them."""
    x = normal(3, 6, 8)
    for dim in range(3):
        d = sw.distribute_tensor(x, PAIR, [sw.Shard(dim)])
        chunks = d.as_strided((5, 12), (24, 1))
        torch.testing.assert_close(chunks.full_tensor(), x.as_strided((5, 12), (24, 1)))  # type: ignore[attr-defined]
        with pytest.raises(sw.errors.InPlaceError, match="the write would be lost"):
            chunks.zero_()
