"""Cross entropy whose classes are sharded, in two passes over the logits: every option of torch's and ours, gradients
of gradients, and what the backward pass may and may not write over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, check_shards, compare
from losses import with_slopes, written_out
from sweep import mesh_of, normal, place
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import shardwise as sw
from shardwise.parallel import cross_entropy
from shardwise.rules.rows import row_passes

R, S = sw.Replicate(), sw.Shard
TARGET = torch.tensor([1, 3, 0, 2, 1])
WEIGHT = torch.tensor([0.1, 2.0, 3.0, 0.5], dtype=torch.float64)
CLASSES, ROWS, BOTH = ((2,), (S(1),)), ((2,), (S(0),)), ((2, 2), (S(0), S(1)))
over_reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


@over_reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_every_option_and_its_second_gradient(reduction: str, smoothing: float, z_loss: float) -> None:
    """Against plain torch, where classes are sharded, rows, both, or neither."""
    for ignore, weight, (mesh, where) in itertools.product(
        (-100, 1), (None, R, S(0)), (CLASSES, ROWS, BOTH, ((2,), (R,)))
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore, "z_loss": z_loss}

        def loss(x: Tensor, target: Tensor, options: Any = options, weight: Any = weight) -> Tensor:
            sharded = isinstance(x, sw.DTensor)
            spread = [weight if weight is not None and p == S(1) else R for p in x.placements] if sharded else []
            given = None if weight is None else beside(x, WEIGHT, *spread)
            return (cross_entropy if sharded else written_out)(x, target, given, **options)

        rows = [p if p == S(0) else R for p in where]
        compare(with_slopes(loss), [normal(5, 4), TARGET], mesh_of(mesh), [where, rows])


def test_plain_tensors() -> None:
    x, options = normal(5, 4), {"label_smoothing": 0.1, "ignore_index": 1}
    for reduction, weight in itertools.product(("none", "mean", "sum"), (None, WEIGHT)):
        found = cross_entropy(x, TARGET, weight, reduction=reduction, z_loss=0.3, **options)
        torch.testing.assert_close(found, written_out(x, TARGET, weight, z_loss=0.3, reduction=reduction, **options))
    assert torch.equal(cross_entropy(x, TARGET, inplace_backward=True), F.cross_entropy(x, TARGET))


@over_reductions
def test_class_probabilities_with_z_loss(reduction: str) -> None:
    def loss(x: Tensor, p: Tensor) -> Tensor:
        if isinstance(x, sw.DTensor):
            return cross_entropy(x, p, reduction=reduction, z_loss=0.3)
        rows = F.cross_entropy(x, p, reduction="none") + 0.3 * x.logsumexp(1) ** 2
        return {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]

    for mesh, where in (CLASSES, ROWS, BOTH):
        compare(with_slopes(loss), [normal(5, 4), normal(5, 4).softmax(1)], mesh_of(mesh), [where, where])


def test_gradients_are_those_of_the_values() -> None:
    """By finite differences, to the second order."""
    target = TARGET[:3].clamp(max=3)

    def loss(x: Tensor) -> Tensor:
        d = sw.DTensor.from_local(x, mesh_of((2,)), [R]).redistribute(placements=[S(1)])
        return cross_entropy(d, beside(d, target), label_smoothing=0.1, ignore_index=0, z_loss=0.2).full_tensor()

    x = normal(3, 5).requires_grad_()
    torch.autograd.gradcheck(loss, x)
    torch.autograd.gradgradcheck(loss, x)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 3, 4), (5,)], ids=str)
def test_blocks_of_any_size_give_the_same(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in all dims but the second, in blocks of a few rows, of one, and of less than one."""
    x = normal(*shape)
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = torch.arange(torch.Size(rows).numel()).view(rows) % 5
    found = []
    for most in (1 << 17, 30, 1):
        monkeypatch.setattr(row_passes, "CACHED", most)
        dim = min(1, len(shape) - 1)
        for dtype in (torch.float64, torch.bfloat16):
            d = place(x.to(dtype), S(dim)).requires_grad_()
            loss = cross_entropy(d, place(target, R), label_smoothing=0.1, z_loss=0.1)
            loss.backward()
            (of_softmax,) = torch.autograd.grad((F.log_softmax(d, dim) * F.softmax(d, dim)).sum(), d)
            found.append([loss.full_tensor(), d.grad.full_tensor(), of_softmax.full_tensor()])
    for again in (found[2:4], found[4:]):
        torch.testing.assert_close(again, found[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_of_any_width_name_classes(width: torch.dtype) -> None:
    """Also of more classes than a narrow integer has numbers for, and as indices into class weights."""
    x, target, class_weights = normal(5, 300), torch.tensor([1, 120, 0, 2, 1]), normal(300).abs()
    for (mesh, where), weight in itertools.product((CLASSES, ROWS, BOTH, ((2,), (R,))), (None, R, S(0))):
        rows = [p if p == S(0) else R for p in where]
        given = [sw.distribute_tensor(t, mesh_of(mesh), at) for t, at in ((x, where), (target.to(width), rows))]
        spread = [weight if weight is not None and p == S(1) else R for p in where]
        w = None if weight is None else sw.distribute_tensor(class_weights, mesh_of(mesh), spread)
        expected = F.cross_entropy(x, target, None if weight is None else class_weights)
        torch.testing.assert_close(cross_entropy(*given, w).full_tensor(), expected)
        of_squares = cross_entropy(x, target, None if weight is None else class_weights, z_loss=0.1)
        torch.testing.assert_close(cross_entropy(*given, w, z_loss=0.1).full_tensor(), of_squares)
        if width == torch.uint8:  # which torch takes as well
            torch.testing.assert_close(F.cross_entropy(*given, w).full_tensor(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_nearer_than_torch_s(dtype: torch.dtype) -> None:
    x, target = (8 * normal(64, 96)).to(dtype), torch.arange(64)
    x[torch.arange(32), target[:32]] += 12  # rows that are sure of their target
    exact, plain = x.double().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(exact, target, reduction="sum").backward()
    F.cross_entropy(plain, target, reduction="sum").backward()
    error = (plain.grad.double() - exact.grad).abs()
    for inplace in (False, True):
        d = place(x, S(1)).requires_grad_()
        cross_entropy(d * 1, place(target, R), reduction="sum", inplace_backward=inplace).backward()
        ours = (d.grad.full_tensor().double() - exact.grad).abs()
        assert ours.max() <= error.max()
        assert ours.mean() <= error.mean()
        assert ours[:32].sum() <= error[:32].sum()


# What the backward pass writes over


def gradient_of(x: Tensor, **options: Any) -> Tensor:
    leaf = x.clone().requires_grad_()
    F.cross_entropy(leaf, TARGET, **options).backward()
    return leaf.grad


@pytest.mark.parametrize(("mesh", "where"), [CLASSES, ROWS, BOTH, ((2,), (R,))], ids=str)
def test_logits_are_written_over_where_that_is_allowed(mesh: tuple[int, ...], where: tuple[Any, ...]) -> None:
    x, leaf = normal(5, 4), place(normal(5, 4), *where, mesh=mesh).requires_grad_()
    logits, target = leaf * 1, place(TARGET, *[p if p == S(0) else R for p in where], mesh=mesh)
    cross_entropy(logits, target, inplace_backward=True).backward()
    check_shards(leaf.grad)
    torch.testing.assert_close(leaf.grad.full_tensor(), gradient_of(x))
    torch.testing.assert_close(logits.detach().full_tensor(), gradient_of(x))


@pytest.mark.parametrize("function", [F.cross_entropy, cross_entropy])
def test_logits_are_not_written_over_otherwise(function: Callable[..., Tensor]) -> None:
    """By default, of a leaf or a view of one, and of elements that are several at once."""
    allowed = {"inplace_backward": True} if function is cross_entropy else {}
    leaf, target = place(normal(5, 4), S(1)).requires_grad_(), place(TARGET, R)
    function(leaf, target, **allowed).backward()
    function(leaf[:], target, **allowed).backward()
    assert torch.equal(leaf.detach().full_tensor(), normal(5, 4))
    torch.testing.assert_close(leaf.grad.full_tensor(), 2 * gradient_of(normal(5, 4)))
    row = place(normal(1, 4), S(1)).requires_grad_()
    rows = (row * 1).expand(5, 4)
    function(rows, target, **allowed).backward()
    torch.testing.assert_close(rows.detach().full_tensor(), normal(1, 4).expand(5, 4))
    torch.testing.assert_close(row.grad.full_tensor(), gradient_of(normal(1, 4).expand(5, 4)).sum(0, keepdim=True))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_graph_that_is_retained_can_be_passed_again(inplace: bool) -> None:
    leaf = place(normal(5, 4), S(1)).requires_grad_()
    loss = cross_entropy(leaf * 1, place(TARGET, R), label_smoothing=0.1, inplace_backward=inplace)
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        torch.testing.assert_close(grad.full_tensor(), gradient_of(normal(5, 4), label_smoothing=0.1))
    loss.backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), gradient_of(normal(5, 4), label_smoothing=0.1))


def test_who_needs_logits_that_were_written_over_is_told() -> None:
    leaf = place(normal(5, 4), S(1)).requires_grad_()
    logits = leaf.tanh()  # which keeps its result
    loss = cross_entropy(logits, place(TARGET, R), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_may_be_written_to_after_the_loss() -> None:
    """As in torch: it keeps exponentials, not logits."""
    leaf = place(normal(5, 4), S(1)).requires_grad_()
    logits = leaf * 1
    loss = F.cross_entropy(logits, place(TARGET, R))
    with torch.no_grad():
        logits.zero_()
    loss.backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), gradient_of(normal(5, 4)))


def test_what_listeners_were_handed_stays_as_it_was() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append((x, x.clone()))
        return x

    leaf = place(normal(5, 4), S(1)).requires_grad_()
    with saved_tensors_hooks(keep, lambda x: x):
        loss = F.cross_entropy(leaf, place(TARGET, R))
    loss.backward()
    assert kept and all(torch.equal(x, before) for x, before in kept)
    torch.testing.assert_close(leaf.grad.full_tensor(), gradient_of(normal(5, 4)))


def test_z_loss_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"z_loss is a factor .* and is not negative; got -1"):
        cross_entropy(place(normal(5, 4), S(1)), place(TARGET, R), z_loss=-1)
