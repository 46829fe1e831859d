"""Programs that once went wrong, by what was wrong about them. Those that only real ranks show are in
tests/multiprocess."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, full
from sweep import mesh_of, normal, place, sweep, sweep_in_place
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def same(function: Callable[[Tensor], Any], x: Tensor, *placements: sw.Placement, mesh: tuple[int, ...] = (2,)) -> None:
    """A function of a leaf gives the same on a DTensor: what it returns, and the gradient of the leaf."""
    floating = x.is_floating_point() or x.is_complex()
    leaves = [x.clone().requires_grad_(floating), place(x.clone(), *placements, mesh=mesh).requires_grad_(floating)]
    expected, found = (function(leaf) for leaf in leaves)
    torch.testing.assert_close(full(found), expected)
    if leaves[0].grad is not None:
        torch.testing.assert_close(full(leaves[1].grad), leaves[0].grad)


# Writes that were lost, or hit what they must not


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
    for batch in (1, 3):
        x, mean, var = normal(batch, 4, 4), torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        mesh = mesh_of((2, 2))
        means, variances = (
            sw.distribute_tensor(t.clone(), mesh, cut) for t, cut in zip((mean, var), cuts, strict=True)
        )
        layer(sw.distribute_tensor(x, mesh, [R, R]), means, variances, None, None, True, 0.1)
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


def test_numbers_are_copied_to_every_layout() -> None:
    accepted = sweep_in_place(lambda x: x.copy_(2), normal(3, 2))
    assert len(accepted) == 4


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (3, 3, 3)], ids=str)
def test_filled_diagonals(shape: tuple[int, ...], wrap: bool) -> None:
    accepted = sweep_in_place(lambda x: x.fill_diagonal_(2.5, wrap=wrap), normal(*shape))
    assert len(accepted) == len(shape) + 2
    d = place(normal(*shape), S(0))
    with sw.strict():
        d.fill_diagonal_(1.0, wrap=wrap)


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


# Extrema, products and norms


def summed_then_doubled(x: Tensor) -> Tensor:
    """What the sums were taken of is written to before their gradient comes."""
    y = x * 1
    z = y.cumsum(0)
    y.mul_(2)
    return z * y


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_an_extremum_was_taken_of_may_be_written_to(op: str) -> None:
    def program(x: Tensor) -> Tensor:
        out = summed_then_doubled(x)
        out.sum().backward()
        return out.detach()

    same(program, normal(4, 3), P(op))


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extremum_in_a_checkpoint(op: str) -> None:
    def program(x: Tensor) -> Tensor:
        out = checkpoint(summed_then_doubled, x, use_reentrant=False)
        out.square().sum().backward()
        return out.detach()

    same(program, normal(4, 3), P(op))


def test_extrema_with_indices_may_be_written_to() -> None:
    def program(x: Tensor) -> Tensor:
        values, _ = x.max(0)
        values.mul_(2)
        values.square().sum().backward()
        return values.detach()

    for placement in (S(0), S(1)):
        same(program, normal(4, 3), placement)


def test_gradients_of_products() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.prod(0)
        seen = []
        y.register_hook(lambda g: seen.append(full(g)) or g * g + 1)
        (y**2).sum().backward()
        return seen[0]

    for placement in (S(0), S(1), R):
        same(program, normal(5, 3), placement)


def test_products_of_any_order() -> None:
    zeros = normal(5, 3).index_fill(1, torch.tensor([1]), 0)
    for x in (normal(5, 3), zeros, zeros.index_fill(0, torch.tensor([2]), 0)):
        sweep(lambda x: x.prod(0), x)
        sweep(lambda x: x.prod(1, keepdim=True), x)
        sweep(lambda x: x.prod(), x)

    def second(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.prod(0).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    same(second, normal(5, 3), S(0))
    assert place(normal(5, 3), S(0)).prod(0).placements == (P("product"),), "where nobody asks for a gradient"


def test_norms_and_products_in_reentrant_checkpoints() -> None:
    for function in (lambda t: t.exp().norm(), lambda t: t.exp().prod()):

        def program(x: Tensor, function: Any = function) -> Tensor:
            out = checkpoint(function, x, use_reentrant=True)
            (out * out).backward()
            return out.detach()

        for placement in (S(0), S(1)):
            same(program, normal(3, 2), placement)


def test_an_average_in_a_reentrant_checkpoint() -> None:
    def program(x: Tensor) -> Tensor:
        out = checkpoint(lambda t: t * 2, x, use_reentrant=True)
        out.sum().backward()
        return out.detach()

    same(program, normal(3, 2), P("avg"))


@pytest.mark.parametrize("placement", [P("product"), P("norm", 2.0)], ids=str)
def test_terms_of_products_and_norms_are_reduced_when_they_require_gradients(placement: sw.Placement) -> None:
    """Their gradients would be no gradient of the whole."""
    for ask in (lambda d: d.requires_grad_(), lambda d: setattr(d, "requires_grad", True), nn.Parameter):
        d = sw.DTensor.from_local(torch.tensor([2.0, 3.0]), mesh_of((2,)), [placement])
        view, value = d[:1], d.full_tensor()
        made = ask(d)
        leaf = made if isinstance(made, nn.Parameter) else d
        assert leaf.requires_grad and leaf.placements == (R,)
        leaf.square().sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * value)
        torch.testing.assert_close(view.full_tensor(), value[:1])
    same = sw.DTensor.from_local(torch.ones(3), mesh_of((2,)), [placement]).requires_grad_(False)
    assert same.placements == (placement,)


@pytest.mark.parametrize("dim", [None, 0, -1])
def test_weight_norm_over_all_dims(dim: int | None) -> None:
    x, layers = normal(3, 6).float(), [nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)]
    weight = normal(4, 6).float()
    layers[0].weight = nn.Parameter(weight.clone())
    layers[1].weight = nn.Parameter(place(weight, S(0)))
    outs = []
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer, dim=dim)
        out = layer(beside(layer.weight, x))
        out.square().sum().backward()
        outs.append([out.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close([full(t) for t in outs[1]], outs[0])


# Checkpoints


def test_an_assignment_is_the_last_thing_in_a_checkpoint() -> None:
    mask = torch.tensor([True, False, True, False])

    def by_list(x: Tensor) -> Tensor:
        y = x * 1
        y[[0, 2]] = 0.0
        return y

    def by_mask(x: Tensor) -> Tensor:
        y = x * 1
        y[beside(x, mask)] = 0.0
        return y

    for inside in (by_list, by_mask):

        def program(x: Tensor, inside: Any = inside) -> Tensor:
            checkpoint(inside, x, use_reentrant=False).square().sum().backward()
            return x.detach()

        for placement in (R, S(0), S(1)):
            same(program, normal(4, 4), placement)


# Infinities, nothing, conjugates


def test_infinite_rows_that_nobody_looks_up() -> None:
    table, index = torch.zeros(4, 2), torch.tensor([[2, 3]])
    table[1, 0], table[2] = -math.inf, 5.0
    found = F.embedding_bag(place(index, R), place(table, S(0)), mode="max")
    assert torch.equal(found.full_tensor(), F.embedding_bag(index, table, mode="max"))


def test_infinite_weights_of_items_whose_rows_are_elsewhere() -> None:
    table, index, weights = (
        torch.ones(2, 3),
        torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([[1.0, math.inf], [1.0, 2.0]]),
    )
    expected = F.embedding_bag(index, table, per_sample_weights=weights, mode="sum")
    given = [place(x, p, mesh=(4,)) for x, p in ((index, R), (table, S(0)), (weights, R))]
    found = F.embedding_bag(given[0], given[1], per_sample_weights=given[2], mode="sum")
    assert torch.equal(found.full_tensor(), expected)


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_losses_of_no_rows(loss: Any, reduction: str) -> None:
    """Torch leaves the sum of none to chance."""
    x = normal(1, 7)
    target = torch.tensor([3]) if loss is F.multi_margin_loss else torch.tensor([[3, 1, -1, 0, 0, 0, 0]])
    for _ in range(20):
        torch.full((64,), 7e77, dtype=torch.float64)  # what memory may hold
        found = loss(place(x, S(0)), place(target, S(0)), reduction=reduction)
        torch.testing.assert_close(found.full_tensor(), loss(x, target, reduction=reduction))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_parts_of_conjugates(mode: Any) -> None:
    x = torch.complex(normal(4, 3), normal(3, 4).t())
    with mode():
        for part in (lambda t: t.imag, lambda t: t.real, torch.imag, torch.real):
            for placement in (R, S(0), P()):
                torch.testing.assert_close(part(place(x, placement).conj()).full_tensor(), part(x.conj()))


# What torch says


def test_indices_out_of_range_in_torchs_words() -> None:
    x, index, source = normal(3, 4, 2), torch.tensor([1, 4]), normal(3, 2, 2)
    calls: list[Callable[[Tensor, Tensor, Tensor], Any]] = [
        lambda x, i, s: x.index_add(1, i, s),
        lambda x, i, s: x.index_add(1, i, s, alpha=2),
        lambda x, i, s: x.transpose(0, 1).index_add(0, i, s.transpose(0, 1)),
        lambda x, i, s: x.transpose(0, 1).index_add(0, i, s.transpose(0, 1), alpha=3),
        lambda x, i, s: x.index_reduce(1, i, s, "amax", include_self=True),
        lambda x, i, s: x.index_reduce(1, i, s, "amax", include_self=False),
    ]
    for call in calls:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(x, index, source)
        for placement in (S(0), S(1)):
            with pytest.raises((IndexError, RuntimeError)) as raised:
                call(place(x, placement), place(index, R), place(source, S(0)))
            assert (type(raised.value), str(raised.value)) == (type(expected.value), str(expected.value))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_that_weigh_nothing(smoothing: float) -> None:
    x, target, weight = normal(4, 6), torch.zeros(4, dtype=torch.long), torch.ones(6, dtype=torch.float64)
    weight[0] = 0
    assert F.cross_entropy(x, target, weight, label_smoothing=smoothing).isnan()
    for placement, rows in ((S(0), S(0)), (S(1), R)):
        given = place(x, placement), place(target, rows), place(weight, R)
        assert F.cross_entropy(*given, label_smoothing=smoothing).full_tensor().isnan()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_weights_of_another_dtype(loss: Any) -> None:
    x, target, weight = normal(4, 6), torch.zeros(4, dtype=torch.long), torch.ones(6)
    with pytest.raises(RuntimeError) as expected:
        loss(x, target, weight)
    for placement, rows in ((R, R), (S(0), S(0)), (S(1), R)):
        with pytest.raises(RuntimeError) as raised:
            loss(place(x, placement), place(target, rows), place(weight, R))
        assert str(raised.value) == str(expected.value)


def test_a_source_of_another_dtype_is_refused_before_anything_moves() -> None:
    x, index, source = (
        place(normal(4, 6), S(1)),
        place(torch.zeros(4, 2, dtype=torch.long), S(0)),
        place(torch.zeros(4, 2), S(0)),
    )
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match=r"Expected self.dtype to be equal to src.dtype"):
        x.scatter(1, index, source)
    assert comm.get_total_counts() == 0


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_steps_along_dims_of_one_index_do_not_matter() -> None:
    x = normal(2, 6)
    d = place(x, S(1)).narrow(0, 1, 1).clone(memory_format=torch.preserve_format)
    torch.testing.assert_close(d.as_strided((3,), (2,)).full_tensor(), x[1:].clone().as_strided((3,), (2,)))
