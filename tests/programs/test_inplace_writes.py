"""Writes in place: seen where they are on one device, or refused before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, full
from meshes import PAIR
from sweep import mesh_of, normal, place, same, sweep_in_place
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor
from shardwise.proof.kit.together import ranks_compared

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


@pytest.mark.parametrize("recorded", [False, True])
def test_writes_to_the_data_of_a_sum_that_was_reduced_before(recorded: bool) -> None:
    """Autograd's count of writes does not hear of them."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = (x if recorded else x.detach()) @ x.detach().t()
        before = v.sin()
        v.data.mul_(2)
        after = v.sin()
        data = v.data
        again = v.sin()
        data.add_(1)
        return before, after, again, v.sin()

    same(program, normal(3, 4), S(1))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_can_be_written_to(rows: int, create_graph: bool) -> None:
    """Torch's is no expanded number where its function divides by a count, and on no rank may ours be one."""

    def program(x: Tensor) -> tuple[Any, ...]:
        found = [
            torch.autograd.grad((x * 2).mean(), x, create_graph=create_graph)[0],
            torch.autograd.grad((x * x).view(-1).mean(), x, create_graph=create_graph)[0],
            torch.autograd.grad((y := x * 2).mean(), y, create_graph=create_graph)[0],
            torch.autograd.grad(torch.var_mean(x.repeat(2, 1), 0)[1].sum(), x, create_graph=create_graph)[0],
            torch.autograd.grad(x.mean(0).sum(), x, create_graph=create_graph)[0],
        ]
        for grad in found:
            grad.detach().add_(1)
            grad.detach()[0].mul_(2)
        return tuple(found)

    for mesh in MESHES:
        same(program, normal(rows, 3), S(0), mesh=mesh)


READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, i: F.embedding(i, x),
    "bags": lambda x, i: F.embedding_bag(i.reshape(1, -1), x),
    "the largest of bags": lambda x, i: F.embedding_bag(i.reshape(1, -1), x, mode="max"),
    "the largest": lambda x, i: x.topk(1, 0).values,
}


@pytest.mark.parametrize("name", READ)
def test_what_is_looked_up_may_be_written_to_before_the_gradient_comes(name: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * 1
        out = READ[name](y, beside(x, torch.tensor([0, 0])))
        with torch.no_grad():
            y.mul_(2)
        (out * out).sum().backward()
        return out, x.grad

    for shape in ((1, 3), (2, 1), (3, 3)):
        for placement in (S(0), S(1), R):
            same(program, normal(*shape), placement, mesh=(4,))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_only_has_a_place_in_the_graph_may_be_written_to(rows: int, function: Callable[..., Tensor]) -> None:
    def program(x: Tensor) -> Tensor:
        out = function(x, 0)
        with torch.no_grad():
            x.mul_(3)
        out.tanh().sum().backward()
        return out.detach()

    same(program, normal(rows), S(0))


@pytest.mark.parametrize("placement", [P(), S(0), S(1), R], ids=str)
def test_bits_are_written_as_bits(placement: sw.Placement) -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    d = place(x.clone(), placement)
    bits = torch.tensor(1.5, dtype=torch.float64).view(torch.int64).item()
    d.view(torch.int64).fill_(bits)
    assert torch.equal(d.full_tensor(), x * 1.5)
    d.view(dtype=torch.float32).mul_(2)
    (x := x * 1.5).view(torch.float32).mul_(2)
    assert torch.equal(d.full_tensor(), x)


CUTS: list[tuple[Any, Any]] = [({0: ("a", "b")}, {0: ("b", "a")}), ({0: ("a", "b")}, [R, R]), ([S(0), R], [R, S(0)])]


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("cuts", CUTS, ids=["order", "one is whole", "axes"])
@pytest.mark.parametrize("layer", [F.batch_norm, F.instance_norm])
def test_statistics_that_are_cut_differently_are_all_written(layer: Any, cuts: tuple[Any, Any]) -> None:
    for batch, channels, trained in itertools.product((1, 3), (4, 5), (False, True)):
        x, mean, var = (t.double() for t in (normal(batch, channels, 4), torch.zeros(channels), torch.ones(channels)))
        mesh = mesh_of((2, 2))
        means, variances = (
            sw.distribute_tensor(t.clone(), mesh, cut) for t, cut in zip((mean, var), cuts, strict=True)
        )
        given = sw.distribute_tensor(x, mesh, [R, R]).requires_grad_(trained)
        layer(given, means, variances, None, None, True, 0.1)
        layer(x, mean, var, None, None, True, 0.1)
        torch.testing.assert_close(full(means), mean)
        torch.testing.assert_close(full(variances), var)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_function_that_cannot_be_traced_and_writes_is_refused() -> None:
    """Of its name nobody can tell that it writes."""

    def scale(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(scale, (x,), x)
        x.mul_(x.sum().item())
        return x.clone()

    d = place(normal(4, 2), S(0))
    with pytest.raises(sw.errors.InPlaceError, match=r"scale.* writes to a tensor that is not replicated"):
        scale(d)
    torch.testing.assert_close(d.full_tensor(), normal(4, 2))


def test_numbers_are_copied_to_every_layout() -> None:
    accepted = sweep_in_place(lambda x: x.copy_(2), normal(3, 2))
    assert len(accepted) == 4


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (3, 3, 3)], ids=str)
def test_filled_diagonals(shape: tuple[int, ...], wrap: bool) -> None:
    accepted = sweep_in_place(lambda x: x.fill_diagonal_(2.5, wrap=wrap), normal(*shape))
    assert len(accepted) == len(shape) + 2


def test_too_long_rows_of_a_pending_parameter_are_shortened() -> None:
    index, table = torch.tensor([[1, 2], [2, 2]]), 5 * normal(5, 3)
    for look_up in (F.embedding, F.embedding_bag):
        leaves = [table.clone().requires_grad_(), place(table.clone(), P()).requires_grad_()]
        outs = [look_up(beside(leaf, index), leaf, max_norm=1.0) for leaf in leaves]
        for out in outs:
            out.square().sum().backward()
        torch.testing.assert_close(full(outs[1]), outs[0])
        torch.testing.assert_close(full(leaves[1].detach()), leaves[0].detach())
        torch.testing.assert_close(full(leaves[1].grad), leaves[0].grad)


def test_extrema_with_indices_may_be_written_to() -> None:
    def program(x: Tensor) -> Tensor:
        values, _ = x.max(0)
        values.mul_(2)
        values.square().sum().backward()
        return values.detach()

    for placement in (S(0), S(1)):
        same(program, normal(4, 3), placement)


def test_clamping_a_pending_sum_in_place() -> None:
    d = DTensor.from_local(torch.tensor(1.5), PAIR, [P()])
    assert d.clamp_(max=2) is d and d.placements == (P(),)
    assert d.item() == 2.0


WRITES = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(-2),
    "abs_": lambda t: t.abs_(),
    "relu": lambda t: F.relu(t, inplace=True),
    "slice": lambda t: t[1:].exp_(),
    "setitem": lambda t: t.__setitem__(0, 7.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 3.0),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(t.exp()),
    "out": lambda t: torch.exp(t.clone(), out=t),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("placement", [P(), P("avg"), P("max"), S(0)])
def test_every_write_is_right_or_refused(write: Callable, placement: sw.Placement) -> None:
    x = torch.tensor([1.5, -2.0, 0.5], dtype=torch.float64)
    d, expected = sw.distribute_tensor(x, PAIR, [placement]), x.clone()
    write(expected)
    try:
        write(d)
    except sw.errors.InPlaceError:
        assert isinstance(placement, P)
        expected = x
    assert d.placements == (placement,)
    torch.testing.assert_close(d.full_tensor(), expected)


MADE_WITHOUT_AUTOGRAD: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: x.max(0).values,
    "linear": lambda x: F.linear(x.detach().view(2, 2, 4).permute(1, 0, 2), x.detach(), x.detach()[:, 0]),
    "gathered": lambda x: x.detach().flip(0) @ x.detach(),
    "scanned": lambda x: x.detach().cumprod(0),
}


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
@pytest.mark.parametrize("name", MADE_WITHOUT_AUTOGRAD)
def test_what_was_made_without_autograd_may_be_written_to_with_it(name: str, placement: sw.Placement) -> None:
    """Kernels may make it a view of something: torch does not write to views that were made without autograd."""

    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            y = MADE_WITHOUT_AUTOGRAD[name](x)
        y[-1] = x[0, 0]
        y.flatten()[0].copy_(x[1, 1])
        (y * y).sum().backward()
        return y, x.grad

    for mesh in MESHES:
        same(program, normal(4, 4), placement, mesh=mesh)


def test_a_view_without_autograd_of_what_has_a_history_is_refused() -> None:
    y = place(normal(4, 4), S(0)).requires_grad_() * 1
    with torch.no_grad():
        view = y.view(16)
    with pytest.raises(RuntimeError, match=r"in-place operation|modified inplace"):
        view.mul_(y.view(16))


@pytest.mark.parametrize("index", [slice(None), ..., (slice(None), slice(None))], ids=str)
def test_what_is_set_to_itself(index: Any) -> None:
    """Nothing is written, so its elements may share memory."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = (x.detach() * 2).expand(2, 4)
        y[index] = y
        return (y,)

    for placement in (S(0), P(), R):
        same(program, normal(4), placement)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_write_to_a_part_of_what_it_reads(mesh: tuple[int, ...]) -> None:
    """Torch refuses some overlaps in memory, but a rank with a single row may see another one than the whole has."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = (x.detach() * 1)[::2, :, 2]
        y[::2] += y
        z = (x.detach() * 1)[:1]
        z[::2, :, 1].mul_(z[..., 1])
        return y, z

    for placement in (S(1), S(0), R):
        same(program, normal(1, 3, 4), placement, mesh=mesh)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumprod", "logcumsumexp"])
@pytest.mark.parametrize("dim", [0, 1])
def test_writes_to_what_the_backward_pass_needs_are_noticed(name: str, dim: int) -> None:
    y: Any = getattr(place(normal(4, 4), S(dim)).requires_grad_(), name)(1)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()


def test_parts_of_a_result_whose_gradient_is_retained_may_be_written_to() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.softmax(1)
        y.retain_grad()
        y.narrow(0, 0, 1).add_(0.75)
        y[3, :] = 2.0
        return y

    expected, found = (program(x.requires_grad_()) for x in (normal(4, 4), place(normal(4, 4), S(1))))
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,)])
@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_strided_parameters_of_a_group_norm_may_be_written_to(placement: sw.Placement, mesh: tuple[int, ...]) -> None:
    """Torch keeps copies of them, also where a rank has one of the numbers, or none."""

    def program(film: Tensor) -> tuple[Any, ...]:
        x = beside(film, normal(2, 4, 3)).requires_grad_()
        y = F.group_norm(x, 2, *film.unbind(1))
        with torch.no_grad():
            film.add_(1)
        y.sin().sum().backward()
        return y, x.grad

    same(program, normal(4, 2), placement, mesh=mesh)


def test_writes_to_contiguous_parameters_of_a_group_norm_are_noticed_by_all_ranks() -> None:
    weight = place(normal(4), S(0), mesh=(3,)).requires_grad_()
    y = F.group_norm(beside(weight, normal(2, 4, 3)), 2, weight)
    with torch.no_grad():
        weight.add_(1)
    with ranks_compared(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sin().sum().backward()


RESHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda x: torch.einsum("ij,ij->", x[0].mT, x[0].mT),
    "matmul": lambda x: x.mT.unsqueeze(1) @ x.unsqueeze(0),
    "tensordot": lambda x: torch.tensordot(x.mT, x.mT, ([0], [0])),
    "inner": lambda x: torch.inner(x.mT, x.mT),
    "bilinear": lambda x: F.bilinear(x.mT, x.mT, beside(x, torch.ones(2, 3, 3, dtype=x.dtype))),
}


@pytest.mark.parametrize("mesh", [(2,), (4,)])
@pytest.mark.parametrize("placement", [S(0), S(1), S(2)], ids=str)
@pytest.mark.parametrize("name", RESHAPED)
def test_what_a_product_keeps_reshaped_may_be_written_to(
    name: str, placement: sw.Placement, mesh: tuple[int, ...]
) -> None:
    """Torch keeps copies of what it cannot reshape; where some ranks hold one of the numbers and others more, or none,
    all keep copies."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * 1
        z = RESHAPED[name](y)
        with torch.no_grad():
            y.neg_()
        with ranks_compared():
            z.sin().sum().backward()
        return z, x.grad

    same(program, normal(3, 3, 3), placement, mesh=mesh)


@pytest.mark.parametrize("placement", [R, S(0), S(1), P()], ids=str)
def test_dropout_of_channels_of_one_sample(placement: sw.Placement) -> None:
    """Torch makes it a batch in place, and no batch again."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1
        return F.dropout3d(x, 0.0, inplace=True), x

    same(program, normal(3, 2, 2, 2), placement)
